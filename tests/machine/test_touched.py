"""What an operation of a host touches: rows by index, sparse tensors, copies to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

import sundog
from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import Report, check

ROWS, WIDTH = 4, 8


def rows(first: int) -> Tensor:
    return torch.tensor([first, first + 1])


def mask(first: int) -> Tensor:
    return ((torch.arange(ROWS) >= first) & (torch.arange(ROWS) < first + 2))[:, None]


def elements(first: int) -> Tensor:
    return rows(first)[:, None].expand(2, WIDTH)


def put_rows(x: Tensor, first: int) -> None:
    x[rows(first)] = torch.ones(2, WIDTH)


def put_by_mask(x: Tensor, first: int) -> None:
    x[mask(first)[:, 0]] = 1.0


WRITES: dict[str, Callable[[Tensor, int], Any]] = {  # each writes two rows, from `first`
    "index_put": put_rows,
    "mask": put_by_mask,
    "accumulate": lambda x, n: x.index_put_((rows(n),), torch.ones(WIDTH), accumulate=True),
    "index_copy": lambda x, n: x.index_copy_(0, rows(n), torch.ones(2, WIDTH)),
    "index_fill": lambda x, n: x.index_fill_(0, rows(n), 2.0),
    "index_add": lambda x, n: x.index_add_(0, rows(n), torch.ones(2, WIDTH), alpha=0),
    "scatter": lambda x, n: x.scatter_(0, elements(n), torch.ones(2, WIDTH)),
    "scatter_value": lambda x, n: x.scatter_(0, elements(n), 3.0),
    "scatter_add": lambda x, n: x.scatter_add_(0, elements(n), torch.ones(2, WIDTH)),
    "masked_fill": lambda x, n: x.masked_fill_(mask(n), 1.0),
    "masked_scatter": lambda x, n: x.masked_scatter_(mask(n), torch.ones(2 * WIDTH)),
    "put": lambda x, n: x.put_(torch.arange(2 * WIDTH) + n * WIDTH, torch.ones(2 * WIDTH)),
}
READS: dict[str, Callable[[Tensor, int], Any]] = {
    "index": lambda x, n: x[rows(n)],
    "index_select": lambda x, n: x.index_select(0, rows(n)),
    "gather": lambda x, n: x.gather(0, elements(n)),
    "take": lambda x, n: x.take(torch.arange(2 * WIDTH) + n * WIDTH),
    "embedding": lambda x, n: torch.nn.functional.embedding(rows(n), x),
    "masked_select": lambda x, n: x.masked_select(mask(n)),
}


def checked(touch: Callable[[Tensor, int], Any], step: int) -> Report:
    """Check two ranks that touch rows of rank 0: the second one `step` rows after the first."""

    def program() -> None:
        dist.init_process_group("nccl")
        assert dist.group.WORLD is not None
        rank = dist.get_rank()
        x = symm_mem.empty(ROWS, WIDTH, dtype=torch.float32, device=torch.device("cuda")).zero_()
        handle: Any = symm_mem.rendezvous(x, dist.group.WORLD)
        dist.barrier()
        touch(handle.get_buffer(0, (ROWS, WIDTH), torch.float32), rank * step)
        dist.barrier()

    return check(as_rank(program), 2, 2)


@pytest.mark.parametrize("name", WRITES)
def test_rows_that_are_written_by_index(name: str) -> None:
    assert not checked(WRITES[name], 2).findings
    assert {each.rule for each in checked(WRITES[name], 1).findings} == {"no order"}


@pytest.mark.parametrize("name", READS)
def test_rows_that_are_read_by_index(name: str) -> None:
    def read_or_write(x: Tensor, first: int) -> None:
        if first:
            x[first : first + 2].fill_(1)
        else:
            READS[name](x, first)

    assert not checked(read_or_write, 2).findings
    assert {each.rule for each in checked(read_or_write, 1).findings} == {"no order"}


@pytest.mark.parametrize("step", [1, 2])
def test_a_replay_writes_the_rows_that_its_indices_have_then(step: int) -> None:
    def main(world: sundog.World) -> None:
        x = world.zeros((ROWS, WIDTH), torch.float32, "x")
        theirs, at = world.peer(x, 0), torch.tensor([0, 1])
        ones = torch.ones(2, WIDTH)
        with world.capture() as graph:
            theirs.index_put_((at,), ones)
        at.add_(world.rank * step)
        world.barrier()
        graph.replay()
        world.barrier()

    found = {each.rule for each in check(main, 2, 2).findings}
    assert found == (set() if step == 2 else {"no order"})


COPIES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {  # and whether the host waits
    "cpu": (lambda x: x.cpu(), True),
    "text": (lambda x: x.to("cpu"), True),
    "device": (lambda x: x.to(torch.device("cpu")), True),
    "keyword": (lambda x: x.to(device="cpu", dtype=torch.float64), True),
    "not blocking": (lambda x: x.to("cpu", non_blocking=True), False),
    "dtype": (lambda x: x.to(torch.float64), False),
    "tensor": (lambda x: x.to(torch.ones(2, dtype=torch.float64)), False),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_to_the_cpu_waits_for_its_stream(name: str) -> None:
    copy, waits = COPIES[name]

    def program() -> None:
        dist.init_process_group("nccl")
        x, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy(x.fill_(1))
        x.add_(1)

    found = {each.rule for each in check(as_rank(program), 1, 2).findings}
    assert found == (set() if waits else {"no order"})


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_their_parts(layout: torch.layout) -> None:
    def program() -> None:
        dist.init_process_group("nccl")
        x = torch.eye(4, device="cuda").to_sparse(layout=layout)
        assert torch.equal(x @ torch.ones(4, 1, device="cuda"), torch.ones(4, 1))

    report = check(as_rank(program), 1, 2)
    assert not report.findings + report.remarks, report
