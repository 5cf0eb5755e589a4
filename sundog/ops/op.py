"""What every op has: a Problem, a Config, a Plan, and a place in the table of ops.

An op's algorithm is a module with the names of `SHAPE`; tools (check, bench, tune, ...) need
nothing else, so they work on a user's own op as on ours. It is named all_gather, all_gather.push,
package.module or path/file.py.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .plans import NoFormula, Plan, agree, barrier_flags, check_grad, check_plain

__all__ = [
    "BY_REQUEST", "FUNCTIONS", "OPS", "SHAPE", "Cost", "NoFormula", "Plan", "agree", "algorithms",
    "barrier_flags", "check_grad", "check_plain", "find", "functions", "is_op", "load",
    "load_package", "sentence",
]  # fmt: skip

# op.algorithm and its file. The first of an op is the one that is used where nothing was measured.
OPS = {
    "all_gather.push": "sundog.collectives.all_gather_push",
    "all_gather.pull": "sundog.collectives.all_gather_pull",
    "all_gather.partitioned": "sundog.collectives.all_gather_partitioned",
    "all_gather.gluon": "sundog.collectives.all_gather_gluon",
    "all_to_all.push": "sundog.collectives.all_to_all_push",
    "all_to_all.pull": "sundog.collectives.all_to_all_pull",
    "all_to_all.mail": "sundog.collectives.all_to_all_mail",
    "broadcast.push": "sundog.collectives.broadcast",
    "gather.pull": "sundog.collectives.gather",
    "scatter.push": "sundog.collectives.scatter",
    "all_reduce.one_shot": "sundog.collectives.all_reduce_one_shot",
    "all_reduce.low_latency": "sundog.collectives.all_reduce_low_latency",
    "all_reduce.two_shot": "sundog.collectives.all_reduce_two_shot",
    "all_reduce.two_shot_pull": "sundog.collectives.all_reduce_two_shot_pull",
    "all_reduce.ring": "sundog.collectives.all_reduce_ring",
    "all_reduce.atomic": "sundog.collectives.all_reduce_atomic",
    "reduce_scatter.direct": "sundog.collectives.reduce_scatter",
    "reduce.direct": "sundog.collectives.reduce",
    "all_reduce_rms_norm.one_shot": "sundog.fused.all_reduce_rms_norm_one_shot",
    "all_reduce_rms_norm.low_latency": "sundog.fused.all_reduce_rms_norm_low_latency",
    "all_reduce_rms_norm.two_shot": "sundog.fused.all_reduce_rms_norm_two_shot",
    "all_gather_matmul.barrier": "sundog.fused.all_gather_matmul_barrier",
    "all_gather_matmul.hbm_buffer": "sundog.fused.all_gather_matmul_hbm_buffer",
    "all_gather_matmul.direct": "sundog.fused.all_gather_matmul_direct",
    "matmul_all_gather.push": "sundog.fused.matmul_all_gather",
    "matmul_all_gather.barrier": "sundog.fused.matmul_all_gather_barrier",
    "matmul_reduce_scatter.push": "sundog.fused.matmul_reduce_scatter",
    "matmul_reduce_scatter.barrier": "sundog.fused.matmul_reduce_scatter_barrier",
    "matmul_all_reduce.one_shot": "sundog.fused.matmul_all_reduce_one_shot",
    "matmul_all_reduce.two_shot": "sundog.fused.matmul_all_reduce_two_shot",
    "matmul_all_reduce.barrier": "sundog.fused.matmul_all_reduce_barrier",
}
# What else a world offers, as functions of it without algorithms.
FUNCTIONS = {
    "device_barrier": "sundog.collectives.device_barrier",
    "send": "sundog.collectives.send_recv",
    "recv": "sundog.collectives.send_recv",
}
BY_REQUEST = ("all_reduce.ring", "all_reduce.atomic")  # sums in another order: never by default
SHAPE = (
    "Problem", "Config", "valid", "space", "default", "cost", "cases", "inputs", "reference",
    "plan",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What an op must do at least, per rank: for roofline, bench and cost models."""

    flops: int
    read_bytes: int  # of device memory, wherever it lies
    written_bytes: int
    link_bytes: int  # those that cross between ranks

    @property
    def hbm_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


# from a name to its module


def functions() -> dict[str, Callable[..., Any]]:
    """Every op's function of a world, by its name: it is in the file that is named as the op."""
    found = dict(FUNCTIONS)
    for key, path in OPS.items():
        name = key.partition(".")[0]
        found.setdefault(name, f"{path.rpartition('.')[0]}.{name}")
    return {name: getattr(load(path), name) for name, path in found.items()}


@functools.cache
def algorithms(name: str) -> dict[str, ModuleType]:
    """An op's algorithms by their names; of 'all_gather.push' or a module's path, that one."""
    own = [key.partition(".")[2] for key in OPS if key.partition(".")[0] == name]
    if own:
        return {algo: find(f"{name}.{algo}") for algo in own}
    return {name.partition(".")[2] if name in OPS else "": find(name)}


def find(name: str) -> ModuleType:
    """An op's first algorithm, one by its name, or a module or file with the names of SHAPE."""
    name = next((key for key in OPS if key.partition(".")[0] == name), name)
    try:
        module = load(OPS.get(name, name))
    except ModuleNotFoundError:
        raise ValueError(_unknown(name)) from None
    if not is_op(module):
        missing = [each for each in SHAPE if not hasattr(module, each)]
        hint = f"; did you mean its function, {name}:main?" if hasattr(module, "main") else ""
        raise ValueError(f"{name} is not an op: it lacks {', '.join(missing)}{hint}")
    return module


def is_op(module: ModuleType) -> bool:
    return all(hasattr(module, each) for each in SHAPE)


def _unknown(name: str) -> str:
    known = list(dict.fromkeys(key.partition(".")[0] for key in OPS))
    near = difflib.get_close_matches(name, [*known, *OPS], 1)
    if near:
        return f"op {name!r} is not known: did you mean {near[0]!r}?"
    return f"op {name!r} is not known (there are: {', '.join(known)}) and no module"


def load(name: str) -> ModuleType:
    """A module, or a file if the name ends in .py.

    Raises ModuleNotFoundError if the module does not exist, and ValueError, with the line, if it
    can't be imported.
    """
    if not name.endswith(".py"):
        return _imported(name, lambda: importlib.import_module(name))
    if not os.path.exists(name):
        raise ValueError(f"{name}: no such file")
    return _imported(name, lambda: _load_file(os.path.abspath(name)))


def load_package(folder: str) -> ModuleType:
    """A folder with an __init__.py, whose files may import each other."""
    name = os.path.basename(os.path.normpath(folder))
    path = os.path.join(folder, "__init__.py")
    places = [folder]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    module = sys.modules[name] = _new_module(spec)
    return _imported(folder, lambda: _executed(module))


@functools.cache  # by path: all ranks must mean the same classes and kernels
def _load_file(path: str) -> ModuleType:
    name = os.path.splitext(os.path.basename(path))[0]
    module = _new_module(importlib.util.spec_from_file_location(name, path))
    sys.modules.setdefault(name, module)  # a script named as a module must not take its place
    return _executed(module)


def _imported(name: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name} cannot be imported: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """Say where an error was raised, and which."""
    from ..callsite import raised_at, relative  # only where something went wrong

    path, line, _ = raised_at(error)
    place = "" if isinstance(error, SyntaxError) else f"{relative(path)}:{line}: "
    return f"{place}{type(error).__name__}: {error}"


def _new_module(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def _executed(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    return module
