"""What every collective's call does: choose an algorithm, plan once, stage what must be symmetric.

An algorithm's file says which of its tensors peers touch: SYMMETRIC = ("x",), ("out",) or both. A
tensor of the user's that is not on the heap is copied through one that is, which belongs to the
cached call. Its reuse by the next call is safe because no kernel ends before its peers are done
with this rank's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .. import target
from ..choice import choose, config_for
from ..op import Plan, algorithms

if TYPE_CHECKING:
    from ..world import World

__all__ = ["Handle", "Options", "call", "check_contiguous", "check_out"]

ASYNC_STREAM = 1


@dataclass(frozen=True)
class Options:
    """What every collective takes besides its tensors."""

    algo: str = "auto"
    config: Any = None
    async_op: bool = False
    explain: bool = False


@dataclass(frozen=True)
class Handle:
    """An op under way on the rank's second stream. `wait` returns its result."""

    world: World
    done: Any
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """What this rank launches from here on comes behind the op. The host does not wait."""
        self.world.wait_event(self.done)
        return self.result


@dataclass(frozen=True)
class _Call:
    """A plan, and where the tensors go that peers must reach."""

    plan: Plan
    x: torch.Tensor | None
    out: torch.Tensor | None

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source = x if self.x is None else self.x.copy_(x.view(-1))
        self.plan(source, out if self.out is None else self.out)
        if self.out is not None:
            out.view(-1).copy_(self.out)


def call(
    world: World, op: str, problem: Any, x: torch.Tensor, out: torch.Tensor, options: Options
) -> Any:
    """Run an op from `x` into `out`, which have the problem's sizes; with a plan made before."""
    staged = (not world.is_symmetric(x), not world.is_symmetric(out), x.numel(), out.numel())
    key = (op, problem, options.algo, options.config, staged, options.async_op)
    made = world.cached_plan(key, lambda: _plan(world, op, problem, options, staged))
    if not options.async_op:
        made.run(x, out)
        return out
    before = world.record_event()
    with world.stream(ASYNC_STREAM):
        world.wait_event(before)  # x, and what used out before, come first
        made.run(x, out)
        return Handle(world, world.record_event(), out)


def _plan(
    world: World, op: str, problem: Any, options: Options, staged: tuple[bool, bool, int, int]
) -> _Call:
    module, config = _decide(world, op, problem, options)
    is_x, is_out, num_x, num_out = staged
    x = out = None
    if is_x and "x" in module.SYMMETRIC:
        x = world.empty((num_x,), problem.dtype, f"{op}.x")
    if is_out and "out" in module.SYMMETRIC:
        out = world.empty((num_out,), problem.dtype, f"{op}.out")
    return _Call(module.plan(world, problem, config), x, out)


def _decide(world: World, op: str, problem: Any, options: Options) -> tuple[ModuleType, Any]:
    modules = algorithms(op)
    kind = target.of(world.device).key if world.device.type == "cuda" else "the simulator"
    if options.algo == "auto":
        choice = choose(op, problem, kind, world.num_sms)
        if options.explain and world.rank == 0:
            print(choice.why)
        config = choice.config if options.config is None else options.config
        return modules[choice.algo], config
    if options.algo not in modules:
        known = ", ".join(modules)
        raise ValueError(f"{op}: algo {options.algo!r} is not known; there are: auto, {known}")
    module = modules[options.algo]
    config = options.config
    if config is None:
        config = config_for(f"{op}.{options.algo}", module, problem, kind, world.num_sms)
    if options.explain and world.rank == 0:
        print(f"{op}: {options.algo}, as asked, with {config}")
    return module, config


def check_contiguous(op: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                f"contiguous; pass {name}.contiguous()"
            )


def check_out(op: str, x: torch.Tensor, out: torch.Tensor, numel: int) -> None:
    """An output holds the result, and does not share memory with the input."""
    if out.numel() != numel or out.dtype != x.dtype:
        raise ValueError(
            f"{op}: out has {out.numel()} elements of {out.dtype}, expected {numel} of {x.dtype}"
        )
    check_contiguous(op, out=out)
    a, b = (t.data_ptr() for t in (x, out))
    if a < b + out.numel() * out.itemsize and b < a + x.numel() * x.itemsize:
        raise ValueError(
            f"{op}: out shares memory with x, {abs(a - b)} bytes apart; give it memory of its own"
        )
