"""What to inspect of an op: a problem large enough for its wide path, a config for the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ...ops import load
from ...ops import op as ops
from ...world.world import World
from .._subject import function_of, names_op, room

__all__ = ["Case", "for_warps", "functions", "typical"]

_LARGE = {"numel": 1 << 18, "m": 2048, "n": 4096, "k": 1024}  # no tails, and tiles for all SMs
_LEAST_HEAP = 64 << 20

Function = tuple[str, Callable[[World], Any], int]  # name, of a rank, bytes of the heap


@dataclass(frozen=True)
class Case:
    problem: dict[str, Any]  # fields to change
    config: dict[str, Any]
    size: int
    warp_size: int


def functions(target: str, case: Case) -> Iterator[Function]:
    """One per algorithm of an op; or the function itself that a target names."""
    if not names_op(target):
        yield target, function_of(target, case.size), _LEAST_HEAP
        return
    base = target.partition(".")[0] if target in ops.OPS else target
    for algo, module in ops.algorithms(target).items():
        yield f"{base}.{algo}" if algo else base, *_of_op(module, case)


def typical(module: ModuleType, size: int) -> Any:
    """The op's first case, without what is optional, in a size that shows its wide path."""
    first = module.cases(size)[0]
    optional = {
        field.name: field.default
        for field in dataclasses.fields(first)
        if field.default is not dataclasses.MISSING
    }
    larger: dict[str, Any] = {"dtype": torch.bfloat16, **_LARGE}
    if hasattr(module, "LARGEST"):  # bytes
        larger["numel"] = min(larger["numel"], module.LARGEST // 4)  # of any dtype
    fitting = {name: value for name, value in larger.items() if hasattr(first, name)}
    return dataclasses.replace(first, **(optional | fitting))


def _of_op(module: ModuleType, case: Case) -> tuple[Callable[[World], Any], int]:
    problem = load.changed(typical(module, case.size), case.problem)
    moved = module.cost(problem).hbm_bytes

    def run(world: World) -> None:
        config = for_warps(module.default(problem, world.num_sms), case.warp_size)
        config = load.changed(config, case.config)
        plan = module.plan(world, problem, config)
        given = module.inputs(world, problem, 0)
        plan(*given, room(world, module, problem, given))

    return run, _LEAST_HEAP + 4 * moved


def for_warps(config: Any, warp_size: int) -> Any:
    """As a config is on another kind of GPU than this machine's: 64 lanes are AMD's."""
    changes: dict[str, Any] = {}
    if warp_size != 32 and hasattr(config, "descriptors"):
        changes["descriptors"] = False  # there is no TMA
    elif warp_size != 32 and hasattr(config, "num_warps") and torch.version.hip is None:
        changes["num_warps"] = max(config.num_warps * 32 // warp_size, 1)  # as many threads
    if hasattr(config, "threads_per_warp"):
        changes["threads_per_warp"] = warp_size
    return dataclasses.replace(config, **changes)
