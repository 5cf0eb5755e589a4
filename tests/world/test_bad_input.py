"""Bad input: an error of its own each, with the numbers and what to do next."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

import sundog
from sundog import knobs
from sundog.device import memory
from sundog.errors import BadAccess, HeapDivergence, NotSymmetric
from sundog.ops.load import find
from sundog.ops.op import OPS

Run = Callable[..., list]


def check(error: BaseException, *parts: str) -> None:
    for part in parts:
        assert part in str(error), f"{part!r} is not in: {error}"


@pytest.mark.parametrize("size", [0, -1, -8])
def test_world_size(run: Run, size: int) -> None:
    with pytest.raises(ValueError, match="world_size") as error:
        run(lambda world: None, size)
    check(error.value, str(size), "must be a whole number of at least 1, got")


# tensors


def told_by_all(run: Run, main: Callable[[sundog.World], Any], size: int = 2) -> list[str]:
    """Every rank raises NotSymmetric in `main`; what each of them said."""

    def guarded(world: sundog.World) -> str:
        with pytest.raises(NotSymmetric) as error:
            main(world)
        return str(error.value)

    return run(guarded, size)


USES: dict[str, Callable[[sundog.World, torch.Tensor], Any]] = {
    "free": lambda world, tensor: world.free(tensor),
    "peer": lambda world, tensor: world.peer(tensor, 0),
}


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_not_on_the_heap(run: Run, use: str) -> None:
    def main(world: sundog.World) -> None:
        USES[use](world, torch.zeros(3, 5, device=world.device))

    for rank, text in enumerate(told_by_all(run, main)):
        for part in ("(3, 5)", "ordinary tensor", f"rank {rank} of 2", "world.as_symmetric"):
            assert part in text


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_was_freed(run: Run, use: str) -> None:
    def main(world: sundog.World) -> None:
        x = world.empty((7,))
        world.free(x)
        USES[use](world, x)

    for text in told_by_all(run, main):
        assert "(7,)" in text
        assert "freed" in text


@pytest.mark.parametrize("use", USES)
def test_a_tensor_of_another_world(run: Run, backend: str, use: str) -> None:
    if backend in ("shm", "symm"):
        pytest.skip("its tensors don't outlive the processes")
    kept: list[torch.Tensor] = []
    run(lambda world: kept.append(world.empty((11,))), 1)
    for text in told_by_all(run, lambda world: USES[use](world, kept[0])):
        assert "(11,)" in text
        assert "another world" in text


def test_freeing_a_part(run: Run) -> None:
    for text in told_by_all(run, lambda world: world.free(world.empty((9,), name="whole")[2:])):
        assert "part of whole, 8 bytes into it" in text
        assert "Free the tensor that the world returned" in text


def test_negative_sizes(run: Run) -> None:
    def main(world: sundog.World) -> str:
        with pytest.raises(ValueError, match="negative") as error:
            world.empty((3, -2))
        return str(error.value)

    assert all("[3, -2]" in text for text in run(main, 2))


# peers


@pytest.mark.parametrize("rank", [-1, 3, 100])
def test_a_peer_outside_the_world(run: Run, rank: int) -> None:
    def main(world: sundog.World) -> list[str]:
        x = world.empty((4,))
        texts = []
        for call in (lambda: world.peer(x, rank), lambda: world.broadcast_object(1, rank)):
            with pytest.raises(ValueError, match="outside this world") as error:
                call()
            texts.append(str(error.value))
        return texts

    for texts in run(main, 3):
        for text in texts:
            assert f"rank {rank} is outside this world of 3 ranks (0 to 2)" in text


@triton.jit
def reach(x, peer, ctx):
    memory.store(x, 1.0, peer, ctx)


@pytest.mark.sim_only
@pytest.mark.parametrize("peer", [-1, 2, 50])
def test_a_peer_outside_the_world_in_a_kernel(run: Run, peer: int) -> None:
    def main(world: sundog.World) -> None:
        x = world.zeros((1,))
        world.barrier()
        reach[(1,)](x, peer, world.ctx)
        world.barrier()

    with pytest.raises(BadAccess, match=r"rank \d program \(0, 0, 0\) of reach at") as error:
        run(main, 2)
    expected = ("outside any live allocation", "is it a rank of this world?")
    check(error.value, "test_bad_input.py:", *expected)


# launches


@triton.jit
def fill(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at * 1.0, mask=at < n)


@pytest.mark.sim_only
@pytest.mark.parametrize("which", ["x", "ctx"])
def test_a_kernel_launched_on_the_wrong_world(run: Run, which: str) -> None:
    """Also with the other world's context alone: its peers would be somewhere else."""
    kept: list[sundog.World] = []
    tensors: list[torch.Tensor] = []

    def first(world: sundog.World) -> None:
        kept.append(world)
        tensors.append(world.empty((13,)))

    def second(world: sundog.World) -> None:
        x, ctx = world.empty((13,)), world.ctx
        if which == "x":
            x = tensors[0]
        else:
            ctx = kept[0].ctx
        reach[(1,)](x, 0, ctx)

    run(first, 1)
    with pytest.raises(ValueError, match=f"argument {which} of reach") as error:
        run(second, 1)
    check(error.value, "another world", "Launch on the world that made the tensor")


