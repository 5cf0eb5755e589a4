"""What every collective's call does: choose an algorithm, plan once, stage what must be symmetric.

An algorithm's file says which of its tensors peers touch: SYMMETRIC = ("x",), ("out",) or both. A
tensor of the user's that is not on the heap is copied through one that is, which belongs to the
cached call. Its reuse by the next call is safe because no kernel ends before its peers are done
with this rank's tensors.

A plan is found again by all that it depends on, the stream too: one plan runs on one stream at a
time. Making one is where ranks agree; what they disagree about is named before anything is
allocated. A tensor on the heap lies at the same place of it on every rank if peers reach it: that
is compared with the first call for each place, but not in a capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import target
from ..errors import RankMismatch, by_rank
from .op import Plan, agree_place, algorithms, check_grad
from .select import choose, config_for

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "ASYNC_STREAM", "Handle", "Options", "agreed", "call", "check_contiguous", "check_out",
    "on_stream", "reached", "repeated",
]  # fmt: skip

ASYNC_STREAM = 1
_USUAL = (None, False, False)  # options behind `algo`
_MOST_RECENT = 256


class Options(NamedTuple):
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
    result: Any
    used: tuple[torch.Tensor, ...]  # memory that must not go to others before the op is done

    def wait(self) -> Any:
        """What this rank launches from here on comes behind the op. The host does not wait."""
        self.world.wait_event(self.done)
        return self.result


class _Staged(NamedTuple):
    """Which tensors are not on the heap; None: no peer reaches it, so it may lie anywhere."""

    x: bool | None
    out: bool | None

    def __str__(self) -> str:
        asked = zip(self._fields, self, strict=True)
        return ", ".join(f"{name} {_WHERE[s]}" for name, s in asked if s is not None)


_WHERE = ("on the heap", "an ordinary tensor")


@functools.cache
def reached(op: str, algo: str) -> frozenset[str]:
    """The tensors that peers touch: in this algorithm, or in any that "auto" may come to.

    Where the others lie is each rank's own affair: the plan is the same. In a gather only one rank
    has an output.
    """
    modules = algorithms(op)
    meant = (modules[algo],) if algo in modules else modules.values()
    return frozenset(name for module in meant for name in module.SYMMETRIC)


@dataclass(frozen=True)
class _Call:
    """A plan, and where the tensors go that peers must reach."""

    plan: Plan
    in_place: tuple[str, ...]  # which of the user's tensors peers reach
    x: torch.Tensor | None
    out: torch.Tensor | None
    why: str

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source = x if x.dim() == 1 else x.view(-1)
        result = out if out.dim() == 1 else out.view(-1)
        if self.x is not None:
            source = self.x.copy_(source.detach())  # else it keeps all calls' autograd graphs
        if self.out is None:
            self.plan.launch(source, result)
        else:
            self.plan.launch(source, self.out)
            result.detach().copy_(self.out)  # also if it is a parameter


@dataclass
class _Recent:
    """A call that was made with certain tensors."""

    call: _Call
    start: Callable[[], bool] | None = None  # its kernels, from the third time on
    is_known: bool = False

    def run(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.start is not None and self.start():
            return
        world.uses_stream()
        if self.is_known or world.is_capturing:
            self.call.run(x, out)
        else:
            self.start = world.again(lambda: self.call.run(x, out), x, out)
            self.is_known = True


def repeated(
    world: World, asked: tuple, x: torch.Tensor, out: torch.Tensor | None, options: Options
) -> bool:
    """Run an op as it was run before, if it was, with these very tensors: all checks hold still.

    Half of the host's time for a small op is spent in them. Only where the options are the usual.
    """
    if options[1:] != _USUAL or not (isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor)):
        return False
    recent = world.recent.get(_identity(world, (*asked, options.algo), x, out))
    if recent is None:
        return False
    recent.run(world, x, out)
    return True


def _identity(world: World, asked: tuple, x: torch.Tensor, out: torch.Tensor) -> tuple:
    """What a call's checks, its plan and its kernels depend on; also on which allocations live."""
    with torch._C.DisableTorchFunction():  # on `virtual` each look would be asked for its reason
        return (
            asked, x.data_ptr(), out.data_ptr(), x.shape, out.shape, x.stride(), out.stride(),
            x.dtype, out.dtype, x.device, out.device, world.stream_number, world.heap_calls,
            world.trace, torch.is_grad_enabled() and (x.requires_grad or out.requires_grad),
        )  # fmt: skip


def call(
    world: World, op: str, problem: Any, x: torch.Tensor, out: torch.Tensor, options: Options,
    asked: tuple = (),
) -> Any:  # fmt: skip
    """Run an op from `x` into `out`, which have the problem's sizes; with a plan made before.

    `asked`: for `repeated`, the op's name and what else it was given but tensors and options.
    """
    if options.async_op:
        return on_stream(world, ASYNC_STREAM, lambda: _run(world, op, problem, x, out, options), x)
    return _run(world, op, problem, x, out, options, asked)


def on_stream(world: World, number: int, run: Any, *used: torch.Tensor) -> Handle:
    """`run` on another stream of this rank, behind all that is on the current one."""
    before = world.record_event()
    with world.stream(number):
        world.wait_event(before)  # what wrote the inputs, and what used the output before
        world.uses_stream()
        result = run()
        return Handle(world, world.record_event(), result, used)


