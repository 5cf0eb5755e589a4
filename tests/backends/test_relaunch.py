"""Calls once more with the very same tensors: where only kernels start, and where more is needed.

The first tests pretend to be a GPU; the others run on every backend, and on those of a GPU they
also say which calls went the short way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource

import sundog
from sundog.backends._gpu import Direct
from sundog.backends._relaunch import Again, again, is_hooked
from sundog.backends.symm import SymmBackend
from sundog.errors import WorldClosed

Run = Callable[..., list]


@triton.jit
def _kernel(x, out, table, n, flag=None, BLOCK: tl.constexpr = 4):
    pass


class Compiled:
    packed_metadata = (4, 1, 0)
    function, module = 77, 1

    def __init__(self, **metadata: int) -> None:
        self.metadata = SimpleNamespace(**metadata)
        self.started: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args, stream: None

    def run(self, *args: Any) -> None:
        self.started.append(args)


class Pretended:
    """An op of one kernel, launched as `symm` does it."""

    def __init__(self, compiled: Compiled) -> None:
        self.x, self.out, self.table = torch.zeros(16), torch.zeros(16), torch.zeros(8)
        self.direct, self.compiled = Direct(), compiled
        self.handles: list[int] = []

    def launch(self) -> None:
        given = (3,), (self.x.view(torch.int32), self.out, self.table, 7), {"num_warps": 4}
        if self.direct.again(_kernel, *given, stream=5) is None:
            self.direct.note(_kernel, *given, self.compiled)

    def repeat(self, run: Callable[[], None] | None = None) -> Callable[[], bool] | None:
        return again(run or self.launch, (self.x, self.out), self.start)

    def start(self, launches: list[Again]) -> bool:
        for launch in launches:
            launch.put(9)
        return True


def test_only_the_stream_is_new() -> None:
    op = Pretended(Compiled(num_ctas=2))
    op.launch()
    start = op.repeat()
    assert isinstance(start, functools.partial)
    (launch,) = start.args[0]  # by these it is seen whether all programs find a place
    assert (launch.name, launch.programs, launch.compiled) == ("_kernel", 3 * 2, op.compiled)
    assert not op.compiled.started
    assert start()
    assert start()
    addresses = [each.data_ptr() for each in (op.x, op.out, op.table)]
    once = (3, 1, 1, 9, 77, (4, 1, 0), None, None, None, *addresses, 7, None, 4)
    assert op.compiled.started == [once, once]


def test_what_was_not_launched_before_is_not_repeated() -> None:
    assert Pretended(Compiled()).repeat() is None


@pytest.mark.compat
def test_triton_is_given_what_it_would_have_given_itself() -> None:
    """But addresses instead of tensors, and no word to hooks: there are none."""
    names = {"x": "*i32", "out": "*fp32", "table": "*fp32", "n": "i32"}
    source = ASTSource(
        _kernel, {**names, "flag": "constexpr", "BLOCK": "constexpr"}, {(4,): None, (5,): 4}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    given: list[tuple] = []
    compiled.module, compiled.function, compiled._run = 1, 77, lambda *args: given.append(args)
    op = Pretended(compiled)
    op.launch()
    op.launch()
    start = op.repeat()
    assert start is not None
    start()
    by_triton, _, by_us = given  # the second one is that of the call that was watched
    assert by_triton[:4] == (3, 1, 1, 5)
    assert by_us[:4] == (3, 1, 1, 9)
    assert by_triton[4:6] == by_us[4:6]  # function, packed metadata
    assert by_us[6:9] == (None, None, None)
    plain = [e.data_ptr() if isinstance(e, torch.Tensor) else e for e in by_triton[9:]]
    assert [*by_us[9:]] == plain


@pytest.mark.compat
@pytest.mark.parametrize("gsan", [False, True])
def test_tritons_launcher_is_asked_once_what_it_hands_on(
    gsan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has to tell a sanitizer of every launch."""
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # 3.9 has a look
    launcher = object.__new__(CudaLauncher)
    for name in ("num_ctas", "arg_annotations", "kernel_signature", "launch_cooperative_grid"):
        setattr(launcher, name, name)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_pdl, launcher.gsan_enabled = "pdl", gsan
    handed: list[tuple] = []
    launcher.launch = lambda *args: handed.append(args)
    op = Pretended(Compiled())
    op.compiled.run = launcher
    op.launch()
    start = op.repeat()
    assert isinstance(start, functools.partial)
    assert not handed
    (launch,) = start.args[0]
    assert (launch._run is launcher) == gsan
    if not gsan:
        start()
        addresses = [each.data_ptr() for each in (op.x, op.out, op.table)]
        launcher(3, 1, 1, 9, 77, (4, 1, 0), None, None, None, *addresses, 7, None, 4)
        ours, tritons = handed
        assert ours == tritons
        assert ours[3] == 9


