"""cuda-python's stream operations: what a stream writes, waits for and copies is in order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import sundog
from sundog.compat.cuda import DRIVER, RUNTIME
from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import check

driver, runtime = SimpleNamespace(**DRIVER), SimpleNamespace(**RUNTIME)
FLAGS = driver.CUstreamWaitValue_flags
DEFAULT = runtime.cudaMemcpyKind.cudaMemcpyDefault


def passed_on(
    how: int = FLAGS.CU_STREAM_WAIT_VALUE_GEQ, bits: int = 32, waits: bool = True
) -> Callable[[], list[float]]:
    """Copy to the next rank, write 6 to its word, and wait for 5 or more, 6, or a bit of it."""

    def main() -> list[float]:
        dist.init_process_group("nccl")
        rank, size = dist.get_rank(), dist.get_world_size()
        x = symm_mem.empty(8, dtype=torch.float32, device="cuda")
        handle: Any = symm_mem.rendezvous(x, dist.group.WORLD)
        stream, to = torch.cuda.current_stream().cuda_stream, (rank + 1) % size
        source = torch.full((8,), float(rank), device="cuda")
        words = handle.signal_pad_ptrs
        driver.cuMemcpyAsync(handle.buffer_ptrs[to], source.data_ptr(), 16, stream)
        rest = handle.buffer_ptrs[to] + 16, source.data_ptr() + 16, 16, DEFAULT, stream
        runtime.cudaMemcpyAsync(*rest)
        getattr(driver, f"cuStreamWriteValue{bits}")(stream, words[to], 6, 0)
        value = {FLAGS.CU_STREAM_WAIT_VALUE_GEQ: 5, FLAGS.CU_STREAM_WAIT_VALUE_EQ: 6}.get(how, 2)
        if waits:
            getattr(driver, f"cuStreamWaitValue{bits}")(stream, words[rank], value, how)
        return x.tolist()

    return main


WAYS = [
    passed_on(),
    passed_on(FLAGS.CU_STREAM_WAIT_VALUE_EQ, 64),
    passed_on(FLAGS.CU_STREAM_WAIT_VALUE_AND),
]


@pytest.mark.parametrize("main", WAYS)
def test_a_stream_waits_for_what_another_copied(main: Callable[[], list[float]]) -> None:
    assert not check(as_rank(main), 2, schedules=3).findings
    assert sundog.run(main, 2, "shm", torch=True) == [[1.0] * 8, [0.0] * 8]


def test_without_the_wait_it_is_a_race() -> None:
    found = check(as_rank(passed_on(waits=False)), 2, schedules=3).findings
    assert "no order" in {each.rule for each in found}


def test_other_flags_are_refused() -> None:
    report = check(as_rank(passed_on(1 << 30)), 2, schedules=1)
    assert "GEQ, EQ and AND are simulated" in report.findings[0].why
