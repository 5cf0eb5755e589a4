"""A wait orders the loads after it on the GPU: tiles that arrive late, multiplied as they arrive.

On the simulator the same code runs with few tiles. The negative control, an acquire without a CTA
barrier, prints how often it was wrong; nothing is asserted of it, since it need not be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from device import wait_kernels, wait_kernels_gluon
from triton.tools.tensor_descriptor import TensorDescriptor

import sundog
from sundog.target import has_gpu

BLOCK = 64
STAGES = (1, 2, 3, 4)


class Effort(NamedTuple):
    rounds: int  # late producers
    steps: int  # tiles of each
    late: int  # atomics before each tile


def effort(backend: str) -> Effort:
    return Effort(100, 8, 300) if backend in ("virtual", "symm") else Effort(3, 2, 2)


class Tensors(NamedTuple):
    flags: Any
    done: Any
    counter: Any
    wrong: Any
    junk: Any
    ctx: Any


def tensors(world: sundog.World, steps: int) -> Tensors:
    wrong, junk = (torch.zeros(1, dtype=torch.int32, device=world.device) for _ in range(2))
    flags = world.signals(2 * steps, "flags")
    done, counter = world.signals(1, "done"), world.signals(1, "counter")
    return Tensors(flags, done, counter, wrong, junk, world.ctx)


def multiply(
    world: sundog.World, wait: str, stages: int, described: bool, fenced: bool, how: Effort
) -> int:
    """How many of the rounds gave a wrong product."""
    a = world.zeros((BLOCK, how.steps * BLOCK), torch.float16, "a")
    b = torch.ones((how.steps * BLOCK, BLOCK), dtype=torch.float16, device=world.device)
    a_tiles = TensorDescriptor(a, list(a.shape), list(a.stride()), [BLOCK, BLOCK])
    given = tensors(world, how.steps)
    programs = 2 if wait in wait_kernels.WITHIN_A_RANK else 1
    world.barrier()
    for epoch in range(1, how.rounds + 1):
        wait_kernels.arriving_product[(programs,)](
            a, a_tiles if described else None, b, *given, epoch, how.steps, how.late,
            WAIT=wait, FENCED=fenced, BLOCK=BLOCK, num_stages=stages,
        )  # fmt: skip
    world.barrier()
    return int(given.wrong.item())


def skip_without_tma(backend: str) -> None:
    on_gpu = backend in ("virtual", "symm") and has_gpu()
    if on_gpu and (torch.version.hip or torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip("no TMA: only NVIDIA has it, since sm_90")


@pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("wait", wait_kernels.WAITS)
def test_a_late_tile_is_loaded_after_its_wait(
    run: Callable[..., list], backend: str, wait: str, described: bool
) -> None:
    if described:
        skip_without_tma(backend)

    def main(world: sundog.World) -> dict[int, int]:
        how = effort(backend)
        return {n: multiply(world, wait, n, described, described, how) for n in STAGES}

    assert run(main, 2) == [dict.fromkeys(STAGES, 0)] * 2


@pytest.mark.parametrize("wait", wait_kernels_gluon.WAITS)
def test_in_gluon_too(run: Callable[..., list], backend: str, wait: str) -> None:
    how = effort(backend)

    def main(world: sundog.World) -> int:
        a = world.zeros((how.steps * 1024,), torch.float32, "a")
        given = tensors(world, how.steps)
        programs = 2 if wait in wait_kernels_gluon.WITHIN_A_RANK else 1
        threads = 64 if torch.version.hip else 32
        world.barrier()
        for epoch in range(1, how.rounds + 1):
            wait_kernels_gluon.arriving_sum[(programs,)](
                a, *given, epoch, how.steps, how.late, WAIT=wait, BLOCK=1024, THREADS=threads
            )
        world.barrier()
        return int(given.wrong.item())

    assert run(main, 2) == [0, 0]


@pytest.mark.gpu("virtual", "symm")
@pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
def test_what_happens_without_the_barrier(
    run: Callable[..., list], backend: str, described: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if described:
        skip_without_tma(backend)

    def main(world: sundog.World) -> dict[int, int]:
        how = effort(backend)
        return {n: multiply(world, wait_kernels.BARE, n, described, False, how) for n in STAGES}

    wrong = run(main, 2)[1]
    with capsys.disabled():
        print(f"\nwrong of {effort(backend).rounds} by num_stages, no barrier: {wrong}")
