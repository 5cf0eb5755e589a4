"""Resolve a target of the command line to what a tool runs, and run an op on inputs.

all_gather                 an op: all its algorithms; all_gather.push is one of them
device_barrier             a primitive of the world (_primitives.py)
package.module             an op of the user's: a module with the names of one, or such a file.py
package.module:function    any fn(world)
path/file.py:function      the same from a file (default: main, if it has one)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..machine.launcher import unseen
from ..ops import load
from ..ops import op as ops
from ..world.world import World
from ._primitives import PRIMITIVES


class Algorithm(NamedTuple):
    """One algorithm of an op."""

    name: str  # all_gather.push; of a user's op, the target itself
    algo: str  # push; "" where the op is one module
    module: ModuleType

    @property
    def by_request(self) -> bool:
        """Whether it runs only if it is named."""
        return self.name in ops.BY_REQUEST or getattr(self.module, "OWN_GPU", False)


@dataclass(frozen=True)
class Resolved:
    """What a target names: the algorithms of an op, or an object with its module."""

    target: str
    algorithms: tuple[Algorithm, ...] = ()
    found: Any = None
    module: ModuleType | None = None

    @property
    def modules(self) -> list[ModuleType]:
        """The files that it is in."""
        own = [self.module] if self.module else []
        return own or [algorithm.module for algorithm in self.algorithms]


def resolve(target: str) -> Resolved:
    """Find what a target names. Raise ValueError, with one sentence, if there is nothing."""
    if target in PRIMITIVES:
        primitive = PRIMITIVES[target]
        return Resolved(target, found=primitive.exercise, module=load.load(primitive.module))
    path, _, name = target.partition(":")
    if not _names_op(target):
        module = _loaded(path, target)
        return Resolved(target, found=_attribute(module, name or "main"), module=module)
    base = target.partition(".")[0] if target in ops.OPS else target
    return Resolved(
        target,
        tuple(
            Algorithm(f"{base}.{algo}" if algo else base, algo, module)
            for algo, module in load.algorithms(target).items()
        ),
    )


def algorithms_of(target: str) -> tuple[Algorithm, ...]:
    """Resolve a target that must be an op: what `bench`, `trace` and `tune` work on."""
    found = resolve(target).algorithms
    if not found:
        raise ValueError(f"{target} is a function: expected an op, or a module or file of one")
    return found


def function_of(target: str, size: int) -> Callable[[World], Any]:
    """Find the rank's function that a target names. For an op, it exercises all its algorithms."""
    resolved = resolve(target)
    if resolved.algorithms:

        def run_all(world: World) -> None:
            for algorithm in resolved.algorithms:
                exercise(algorithm.module, size)(world)

        return run_all
    if not callable(resolved.found):
        name = target.partition(":")[2] or "main"
        where = resolved.module.__name__ if resolved.module else target
        raise ValueError(f"{target}: {where} has no function {name}")
    function: Callable[[World], Any] = resolved.found
    return function


def problem_of(module: ModuleType, text: str, size: int) -> Any:
    """Change the fields of the op's first case that `text` names."""
    if size < 1:
        raise ValueError(f"world {size}: a world has at least one rank")
    return load.changed(module.cases(size)[0], load.parse(text))


def _names_op(target: str) -> bool:
    """Tell an op, by its name, its module or its file, from a function."""
    path, colon, _ = target.partition(":")
    if colon or not path.endswith(".py"):
        return not colon
    module = load.load(path)
    return not hasattr(module, "main") and load.is_op(module)


def _loaded(path: str, target: str) -> ModuleType:
    try:
        return load.load(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"{target}: no module named {error.name}") from None


def _attribute(module: ModuleType, name: str) -> Any:
    """Return a module's attribute by name, or by `dict.key`; None if there is none."""
    first, _, key = name.partition(".")
    found = getattr(module, first, None)
    return found.get(key) if key and isinstance(found, dict) else found


def exercise(op: ModuleType, size: int) -> Callable[[World], Any]:
    """Call twice in a row, call another plan of the op, then call the first on fresh data.

    Nothing waits between the first three, so a buffer that is reused too early is noticed. The last
    has the arguments of the first, as a graph replay would, and new data.
    """

    def run(world: World) -> None:
        for problem in op.cases(size):
            with world.scope():
                _exercise(world, op, problem)

    return run


