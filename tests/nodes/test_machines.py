"""Which ranks are on one machine, and how chunks go through stages: no machine is needed."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.jobs import job

import sundog
from sundog.backends._rendezvous import Locality, StoreExchange
from sundog.hardware.description import Network, read
from sundog.nodes import pipeline
from sundog.nodes.machines import sorted_by_machine
from sundog.nodes.pipeline import (
    Chunk,
    NodesConfig,
    SpanProblem,
    chosen,
    chunks,
    padded,
    pipelined,
    span_time,
)


def _places(*places: tuple[str, str, str]) -> list[Locality]:
    return [Locality(*place) for place in places]


HERE, THERE = ("a", "boot1", "pid:1"), ("b", "boot2", "pid:1")
OTHER_CONTAINER = ("a", "boot1", "pid:2")


def test_a_machine_is_known_by_its_boot_and_pid_namespace() -> None:
    assert sorted_by_machine(_places(HERE, HERE)).count == 1
    renamed = ("c", "boot1", "pid:1")
    assert sorted_by_machine(_places(HERE, renamed)).count == 1
    two = sorted_by_machine(_places(HERE, HERE, THERE, THERE))
    assert (two.names, two.size) == (("a", "b"), 2)
    assert [two.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert list(two.counterparts(1)) == [1, 3]
    assert sorted_by_machine(_places(HERE, OTHER_CONTAINER)).count == 2


@pytest.mark.parametrize("places", [(HERE, THERE, HERE, THERE), (HERE, HERE, THERE)])
def test_ranks_must_be_numbered_machine_by_machine(places: tuple) -> None:
    with pytest.raises(ValueError, match=r"(?s)machine 1 \(b\): rank .*torchrun --nnodes 2"):
        sorted_by_machine(_places(*places))


def test_chunks_cover_all_and_are_multiples() -> None:
    found = chunks(1000, 4, 4 * 300, multiple=8)
    assert found[0].start == 0
    assert found[-1].stop == 1000
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    assert all(chunk.numel % 8 == 0 for chunk in found[:-1])
    assert chunks(5, 8, 1, multiple=4) == [Chunk(0, 4), Chunk(4, 5)]
    assert chunks(0, 4, 100) == []
    assert padded(torch.ones(5), 4).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_transfer_is_under_way_while_the_next_chunk_begins() -> None:
    """The second stage of a chunk, which waits, comes after the first one of the next chunk."""
    seen: list[tuple[str, int]] = []

    def first(chunk: Chunk, _: object) -> int:
        seen.append(("first", chunk.start))
        return chunk.start

    def second(chunk: Chunk, value: int) -> None:
        assert value == chunk.start
        seen.append(("second", chunk.start))

    pipelined([Chunk(n, n + 1) for n in range(3)], first, second)
    assert seen == [
        ("first", 0), ("first", 1), ("second", 0), ("first", 2), ("second", 1), ("second", 2),
    ]  # fmt: skip


def test_one_shot_wins_where_latency_counts() -> None:
    machine = read("h200x8-2nodes")
    assert machine.network is not None
    slow = dataclasses.replace(machine, network=Network(machine.network.rate, 1e-3))
    small, large = (SpanProblem("all_reduce", n, 8, 8) for n in (1 << 14, 1 << 30))
    one, two = NodesConfig(1 << 22, one_shot=True), NodesConfig(1 << 22)
    assert span_time(small, one, slow).seconds < span_time(small, two, slow).seconds
    assert span_time(large, two, machine).seconds < span_time(large, one, machine).seconds
    bound = 2 * 7 / 8 * (1 << 30) / 8 / machine.network.rate
    expected = span_time(large, two, machine)
    assert expected.between == pytest.approx(bound, rel=0.01)
    assert max(expected.between, expected.inside) < expected.seconds < 1.1 * expected.inside


@pytest.mark.parametrize(
    ("op", "nbytes", "nodes", "chosen_is"),
    [
        ("all_reduce", 16, 2, "led, one shot"),
        ("all_reduce", 16, 4, "led"),  # 6 messages; by one shot 12
        ("all_reduce", 48_000, 2, "led, one shot"),
        ("all_reduce", 48_000, 3, ""),  # a leader would send 96 KB
        ("all_reduce", 4_000, 100, ""),  # of a part of 2 KB one shot sends 50 times the data
        (
            "all_reduce",
            800,
            100,
            "one shot",
        ),  # 79 KB for a leader; of 400 bytes one shot costs less
        ("all_reduce", 600, 100, "led"),
        ("reduce_scatter", 65_536, 4, "led"),
        ("reduce_scatter", 99_000, 4, ""),
        ("all_gather", 16_384, 2, "led"),
        ("all_gather", 65_536, 2, ""),
        ("all_to_all", 32_768, 2, "led"),
        ("all_to_all", 90_000, 2, ""),
        ("broadcast", 16, 4, "led"),
        ("broadcast", 384_000, 2, ""),
        ("all_gather_matmul", 16, 2, ""),
    ],
)
def test_the_rule_sends_few_bytes(op: str, nbytes: int, nodes: int, chosen_is: str) -> None:
    """On machines of two ranks, whose network is not described."""
    local: Any = SimpleNamespace(_target="unknown-gpu", size=2, num_sms=132, backend="symm")
    config, why = chosen(SpanProblem(op, nbytes, nodes, 2), local)
    words = ["led"] * config.led + ["one shot"] * config.one_shot
    assert ", ".join(words) == chosen_is, why


def test_one_shot_by_rule_sends_no_more_bytes() -> None:
    """With what messages cost, by any number of machines."""
    message = pipeline._MESSAGE
    for nodes in range(2, 40):
        local: Any = SimpleNamespace(_target="unknown-gpu", size=8, num_sms=132, backend="symm")
        for nbytes in (16, 4_000, 40_000, 400_000, 4_000_000):
            config, _ = chosen(SpanProblem("all_reduce", nbytes, nodes, 8), local)
            part = nbytes if config.led else nbytes / 8
            one = nodes * (nodes - 1) * (part + message)
            two = 2 * (nodes - 1) * (part + message * (1 if config.led else nodes))
            assert config.one_shot == (one <= two), (nodes, nbytes)


def test_auto_goes_by_the_description_that_has_a_network() -> None:
    """Of 8 H200 there are two: one alone, and one of several machines."""
    local: Any = SimpleNamespace(_target="nvidia-h200", size=8, num_sms=132, backend="symm")
    for nbytes, shots in ((1 << 12, 1), (1 << 24, 2)):
        config, why = chosen(SpanProblem("all_reduce", nbytes, 4, 8), local)
        assert "the model of h200x8-2nodes expects" in why
        assert config.one_shot == (shots == 1)


@pytest.mark.sim_only
def test_ranks_of_one_machine_tell_their_facts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once where each is and what its heap is; then that all heaps are mapped; then a barrier."""
    told: list[tuple[str, bool]] = []
    come = StoreExchange.come

    def noted(self: StoreExchange, value: object, what: str, *rest: object) -> object:
        told.append((what, value is not None))
        return come(self, value, what, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreExchange, "come", noted)

    def opened(rank: int) -> list[tuple[str, bool]]:
        with sundog.init("shm", heap_size=1 << 20):
            return list(told)

    opening = "opening of the world"
    expected = [(opening, True), (opening, False), ("barrier", True)]
    assert job(opened, 2) == [expected] * 2
