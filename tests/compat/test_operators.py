"""torch.ops.symm_mem and the functional collectives in a rank: torch's results, and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import Report, check

SIZE, COUNT = 3, 6
symm, functional = torch.ops.symm_mem, torch.ops._c10d_functional


def start() -> tuple[int, str]:
    dist.init_process_group("nccl")
    assert dist.group.WORLD is not None
    torch.manual_seed(0)
    return dist.get_rank(), dist.group.WORLD.group_name


def symmetric(numel: int) -> Tensor:
    assert dist.group.WORLD is not None
    x = symm_mem.empty(numel, dtype=torch.float32, device=torch.device("cuda"))
    symm_mem.rendezvous(x, dist.group.WORLD)
    return x


def checked(program: Callable[[], Any]) -> Report:
    return check(as_rank(program), SIZE, 4)


# Each gets a symmetric tensor with this rank's row of `rows`, other ones, and the group.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "one_shot": lambda x, out, whole, g: symm.one_shot_all_reduce(x, "sum", g),
    "one_shot_out": lambda x, out, whole, g: symm.one_shot_all_reduce_out(x, "sum", g, out),
    "one_shot_copy": lambda x, out, whole, g: symm.one_shot_all_reduce_copy(
        symmetric(COUNT), x.clone(), "sum", g
    ),
    "one_shot_copy_out": lambda x, out, whole, g: symm.one_shot_all_reduce_copy_out(
        symmetric(COUNT), x.clone(), "sum", g, out
    ),
    "two_shot": lambda x, out, whole, g: symm.two_shot_all_reduce_(x, "sum", g),
    "two_shot_out": lambda x, out, whole, g: symm.two_shot_all_reduce_out(x, "sum", g, out),
    "multimem": lambda x, out, whole, g: symm.multimem_all_reduce_(x, "sum", g),
    "multimem_one_shot": lambda x, out, whole, g: symm.multimem_one_shot_all_reduce(x, "sum", g),
    "functional": lambda x, out, whole, g: functional.all_reduce(x, "sum", g),
    "functional_in_place": lambda x, out, whole, g: functional.all_reduce_(x, "sum", g),
    "functional_list": lambda x, out, whole, g: functional.all_reduce_coalesced([x], "sum", g)[0],
}
GATHERS: dict[str, Callable[..., Tensor]] = {
    "multimem": lambda x, whole, g: symm.multimem_all_gather_out(x, g, whole),
    "low_contention": lambda x, whole, g: symm._low_contention_all_gather(x, g),
    "functional_out": lambda x, whole, g: functional.all_gather_into_tensor_out(
        x, SIZE, g, out=whole
    ),
}
SCATTERS: dict[str, Callable[..., Tensor]] = {
    "symm_mem": lambda x, part, g: symm.reduce_scatter_out(x, g, False, part),
    "symm_mem_last_dim": lambda x, part, g: symm.reduce_scatter_out(x, g, True, part),
    "low_contention": lambda x, part, g: symm._low_contention_reduce_scatter(x, "sum", g),
    "functional": lambda x, part, g: functional.reduce_scatter_tensor(x, "sum", SIZE, g),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_all_reduce(name: str) -> None:
    def program() -> None:
        rank, group = start()
        rows = torch.randint(-9, 9, (SIZE, COUNT)).float()
        x, whole = symmetric(COUNT).copy_(rows[rank]), symmetric(SIZE * COUNT)
        found = OPERATORS[name](x, torch.empty(COUNT, device="cuda"), whole, group)
        assert torch.equal(functional.wait_tensor(found), rows.sum(0))

    report = checked(program)
    assert not report.findings + report.remarks, report


@pytest.mark.parametrize("name", GATHERS)
def test_all_gather(name: str) -> None:
    def program() -> None:
        rank, group = start()
        rows = torch.randn(SIZE, COUNT)
        found = GATHERS[name](symmetric(COUNT).copy_(rows[rank]), symmetric(SIZE * COUNT), group)
        assert torch.equal(found.view(SIZE, COUNT), rows)

    report = checked(program)
    assert not report.findings + report.remarks, report


@pytest.mark.parametrize("name", SCATTERS)
def test_reduce_scatter(name: str) -> None:
    def program() -> None:
        rank, group = start()
        rows = torch.randint(-9, 9, (SIZE, COUNT)).float()
        part = torch.empty(COUNT // SIZE, device="cuda")
        found = SCATTERS[name](symmetric(COUNT).copy_(rows[rank]), part, group)
        assert torch.equal(found, rows.sum(0).chunk(SIZE)[rank])

    report = checked(program)
    assert not report.findings + report.remarks, report


def test_reduce_to_a_root_broadcast_and_all_to_all() -> None:
    def program() -> None:
        rank, group = start()
        rows = torch.randint(-9, 9, (SIZE, COUNT)).float()
        x, out = symmetric(COUNT).copy_(rows[rank]), torch.zeros(COUNT, device="cuda")
        symm.multimem_one_shot_reduce_out(x, "sum", 1, group, out)
        assert torch.equal(out, rows.sum(0) if rank == 1 else torch.zeros(COUNT))
        assert torch.equal(functional.broadcast(x, 2, group), rows[2])
        found = functional.all_to_all_single(x, [2] * SIZE, [2] * SIZE, group)
        assert torch.equal(found, rows[:, 2 * rank : 2 * rank + 2].reshape(-1))
        symm.memset32_(x.view(torch.int32), 1, 7, 2)
        assert x.view(torch.int32)[1:3].tolist() == [7, 7]

    report = checked(program)
    assert not report.findings + report.remarks, report


@pytest.mark.parametrize("name", ["two_shot", "multimem"])
def test_peers_may_be_read_after_an_all_reduce_in_place(name: str) -> None:
    """Both kernels meet at their end, when each rank has stored its part to all."""

    def program() -> None:
        rank, group = start()
        x = symmetric(COUNT).fill_(rank + 1)
        OPERATORS[name](x, None, None, group)
        total = SIZE * (SIZE + 1) / 2
        assert [each[0].item() for each in symm.get_remote_tensors(x, group)] == [total] * SIZE

    report = checked(program)
    assert not report.findings + report.remarks, report


def test_a_peer_that_changes_the_result_is_a_race() -> None:
    """What an operator does to memory is seen where it does it: a write after it has no order."""

    def program() -> None:
        rank, group = start()
        x = symmetric(COUNT).fill_(rank + 1)
        symm.two_shot_all_reduce_(x, "sum", group)
        symm.get_remote_tensors(x, group)[(rank + 1) % SIZE].fill_(rank)
        symm.two_shot_all_reduce_(x, "sum", group)

    assert not checked(program).findings  # the operators order the writes between them

    def without_the_last() -> None:
        rank, group = start()
        x = symmetric(COUNT).fill_(rank + 1)
        symm.two_shot_all_reduce_(x, "sum", group)
        symm.get_remote_tensors(x, group)[(rank + 1) % SIZE].fill_(rank)
        x.sum()

    assert {each.rule for each in checked(without_the_last).findings} == {"no order"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, g: symm.one_shot_all_reduce(x.clone(), "sum", g), "is not symmetric: allocate"),
        (lambda x, g: symm.one_shot_all_reduce(x, "most", g), "reduce_op='most': expected one of"),
        (lambda x, g: symm.two_shot_all_reduce_(x, "sum", "nobody"), "no process group named"),
    ],
)
def test_what_torch_would_not_take_is_said(call: Callable[..., Any], said: str) -> None:
    def program() -> None:
        _, group = start()
        call(symmetric(COUNT), group)

    report = checked(program)
    assert said in str(report.findings[0].why), report
