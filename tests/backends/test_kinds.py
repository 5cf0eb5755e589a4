"""What an exchange or an allocation is decides what it does; its name is only for people."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog import Sim
from sundog.backends import _gpu
from sundog.device import context, memory, signal
from sundog.errors import RankMismatch, WaitTimeout
from sundog.tools.check.schedules import check
from sundog.world.heap import Heap

pytestmark = pytest.mark.sim_only  # names its backends itself, so once is enough


@triton.jit
def pull(x, out, peer, ctx):
    memory.put(out, x, peer, ctx)


@triton.jit
def wait_with(scratch, flags, ctx):
    """`scratch` is another argument, of any name; nobody sets the flag."""
    signal.wait(flags, 0, 1, ctx)
    tl.store(scratch, tl.load(scratch))


def _meets(name: str | None):
    """Ranks write and read the same word, with a barrier (None) or an exchange between."""

    def main(world: sundog.World) -> None:
        x, out = world.zeros((1,)), world.zeros((1,))
        world.barrier()
        pull[(1,)](x, out, 1 - world.rank, world.ctx)
        world.synchronize()
        if name is None:
            world.barrier()
        else:
            world.exchange(None, name)
        out.fill_(3.0)

    return main


@pytest.mark.parametrize("name", ["hello", "barrier", "recovery"])
def test_an_exchange_orders_nothing_whatever_its_name(name: str) -> None:
    kinds = {finding.kind for finding in check(_meets(name), 2, schedules=4).findings}
    assert "race" in kinds


def test_a_barrier_orders() -> None:
    assert not check(_meets(None), 2, schedules=4).findings


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_an_exchange_named_barrier_does_not_meet_a_barrier(backend: str) -> None:
    def main(world: sundog.World) -> None:
        if world.rank == 0:
            world.barrier()
        else:
            world.exchange(None, "barrier")

    with pytest.raises(
        RankMismatch, match=r"(?s)rank 0: barrier \(barrier\).*barrier \(exchange\)"
    ):
        sundog.run(main, 2, backend)


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_an_expired_wait_leaves_a_tensor_named_ctx_alone(backend: str) -> None:
    def main(world: sundog.World) -> list[int]:
        scratch = world.full((64,), 7, torch.int64, name="ctx")
        flags = world.signals(1, "flags")
        world.barrier()
        wait_with[(1,)](scratch, flags, world.ctx)
        with pytest.raises(WaitTimeout):
            world.synchronize()
        world.barrier()
        return scratch.tolist()

    options = {"sim": Sim(expire=True)} if backend == "sim" else {"timeout": 1}
    assert sundog.run(main, 2, backend, **options) == [[7] * 64] * 2


def test_a_gpu_ends_the_waits_of_contexts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`virtual` and `symm` find them in the same way; the copies here go to memory of the CPU."""
    monkeypatch.setattr(_gpu, "pinned_words", lambda count: torch.zeros(count, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    segment = torch.full((4096,), 1, dtype=torch.uint8)
    contexts, heap = _gpu.Contexts(segment), Heap(4096)
    for name, kind in (("ctx", "data"), ("ctx", "flags"), ("x", "context")):
        contexts.allocated(segment.data_ptr(), heap.alloc(256, name, 8, kind))
    contexts.end_waits("side")  # type: ignore[arg-type]
    bounds = segment.view(torch.int64).view(-1, 32)[:3, context.POLLS.value].tolist()
    assert [bound == 0 for bound in bounds] == [False, False, True]