def _run(
    world: World, op: str, problem: Any, x: torch.Tensor, out: torch.Tensor, options: Options,
    asked: tuple = (),
) -> torch.Tensor:  # fmt: skip
    if options.config is not None and not isinstance(options.config, Hashable):
        raise ValueError(
            f"{op}: config {options.config!r} is not a Config of one of its algorithms"
        )
    if x.device != world.device:
        raise ValueError(f"{op}: x is on {x.device}, but this rank is on {world.device}; move it")
    touched = reached(op, options.algo)
    staged = _Staged(
        not world.is_symmetric(x) if "x" in touched else None,
        not world.is_symmetric(out) if "out" in touched else None,
    )
    key = (op, problem, options.algo, options.config, staged, world.stream_number)
    made = world.cached_plan(key, lambda: _plan(world, op, problem, x, out, options, staged))
    if options.explain and world.rank == 0:
        print(made.why)
    for name in () if world.is_capturing else made.in_place:
        agree_place(world, op, name, x if name == "x" else out)
    made.run(x, out)
    if asked and options[1:] == _USUAL:
        if len(world.recent) >= _MOST_RECENT:
            world.recent.clear()
        world.recent[_identity(world, (*asked, options.algo), x, out)] = _Recent(made)
    return out


def _plan(
    world: World, op: str, problem: Any, x: torch.Tensor, out: torch.Tensor, options: Options,
    staged: _Staged,
) -> _Call:  # fmt: skip
    module, config, why = agreed(world, op, problem, options, staged)
    copies: dict[str, torch.Tensor] = {}
    for name, tensor, is_staged in zip(staged._fields, (x, out), staged, strict=True):
        if is_staged and name in module.SYMMETRIC:
            copies[name] = world.empty((tensor.numel(),), tensor.dtype, f"{op}.{name}")
            why += f"; {name} is not on the heap and goes through a copy that is"
    in_place = tuple(name for name in module.SYMMETRIC if name not in copies)
    plan = module.plan(world, problem, config)
    return _Call(plan, in_place, copies.get("x"), copies.get("out"), why)


def agreed(
    world: World, op: str, problem: Any, options: Options, staged: tuple[bool | None, ...]
) -> tuple[ModuleType, Any, str]:
    """The choice, once all ranks have made the same one; where they differ, or it is wrong, why."""
    refused: str | None = None
    try:
        algo, module, config, why = _decide(world, op, problem, options)
        mine = f"{problem}, {algo}, {config}, {staged}"
    except ValueError as error:
        refused = str(error)
        mine = f"{problem}, refused: {refused}"
    everyone = world.exchange(mine, f"plan of {op}")
    if len(set(everyone)) > 1:
        text = by_rank(everyone)
        raise RankMismatch(f"{op}: ranks ask for different things:\n{text}")
    if refused is not None:
        raise ValueError(refused)
    return module, config, why


def _decide(
    world: World, op: str, problem: Any, options: Options
) -> tuple[str, ModuleType, Any, str]:
    """Algorithm, its module, config, and why."""
    modules = algorithms(op)
    algo, config = options.algo, options.config
    kind = target.key_of(world.device)
    if algo == "auto":
        choice = choose(op, problem, kind, world.num_sms, config, world.backend)
        return choice.algo, modules[choice.algo], choice.config, choice.why
    if algo not in modules:
        known = ", ".join(modules)
        raise ValueError(f"{op}: algo {algo!r} is not known; there are: auto, {known}")
    if config is None:
        config = config_for(f"{op}.{algo}", modules[algo], problem, kind, world.num_sms)
    elif not isinstance(config, modules[algo].Config):
        expected = f"{modules[algo].Config.__module__}.{modules[algo].Config.__name__}"
        raise ValueError(f"{op}: config {config!r} is not a {expected}, which algo {algo!r} takes")
    reason = modules[algo].valid(problem, config)
    if reason is not None:
        raise ValueError(f"{op}: algo {algo!r} does not take {problem} with {config}: {reason}")
    return algo, modules[algo], config, f"{op}: {algo}, as asked, with {config}"


def check_contiguous(op: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{op}: {name} is a {type(tensor).__name__}, expected a tensor; the input comes "
                "first, then the output"
            )
        check_grad(op, tensor, name=name)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                f"contiguous; pass {name}.contiguous()"
            )


def check_out(op: str, x: torch.Tensor, out: torch.Tensor, numel: int) -> None:
    """An output holds the result, and does not share memory with the input."""
    check_contiguous(op, out=out)
    if out.numel() != numel or out.dtype != x.dtype:
        raise ValueError(
            f"{op}: out has {out.numel()} elements of {out.dtype}, expected {numel} of {x.dtype}"
        )
    if out.device != x.device:
        raise ValueError(f"{op}: out is on {out.device} and x on {x.device}; put them together")
    a, b = x.data_ptr(), out.data_ptr()
    if a < b + numel * out.itemsize and b < a + x.numel() * x.itemsize:
        raise ValueError(
            f"{op}: out shares memory with x, {abs(a - b)} bytes apart; give it memory of its own"
        )
