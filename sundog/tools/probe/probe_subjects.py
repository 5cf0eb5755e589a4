"""What `sundog probe` probes: ops, primitives of the world, torch's own ops, a user's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ...ops import op as ops
from ...world.world import World
from .._primitives import PRIMITIVES, Primitive
from .._subject import Resolved, expected, output, resolve
from .fresh_data import Subject, Tensors, as_tuple

__all__ = ["all_names", "rows", "subjects"]


# What torch itself offers on `symm`, where ranks are processes: baselines of all_reduce.
_OF_TORCH = {f"torch.{name}": name for name in ("gloo", "symm_mem.one_shot", "symm_mem.two_shot")}


def all_names(backend: str = "") -> list[str]:
    """List what is probed where nothing is named: algorithms, primitives, on `symm` torch's own."""
    return [*ops.OPS, *PRIMITIVES, *(_OF_TORCH if backend == "symm" else ())]


def rows(target: str) -> list[str]:
    """List the rows of a target: itself or, if it names a dict of Subjects, each of them."""
    found = resolve(target).found if ":" in target else None
    return [f"{target}.{key}" for key in found] if isinstance(found, dict) else [target]


def subjects(target: str, size: int) -> Iterator[Subject]:
    """Give what a target names, ready to be probed. An algorithm has several cases."""
    if target in _OF_TORCH:
        yield _all_reduce_of_torch(target, size)
    elif target in PRIMITIVES:
        yield _of_primitive(target, PRIMITIVES[target])
    else:
        resolved = resolve(target)
        for algorithm in resolved.algorithms:
            yield from _of_op(algorithm.name, algorithm.module, size)
        if not resolved.algorithms:
            yield _of_user(resolved)


def _of_primitive(name: str, primitive: Primitive) -> Subject:
    verdict = "CAPTURABLE" if primitive.can_capture else "NOT CAPTURABLE"
    return Subject(name, primitive.prepare, primitive.inputs, primitive.reference, expected=verdict)


def _of_op(name: str, op: ModuleType, size: int) -> Iterator[Subject]:
    """Give a subject for each case of an op; only the first goes through all columns."""
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


def _of_user(resolved: Resolved) -> Subject:
    """A `Subject`, or a function with `make_inputs` and `reference` beside it in its module."""
    found, target = resolved.found, resolved.target
    if isinstance(found, Subject):
        return found
    names = ("make_inputs", "reference")
    make_inputs, reference = (getattr(resolved.module, name, None) for name in names)
    if not callable(found) or make_inputs is None or reference is None:
        name = target.partition(":")[2] or "main"
        raise ValueError(
            f"{target}: expected a function {name}(world, *inputs), with make_inputs(world, seed) "
            "and reference(rank, *parts) beside it, a sundog.tools.probe.probe.Subject, or a dict "
            "of them"
        )

    def inputs(world: World, seed: int) -> Tensors:
        return as_tuple(make_inputs(world, seed))

    return Subject(target, lambda world: partial(found, world), inputs, reference)


def _all_reduce_of_torch(target: str, size: int) -> Subject:
    from ..baselines import BASELINES  # torch.distributed is slow to import

    baseline = BASELINES["all_reduce"][_OF_TORCH[target]]
    op = ops.find("all_reduce")
    problem = op.Problem(4096, torch.bfloat16, size)  # not any size: it must be aligned

    def prepare(world: World) -> Callable[..., Any]:
        calls: dict[tuple, tuple] = {}

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            key = tuple(tensor.data_ptr() for tensor in inputs)
            if key not in calls:
                out = torch.empty_like(inputs[0])
                calls[key] = baseline.make(world, problem, inputs, out), out
            launch, out = calls[key]
            launch()
            return out

        return call

    inputs = partial(_inputs, op=op, problem=problem)
    reference = partial(op.reference, problem)
    verdict = "CAPTURABLE" if baseline.graph else "NOT CAPTURABLE"
    return Subject(target, prepare, inputs, reference, expected=verdict, columns=("replays",))
