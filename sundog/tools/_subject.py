"""What a tool runs: a rank's function from a name on the command line.

all_gather                 an op: planned, then called again and again with fresh data
package.module             the same for any module with the names of an op, or such a file.py
package.module:function    any fn(world)
path/file.py:function      the same from a file (default: main, if it has one)
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..ops import op as ops
from ..ops.load import load
from ..world.world import World

__all__ = [
    "exercise",
    "expected",
    "expected_here",
    "function_of",
    "names_op",
    "output",
    "room",
]


def function_of(target: str, size: int) -> Callable[[World], Any]:
    """The rank's function that a target names; ValueError with one sentence if there is none."""
    if not names_op(target):
        path, _, name = target.partition(":")
        try:
            return _attribute(load(path), name or "main", target)
        except ModuleNotFoundError as error:
            raise ValueError(f"{target}: no module named {error.name}") from None
    modules = ops.algorithms(target)

    def run_all(world: World) -> None:
        for module in modules.values():
            exercise(module, size)(world)

    return run_all


def names_op(target: str) -> bool:
    """Whether it is an op, by its name, its module or its file; else it is a function."""
    path, colon, _ = target.partition(":")
    if colon or not path.endswith(".py"):
        return not colon
    module = load(path)
    return not hasattr(module, "main") and ops.is_op(module)


def exercise(op: ModuleType, size: int) -> Callable[[World], Any]:
    """Two calls back to back, another plan of the op, then the first call again on fresh data.

    Nothing waits between the first three, so a buffer that is reused too early is seen; the last
    has the very arguments of the first, as a graph replay would, and data that it never had.
    """

    def run(world: World) -> None:
        for problem in op.cases(size):
            with world.scope():
                _exercise(world, op, problem)

    return run


def _exercise(world: World, op: ModuleType, problem: Any) -> None:
    plans = [op.plan(world, problem, op.default(problem, world.num_sms)) for _ in range(2)]
    given = [op.inputs(world, problem, seed) for seed in range(4)]
    answers = [expected(world, op, problem, each) for each in given]
    outs = [output(world, want) for want in answers[:3]]
    world.barrier()  # peers may be touched
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
    """The reference's answer on this rank, from everybody's inputs. A collective on the host."""
    parts = world.exchange([tensor.cpu() for tensor in given])
    by_input = (list(each) for each in zip(*parts, strict=True))
    answer: torch.Tensor = op.reference(problem, world.rank, *by_input)
    return answer


def expected_here(world: World, op: ModuleType, problem: Any, given: tuple) -> torch.Tensor:
    """The same, computed on this rank's device from views of its peers' inputs: for large ones."""
    if len(set(world.exchange(tuple(tensor.shape for tensor in given), "shapes"))) > 1:
        return expected(world, op, problem, given).to(world.device)
    with world.scope():
        shared = [t if world.is_symmetric(t) else world.empty_like(t).copy_(t) for t in given]
        world.barrier()  # everybody's inputs are there
        parts = [[world.peer(tensor, rank) for rank in range(world.size)] for tensor in shared]
        if world.passive:  # computes nothing: the answer has only a shape
            parts = [[part.to("meta") for part in each] for each in parts]
        answer: torch.Tensor = op.reference(problem, world.rank, *parts)
        world.barrier()  # everybody has read them
    return answer


def output(world: World, want: torch.Tensor) -> torch.Tensor:
    """Room for an answer, on the heap, also where ranks get answers of different sizes."""
    numel = max(world.exchange(want.numel(), "size of an output"))
    return world.empty(numel, want.dtype, "out")[: want.numel()].view(want.shape)


def room(world: World, op: ModuleType, problem: Any, given: tuple) -> torch.Tensor:
    """An output for these inputs: what the reference gives for tensors that have only a shape."""
    shapes = world.exchange([(tensor.shape, tensor.dtype) for tensor in given])
    parts = [[torch.empty(s, dtype=d, device="meta") for s, d in each] for each in shapes]
    by_input = (list(each) for each in zip(*parts, strict=True))
    return output(world, op.reference(problem, world.rank, *by_input))


def _compare(world: World, result: torch.Tensor, want: torch.Tensor) -> None:
    if world.passive:  # a stand-in computes nothing
        return
    got = result.cpu().view(want.shape)
    if not torch.equal(got, want):
        wrong = (got != want).flatten().nonzero().flatten()
        raise AssertionError(
            f"rank {world.rank}: {wrong.numel()} of {want.numel()} elements are wrong, the first "
            f"at {wrong[0].item()}: {got.flatten()[wrong[0]]} instead of {want.flatten()[wrong[0]]}"
        )


def _attribute(module: ModuleType, name: str, target: str) -> Callable[[World], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{target}: {module.__name__} has no function {name}")
    return function