def _exercise(world: World, op: ModuleType, problem: Any) -> None:
    given = [op.inputs(world, problem, seed) for seed in range(4)]
    answers = [expected(world, op, problem, each) for each in given]
    outs = [output(world, want) for want in answers[:3]]
    world.barrier()  # all inputs and outputs are there
    # After the barrier, since a plan may be called at once and has its own barrier for its memory.
    plans = [op.plan(world, problem, op.default(problem, world.num_sms)) for _ in range(2)]
    for plan, each, out in zip((plans[0], plans[0], plans[1]), given, outs, strict=False):
        plan(*each, out)
    for out, want in zip(outs, answers, strict=False):
        _compare(world, out, want)
    for old, new in zip(given[0], given[3], strict=True):
        old.copy_(new)
    _compare(world, plans[0](*given[0], outs[0]), answers[3])
    for tensor in given[0]:
        tensor.zero_()  # the kernel has ended, so the peers are done with this rank's tensors
    for plan in reversed(plans):
        plan.free()


def expected(world: World, op: ModuleType, problem: Any, given: tuple) -> torch.Tensor:
    """Compute the reference's answer on this rank, from all inputs. A collective on the host."""
    parts = world.exchange([tensor.cpu() for tensor in given])
    by_input = (list(each) for each in zip(*parts, strict=True))
    with unseen():  # an exchange gives copies
        answer: torch.Tensor = op.reference(problem, world.rank, *by_input)
    return answer


def normal_inputs(world: World, op: ModuleType, problem: Any, seed: int) -> tuple:
    """Make an op's inputs of normal data, for timing. An op without `exact` has only one kind."""
    if "exact" not in inspect.signature(op.inputs).parameters:
        return tuple(op.inputs(world, problem, seed))
    return tuple(op.inputs(world, problem, seed, exact=False))


def expected_here(world: World, op: ModuleType, problem: Any, given: tuple) -> torch.Tensor:
    """Compute the same on this rank's device, from views of its peers' inputs, for large ones."""
    if len(set(world.exchange(tuple(tensor.shape for tensor in given), "shapes"))) > 1:
        return expected(world, op, problem, given).to(world.device)
    with world.scope():
        shared = [t if world.is_symmetric(t) else world.empty_like(t).copy_(t) for t in given]
        world.barrier()  # every rank's inputs are there
        parts = [[world.peer(tensor, rank) for rank in range(world.size)] for tensor in shared]
        if world.passive:  # computes nothing: the answer has only a shape
            parts = [[part.to("meta") for part in each] for each in parts]
        answer: torch.Tensor = op.reference(problem, world.rank, *parts)
        world.barrier()  # all ranks have read them
    return answer


def output(world: World, want: torch.Tensor) -> torch.Tensor:
    """Allocate room for an answer on the heap, even if ranks get answers of different sizes."""
    numel = max(world.exchange(want.numel(), "size of an output"))
    return world.empty(numel, want.dtype, "out")[: want.numel()].view(want.shape)


def room(world: World, op: ModuleType, problem: Any, given: tuple) -> torch.Tensor:
    """Allocate an output, in the shape that the reference gives for tensors without data."""
    shapes = world.exchange([(tensor.shape, tensor.dtype) for tensor in given])
    parts = [[torch.empty(s, dtype=d, device="meta") for s, d in each] for each in shapes]
    by_input = (list(each) for each in zip(*parts, strict=True))
    return output(world, op.reference(problem, world.rank, *by_input))


def _compare(world: World, result: torch.Tensor, want: torch.Tensor) -> None:
    if world.passive:  # a stand-in computes nothing
        return
    got = result.cpu().view(want.shape)
    if not torch.equal(got, want):
        raise AssertionError(f"rank {world.rank}: {difference(got, want)}")


def difference(got: torch.Tensor, want: torch.Tensor, where: str = "") -> str:
    """Say how many elements differ, and how the first does; "" if none does."""
    wrong = (got != want).flatten().nonzero().flatten()
    if not wrong.numel():
        return ""
    at = int(wrong[0])
    return (
        f"{wrong.numel()} of {want.numel()} elements{where} are wrong, the first at {at}: "
        f"{got.flatten()[at]} instead of {want.flatten()[at]}"
    )