@pytest.mark.parametrize(
    "besides",
    [
        lambda op: op.out.copy_(op.x),
        lambda op: op.out.zero_(),
        lambda op: torch.empty(3),
        lambda op: op.direct.again(_kernel, (9,), (op.x, op.out, op.table, 7), {}, stream=5),
    ],
    ids=["copy", "zero", "allocation", "new launch"],
)
def test_a_call_that_does_more_is_not_repeated(besides: Callable[[Pretended], Any]) -> None:
    op = Pretended(Compiled())
    op.launch()
    assert op.repeat(lambda: (op.launch(), besides(op))) is None
    assert op.repeat(lambda: (op.launch(), op.out.view(4, 4).t())) is not None
    made: list[torch.Tensor] = []
    op.repeat(lambda: made.append(torch.zeros(2, dtype=torch.int16)))
    assert made[0].dtype == torch.int16, "what is watched does the same"


def test_a_kernel_with_memory_per_launch_is_not_repeated() -> None:
    op = Pretended(Compiled(global_scratch_size=128))
    op.launch()
    assert op.repeat() is None


def test_an_ops_own_tensors_stay_and_the_callers_do_not() -> None:
    op = Pretended(Compiled())
    op.launch()
    start = op.repeat()
    alive = [weakref.ref(each.untyped_storage()) for each in (op.x, op.out, op.table)]
    del op.x, op.out, op.table
    assert start is not None
    assert [each() is not None for each in alive] == [False, False, True]


@pytest.mark.compat
def test_somebody_who_wants_to_know_of_launches_is_told() -> None:
    hook = lambda metadata: None  # noqa: E731
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        assert not is_hooked()
        chain.add(hook)
        try:
            assert is_hooked()
        finally:
            chain.remove(hook)


