"""What `symm` checks before ranks map each other's memory, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from sundog.backends import symm
from sundog.backends._rendezvous import Facts, Locality, check, locality
from sundog.errors import RankMismatch

VERSIONS = (("torch", "2.11.0"), ("triton", "3.6.0"), ("sundog", "0.1.0"))
HERE = Locality("node", "b00t", "pid:[1]")
ONE = Facts(HERE, 1, "A", ("B", "C"), VERSIONS, 1 << 30, 8 << 30, False)


def on(gpu: str, **changes: object) -> Facts:
    reaches = tuple(other for other in "ABC" if other != gpu)
    return dataclasses.replace(ONE, gpu=gpu, **{"reaches": reaches, **changes})


def refused(*everyone: Facts) -> list[str]:
    with pytest.raises(RankMismatch) as caught:
        check(everyone)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_ranks_that_fit_are_fine():
    check([on("A"), on("B"), on("C")])
    check([on("A", overlap=True), on("A", overlap=True)])
    check([on("A")])


def test_every_bad_pair_is_listed_at_once():
    older = (("torch", "2.10.0"), *VERSIONS[1:])
    assert refused(on("A"), on("B", heap_size=1 << 20), on("C", versions=older)) == [
        "ranks 0 and 1: heap_size 1,073,741,824 and 1,048,576",
        "ranks 0 and 2: torch 2.11.0 and 2.10.0",
        "ranks 1 and 2: torch 2.11.0 and 2.10.0",
        "ranks 1 and 2: heap_size 1,048,576 and 1,073,741,824",
    ]


def test_peer_access_goes_both_ways():
    assert refused(on("A", reaches=("C",)), on("B"), on("C")) == [
        "ranks 0 and 1: no peer access between A and B"
    ]
    assert refused(on("A"), on("B", reaches=("C",)), on("C")) == [
        "ranks 0 and 1: no peer access between A and B"
    ]


def test_sharing_a_gpu_must_be_allowed_on_both():
    lines = refused(on("A", overlap=True), on("A"), on("B"))
    assert len(lines) == 1
    assert lines[0].startswith("ranks 0 and 1: both on A; to allow it set TORCH_SYMM_MEM_ALLOW")


def test_machines_differ():
    there = Locality("other", "l8er", "pid:[1]")
    assert refused(on("A"), on("B", where=there)) == [
        "ranks 0 and 1: on different machines, node (boot id b00t) and other (boot id l8er)"
    ]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (HERE, ""),
        (Locality("alias", "b00t", "pid:[1]"), ""),  # a container of this machine
        (Locality("node", "l8er", "pid:[1]"), "node (boot id b00t) and node (boot id l8er)"),
        (Locality("node", "", "pid:[1]"), "node (boot id b00t) and node (boot id unknown)"),
        (Locality("node", "b00t", "pid:[2]"), "pid:[1] (node) and pid:[2] (node)"),
    ],
)
def test_where_processes_must_be_to_reach_each_other(other: Locality, words: str) -> None:
    assert words in HERE.why_apart(other)
    assert bool(words) == bool(HERE.why_apart(other))


def test_a_machine_that_tells_no_boot_id_is_known_by_its_name() -> None:
    one, same, other = (Locality(host, "", "pid:[1]") for host in ("a", "a", "b"))
    assert one.why_apart(same) == ""
    assert "different machines, a (boot id unknown) and b" in one.why_apart(other)


def test_this_process_can_reach_itself() -> None:
    here = locality()
    assert here.boot_id
    assert here.pid_namespace.startswith("pid:[")
    assert here.why_apart(locality()) == ""


def test_memory_of_ranks_that_share_a_gpu_adds_up():
    small = {"free": 3 << 29, "overlap": True}
    assert refused(on("A", **small), on("A", **small), on("B", **small)) == [
        "A: the heaps of rank 0, 1 take 2,147,483,648 bytes, and 1,610,612,736 are free"
    ]
    later = {"free": 8 << 30, "overlap": True}  # seen after another process gave some back
    assert len(refused(on("A", **small), on("A", **later))) == 1, "what is surely free counts"
    check([on("A", free=1 << 30), on("B")])


def test_torch_finds_the_members_of_a_part_of_a_job_by_name() -> None:
    """Its symmetric memory resolves the name in c10d, as here, and uses what it finds there."""
    inner = dist.HashStore()
    for machine in (0, 1):
        name = symm._shared_by(f"@{machine}", rank=1, size=2, store=inner)
        members = dist.distributed_c10d._resolve_process_group(name)
        assert (members.rank(), members.size()) == (1, 2)
        members.get_group_store().set("Symmetric/7/1", f"of machine {machine}")
        assert symm._shared_by(f"@{machine}", 1, 2, inner) == name, "a second world of the group"
        store = dist.distributed_c10d._resolve_process_group(name).get_group_store()
        assert store.get("Symmetric/7/1") == f"of machine {machine}".encode()
        dist.distributed_c10d._unregister_process_group(name)
    assert symm._shared_by("", 0, 1, inner) == "", "torch knows its default group"


def test_names_are_registered_again_after_torch_forgot_them() -> None:
    """Destroying the default group ends all groups, those of closed worlds too."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    for job in range(2):
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            name = symm._shared_by("tp", 0, 1, store)
            resolve(name).get_group_store().set("Symmetric/0/0", f"job {job}")
            assert store.num_keys() > 0, "torch's keys are in this job's store"
        finally:
            dist.destroy_process_group()
        with pytest.raises(RuntimeError, match="Could not resolve"):
            resolve(name)
