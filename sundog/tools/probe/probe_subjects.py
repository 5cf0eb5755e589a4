"""What `sundog probe` probes: ops by their names, barriers, functions of users by their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ...ops import op as ops
from ...ops.load import load
from ...world.world import World
from .._subject import expected, names_op, output
from .fresh_data import Subject, Tensors, as_tuple

__all__ = ["all_names", "rows", "subjects"]


# What torch itself offers, on `symm`, where ranks are processes.
_OF_TORCH = {
    "torch.gloo": ("gloo", "NOT CAPTURABLE"),
    "torch.symm_mem.one_shot": ("symm_mem.one_shot", "CAPTURABLE"),
    "torch.symm_mem.two_shot": ("symm_mem.two_shot", "CAPTURABLE"),
}


def all_names(backend: str = "") -> list[str]:
    """What is probed where nothing is named: every op's algorithms, the barriers, torch's own."""
    names = [*ops.OPS, *_BARRIERS, *(_OF_TORCH if backend == "symm" else ())]
    if not hasattr(World, "device_barrier"):
        names.remove("barrier")
    return names


def rows(target: str) -> list[str]:
    """The rows of a target: itself, or, if it names a dict of Subjects, each of them."""
    path, _, name = target.partition(":")
    found = _attribute(path, name, target) if name else None
    return [f"{target}.{key}" for key in found] if isinstance(found, dict) else [target]


def subjects(target: str, size: int) -> Iterator[Subject]:
    """By name: an op, an algorithm, a barrier, or module:function. An algorithm has several."""
    path, _, name = target.partition(":")
    if target in _BARRIERS:
        yield _BARRIERS[target]
    elif target in _OF_TORCH:
        yield _all_reduce_of_torch(target, size)
    elif not names_op(target):
        yield _of_user(path, name or "main", target)
    else:
        for algo, module in ops.algorithms(path).items():
            op = path.partition(".")[0]
            yield from _of_op(f"{op}.{algo}" if algo else path, module, size)


def _of_op(name: str, op: ModuleType, size: int) -> Iterator[Subject]:
    """One for each of its cases; all columns for the first of them."""
    for place, problem in enumerate(op.cases(size)):
        yield Subject(
            name,
            partial(_planned, op=op, problem=problem),
            partial(_inputs, op=op, problem=problem),
            partial(op.reference, problem),
            beside=True,
            case=_short(problem),
            columns=("replays",) if place else (),
        )


def _inputs(world: World, seed: int, op: ModuleType, problem: Any) -> Tensors:
    return as_tuple(op.inputs(world, problem, seed))


def _planned(world: World, op: ModuleType, problem: Any) -> Callable[..., Any]:
    plan = op.plan(world, problem, op.default(problem, world.num_sms))
    outs: dict[tuple, torch.Tensor] = {}  # an output for every set of inputs

    def call(*inputs: torch.Tensor) -> Any:
        key = tuple(tensor.data_ptr() for tensor in inputs)
        if key not in outs:
            outs[key] = output(world, expected(world, op, problem, inputs))
            world.barrier()  # peers may be touched
        return plan(*inputs, outs[key])

    return call


def _short(problem: Any) -> str:
    values = vars(problem).items()
    return ",".join(str(value).removeprefix("torch.") for name, value in values if name != "size")


def _of_user(path: str, name: str, target: str) -> Subject:
    """A `Subject`, or a function beside whose module's `make_inputs` and `reference` it stands."""
    found = _attribute(path, name, target)
    if isinstance(found, Subject):
        return found
    make_inputs, reference = (_attribute(path, n, target) for n in ("make_inputs", "reference"))
    if not callable(found) or make_inputs is None or reference is None:
        raise ValueError(
            f"{target}: expected a function {name}(world, *inputs), with make_inputs(world, seed) "
            "and reference(rank, *parts) beside it, a sundog.tools.probe.probe.Subject, or a dict "
            "of them"
        )

    def inputs(world: World, seed: int) -> Tensors:
        return as_tuple(make_inputs(world, seed))

    return Subject(target, lambda world: partial(found, world), inputs, reference)


def _attribute(path: str, name: str, target: str) -> Any:
    """What a module, or a file, has by that name; of a dict in it, `dict.key`."""
    try:
        module = load(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"{target}: no module named {error.name}") from None
    first, _, key = name.partition(".")
    found = getattr(module, first, None)
    return found.get(key) if key and isinstance(found, dict) else found


def _all_reduce_of_torch(target: str, size: int) -> Subject:
    name, expected_verdict = _OF_TORCH[target]
    op = ops.find("all_reduce")
    problem = op.Problem(4096, torch.bfloat16, size)  # not any size: it must be aligned

    def prepare(world: World) -> Callable[..., Any]:
        from ..bench.baselines import BASELINES  # torch.distributed is slow to import

        calls: dict[tuple, tuple] = {}

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            key = tuple(tensor.data_ptr() for tensor in inputs)
            if key not in calls:
                out = torch.empty_like(inputs[0])
                make = BASELINES["all_reduce"][name].make
                calls[key] = make(world, problem, inputs, out), out
            launch, out = calls[key]
            launch()
            return out

        return call

    inputs = partial(_inputs, op=op, problem=problem)
    reference = partial(op.reference, problem)
    return Subject(
        target, prepare, inputs, reference, expected=expected_verdict, columns=("replays",)
    )


# A barrier has no output: each rank writes, meets the others, and reads what its neighbour wrote.


def _values(world: World, seed: int) -> tuple[torch.Tensor]:
    torch.manual_seed(seed * 1000 + world.rank)
    return (torch.randint(-99, 99, (37,)).float().to(world.device),)


def _neighbours(barrier: str) -> Callable[[World], Callable[..., Any]]:
    def prepare(world: World) -> Callable[..., Any]:
        buffer = world.empty((37,), name="buffer")
        theirs = world.peer(buffer, (world.rank + 1) % world.size)
        world.barrier()

        def call(x: torch.Tensor) -> torch.Tensor:
            buffer.copy_(x)
            getattr(world, barrier)()  # what I wrote, before what my neighbour reads
            result = theirs.clone()
            getattr(world, barrier)()  # what I read, before my neighbour writes again
            return result

        return call

    return prepare


def _neighbours_values(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[(rank + 1) % len(xs)]


_BARRIERS = {
    "barrier": Subject("barrier", _neighbours("device_barrier"), _values, _neighbours_values),
    "host barrier": Subject(
        "host barrier", _neighbours("barrier"), _values, _neighbours_values,
        expected="NOT CAPTURABLE",
    ),
}  # fmt: skip