# on every backend

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def called(world: sundog.World, op: str) -> tuple[Callable[..., Any], torch.Tensor, torch.Tensor]:
    numel = {"all_gather": 8 * world.size, "reduce_scatter": 8 // world.size}.get(op, 8)
    x, out = world.zeros((8,), torch.int32), world.zeros((numel,), torch.int32)
    return lambda **given: getattr(world, op)(x, out=out, **given), x, out


def expected(op: str, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    if op == "all_gather":
        return torch.cat(parts)
    if op == "all_reduce":
        return sum(parts)
    share = 8 // len(parts)
    mine = [part[rank * share : (rank + 1) * share] for part in parts]
    return sum(mine) if op == "reduce_scatter" else torch.cat(mine)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.arange(8, dtype=torch.int32) * (rank + 1) + 100 * step


def is_short(world: sundog.World) -> bool:
    """Does the latest call start its kernels without looking at anything?"""
    return [*world._plans.repeats.values()][-1].start is not None


def check(world: sundog.World, op: str, out: torch.Tensor, step: int) -> None:
    parts = [data(rank, step) for rank in range(world.size)]
    assert out.cpu().equal(expected(op, world.rank, parts)), (op, step, out)


@pytest.mark.parametrize("op", OPS)
def test_new_data_every_time(run: Run, backend: str, op: str) -> None:
    def main(world: sundog.World) -> bool:
        call, x, out = called(world, op)
        for step in range(5):
            x.copy_(data(world.rank, step))
            call()
            check(world, op, out, step)
        return is_short(world)

    assert run(main, 2) == [backend in ("virtual", "symm")] * 2


class Seen(TorchFunctionMode):
    """Notes what torch is asked for, each of which costs `virtual` a few microseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Always:
    """Finds the same call for any tensors, wherever an output was made."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def get(self, identity: tuple) -> Any:
        return self.found


@pytest.mark.parametrize("op", OPS)
def test_a_mode_sees_only_that_the_output_is_made(run: Run, op: str) -> None:
    def main(world: sundog.World) -> tuple[list[str], list[str]]:
        call, x, _ = called(world, op)
        seen = []
        for without in (call, lambda: getattr(world, op)(x)):
            for _ in range(3):
                without()
            (*_, repeat) = world._plans.repeats.values()
            repeat.start = lambda: True  # as on a GPU
            known, world._plans.repeats = world._plans.repeats, Always(repeat)
            with Seen() as mode:
                without()
            world._plans.repeats = known
            seen.append(mode.names)
        return seen[0], seen[1]

    made = {"all_reduce": ["empty_like"], "all_to_all": ["dim", "empty"]}.get(op, ["empty"])
    assert run(main, 2) == [([], made)] * 2


def test_many_calls_without_a_wait_between_them(run: Run) -> None:
    def main(world: sundog.World) -> None:
        call, x, out = called(world, "all_reduce")
        x.fill_(1)
        sums = torch.zeros(8, dtype=torch.int32, device=world.device)
        for _ in range(10):
            call()
            sums += out
            x += 1
        assert sums.tolist() == [sum(range(1, 11)) * world.size] * 8

    run(main, 2)


def test_other_streams(run: Run) -> None:
    """One of the world's has a plan of its own; one of torch's is where the kernels go."""

    def main(world: sundog.World) -> None:
        call, x, out = called(world, "all_reduce")
        for step in range(4):
            x.copy_(data(world.rank, step))
            call()
        check(world, "all_reduce", out, 3)
        known = len(world._plans.repeats)
        world.synchronize()
        with world.stream(1):
            x.copy_(data(world.rank, 5))
            call()
            check(world, "all_reduce", out, 5)
        assert len(world._plans.repeats) == known + 1
        world.synchronize()
        if world.device.type == "cuda":
            for _ in range(3):  # once more the short way: the plan of stream 1 took memory
                call()
            known = len(world._plans.repeats)
            world.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                x.copy_(data(world.rank, 6))
                call()
                check(world, "all_reduce", out, 6)
            assert len(world._plans.repeats) == known
        world.barrier()

    run(main, 2)


def test_in_a_capture_and_after_it(run: Run) -> None:
    def main(world: sundog.World) -> bool:
        call, x, out = called(world, "all_reduce")
        call()
        for captured in range(2):  # as the second call with these tensors, and when it is short
            with world.capture() as graph:
                call()
            for step in range(2):
                x.copy_(data(world.rank, step))
                out.zero_()
                graph.replay()
                check(world, "all_reduce", out, step)
            for step in range(2, 5):
                x.copy_(data(world.rank, step + captured))
                call()
                check(world, "all_reduce", out, step + captured)
            graph.free()
        return is_short(world)

    assert len(set(run(main, 2))) == 1


def test_memory_that_became_something_else(run: Run) -> None:
    """Another tensor where x was: same address, other shape, then another dtype."""

    def main(world: sundog.World) -> None:
        out = world.zeros((8,), torch.int32)
        for kind, numel in ((torch.int32, 8), (torch.int32, 4), (torch.float32, 8)):
            x = world.zeros((numel,), kind, "given")
            result = out.view(kind)[:numel]
            for step in range(4):
                x.fill_(step + world.rank)
                world.all_reduce(x, out=result)
                assert result.tolist() == [2 * step + 1] * numel
            at = x.data_ptr()
            world.barrier()
            world.free(x)
            again_there = world.zeros((numel,), kind, "given")
            assert again_there.data_ptr() == at  # or this test shows nothing
            world.free(again_there)

    run(main, 2)


def test_where_tensors_must_be_copied(run: Run) -> None:
    def main(world: sundog.World) -> bool:
        x = torch.zeros(8, dtype=torch.int32, device=world.device)
        out = torch.zeros_like(x)
        for step in range(4):
            x.copy_(data(world.rank, step))
            world.all_reduce(x, out=out, algo="two_shot")
            check(world, "all_reduce", out, step)
        return is_short(world)

    assert run(main, 2) == [False, False]


def test_traced_calls_have_their_trace(run: Run) -> None:
    """The clock is a constant of the kernel: it is another one."""

    def main(world: sundog.World) -> None:
        call, _, _ = called(world, "all_reduce")
        for _ in range(3):
            call()
        assert len(world._plans.repeats) == 1
        world.kernel_mode = 1
        call()
        assert len(world._plans.repeats) == 2

    run(main, 2)


def test_a_closed_world(run: Run) -> None:
    def main(world: sundog.World) -> None:
        call, _, _ = called(world, "all_reduce")
        for _ in range(4):
            call()
        world.close()
        with pytest.raises(WorldClosed):
            call()

    run(main, 1)


def test_a_group_that_has_ended(run: Run) -> None:
    def main(world: sundog.World) -> None:
        with world.scope():
            group = world.group([1, 0])
            assert group is not None
            call, _, _ = called(group, "all_reduce")
            for _ in range(4):
                call()
            world.barrier()
        with pytest.raises(WorldClosed):
            call()

    run(main, 2)


@pytest.mark.parametrize(("handle", "captures"), [(0, False), (7, False), (7, True)])
def test_symm_starts_again_outside_captures(handle: int, captures: bool) -> None:
    """CUDA can't capture the default stream, 0, so there is no need to ask."""
    backend, put = object.__new__(SymmBackend), []
    asked = Mock(return_value=captures)
    backend._gpu = SimpleNamespace(current_handle=lambda: handle, is_capturing=asked)  # type: ignore[assignment]
    backend._streams = {handle: None}
    launches: Any = [SimpleNamespace(put=put.append)] * 2
    assert backend._start_again(launches) is not captures
    assert put == ([] if captures else [handle] * 2)
    assert asked.call_count == bool(handle)