@pytest.mark.sim_only
def test_a_kernel_gets_a_wrong_argument(run: Run) -> None:
    def launch(**options: Any) -> Callable[[sundog.World], None]:
        return lambda world: fill[(1,)](world.empty((4,)), **options)

    with pytest.raises(ValueError, match=r"no argument 'BLOK'.*'BLOCK'"):
        run(launch(n=4, BLOK=4), 1)
    with pytest.raises(ValueError, match=r"launch of fill.*missing.*'n'"):
        run(launch(BLOCK=4), 1)
    with pytest.raises(ValueError, match=r"grid \(1, 2, 3, 4\)"):
        run(lambda world: fill[(1, 2, 3, 4)](world.empty((4,)), 4, BLOCK=4), 1)
    for warps in (0, 3, 64):  # which no GPU would run
        with pytest.raises(ValueError, match=f"num_warps={warps}, and Triton compiles for 1, 2"):
            run(launch(n=4, BLOCK=4, num_warps=warps), 1)


@pytest.mark.sim_only
def test_a_tensor_on_another_device(run: Run) -> None:
    with pytest.raises(ValueError, match="argument x of fill is on meta") as error:
        run(lambda world: fill[(1,)](torch.empty(4, device="meta"), 4, BLOCK=4), 1)
    check(error.value, "the simulator runs on the CPU")


@pytest.mark.sim_only
def test_a_tensor_without_memory(run: Run) -> None:
    """A fake tensor has the address 0: the kernel crashed the process there."""
    with FakeTensorMode():
        x = torch.empty(4)
    with pytest.raises(ValueError, match=r"argument x of fill \(shape \(4,\)\) has no memory"):
        run(lambda world: fill[(1,)](x, 4, BLOCK=4), 1)


# worlds


def test_a_heap_larger_than_the_memory(backend: str) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if backend not in ("sim", "shm"):
        pytest.skip("heaps in GPU memory")
    asked = memory // 4
    with pytest.raises(ValueError, match="heap_size") as error:
        sundog.run(lambda world: None, 5, backend, heap_size=asked)
    check(error.value, f"{asked:,}", "5 ranks", f"{asked * 5:,}", f"{memory:,}", f"{memory // 5:,}")


def test_a_heap_too_small(run: Run) -> None:
    with pytest.raises(ValueError, match="at least 65536 bytes, got 1000") as error:
        run(lambda world: None, 2, heap_size=1000)
    check(error.value, "65536")


def test_init_without_torchrun(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "symm":
        pytest.skip("this process is a rank, and in a default group")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"sundog\.init: RANK, WORLD_SIZE") as error:
        sundog.init("shm")
    check(error.value, "torchrun --nproc-per-node 4 script.py", "sundog.run(fn, world_size)")


def test_ranks_that_pass_different_sizes(run: Run) -> None:
    def main(world: sundog.World) -> str:
        world.empty((100 + world.rank,), name="x")
        with pytest.raises(HeapDivergence) as error:
            world.barrier()
        return str(error.value)

    for text in run(main, 3):
        for rank in range(3):
            line = (
                rf"rank {rank}: alloc of {4 * (100 + rank)} bytes \(x\) at .*test_bad_input.py:\d+"
            )
            assert re.search(line, text)
        assert "Make the same calls" in text


def test_a_world_inside_a_rank(backend: str, run: Run) -> None:
    if backend != "sim":
        pytest.skip("about the simulator")
    with pytest.raises(ValueError, match="inside a rank"):
        run(lambda world: sundog.run(lambda inner: None, 2, "sim"), 1)


WITHOUT_A_TENSOR = {
    "free": lambda world: world.free(None),
    "peer": lambda world: world.peer([1.0], 0),
    "offset_of": lambda world: world.offset_of(5),
    "is_symmetric": lambda world: world.is_symmetric(world),
    "as_symmetric": lambda world: world.as_symmetric("x"),
    "empty_like": lambda world: world.empty_like([1.0]),
    "zeros_like": lambda world: world.zeros_like((2, 3)),
    "recv": lambda world: world.recv(None, 1 - world.rank),
}


@pytest.mark.parametrize("name", WITHOUT_A_TENSOR)
def test_what_is_no_tensor(run: Run, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected a tensor, got a (NoneType|list|int|World|str|t)"
    ):
        run(WITHOUT_A_TENSOR[name], 2)


@pytest.mark.parametrize("members", [1, None])
def test_a_group_of_no_sequence(run: Run, members: Any) -> None:
    with pytest.raises(ValueError, match=rf"group of ranks {members}: .* for example \[0, 1\]"):
        run(lambda world: world.group(members), 2)


def test_a_tensor_that_is_freed_twice(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = world.empty(4)
        world.free(x)
        world.free(x)

    with pytest.raises(NotSymmetric, match=r"of this world and has been freed .* and once"):
        run(main, 2)


def test_a_live_tensor_of_a_group_is_not_freed(run: Run) -> None:
    """To the world it is an ordinary tensor, which a call copies."""

    def main(world: sundog.World) -> list[float]:
        group = world.group([1, 0])
        assert group is not None
        mine = group.full(3, world.rank + 1.0)
        with pytest.raises(NotSymmetric, match="or from another world"):
            world.free(mine)
        found: list[float] = world.all_reduce(mine).cpu().tolist()
        group.free(mine)
        with pytest.raises(NotSymmetric, match="has been freed"):
            group.free(mine)
        return found

    assert run(main, 2) == [[3.0] * 3] * 2


def test_unknown_backends_and_options() -> None:
    with pytest.raises(ValueError, match="'smi'") as error:
        sundog.run(lambda world: None, 2, "smi")
    check(error.value, "sim", "shm")
    with pytest.raises(ValueError, match=r"sim=\.\.\. is for backend 'sim', not 'shm'"):
        sundog.run(lambda world: None, 2, "shm", sim=sundog.Sim())
    for token in ("random", "random:x", "pct:3", "fifo:1"):
        with pytest.raises(ValueError, match="random:SEED or pct:SEED:DEPTH") as error:
            sundog.run(lambda world: None, 2, "sim", sim=sundog.Sim(schedule=token))
        check(error.value, repr(token))


@pytest.mark.parametrize(
    ("name", "value"),
    [("SUNDOG_HEAP_SIZE", "64X"), ("SUNDOG_TIMEOUT", "soon"), ("SUNDOG_BACKEND", "gpu"),
     ("SUNDOG_SEED", "1.5"), ("SUNDOG_SIM_SMS", "0"), ("SUNDOG_TIMEOUT", "-1")],
)  # fmt: skip
def test_environment_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    knob = next(k for k in knobs.KNOBS if k.name == name)
    with pytest.raises(ValueError, match=name) as error:
        knob.get()
    check(error.value, repr(value), knob.meaning)


def test_sizes_in_bytes() -> None:
    sizes = ["512", "64K", "3m", "1G", "2T"]
    assert [knobs.parse_bytes(s) for s in sizes] == [512, 64 << 10, 3 << 20, 1 << 30, 2 << 40]


# plans


@pytest.mark.sim_only
@pytest.mark.parametrize("op", OPS)
def test_a_plan_refuses_what_valid_refuses(run: Run, op: str) -> None:
    """Also one that is made by hand, or by a tool, and not through a call, which asks `valid`."""
    module = find(op)
    problem = module.cases(2)[0]
    usual = module.default(problem, 16)
    change = {"num_warps": 3} if hasattr(usual, "num_warps") else {"programs": 0}
    if not fields(usual):  # nothing to choose: a problem that it refuses
        problem, config, told = replace(problem, dtype=torch.float32), usual, "torch.float32"
    else:
        config, told = replace(usual, **change), " ".join(map(str, *change.items()))
    reason = module.valid(problem, config)
    assert told in reason
    with pytest.raises(ValueError, match=re.escape(reason)):
        run(lambda world: module.plan(world, problem, config), 2)
