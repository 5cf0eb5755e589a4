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
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..errors import RankMismatch, by_rank

if TYPE_CHECKING:
    from ..world.streams import Use
    from ..world.world import World

__all__ = [
    "BY_REQUEST", "FUNCTIONS", "OPS", "SHAPE", "Cost", "NoFormula", "Plan", "agree", "algorithms",
    "check_grad", "check_plain", "find", "functions", "is_op", "load", "load_package", "sentence",
]  # fmt: skip

# op.algorithm and its file. The first of an op is the one that is used where nothing was measured.
OPS = {
    "all_gather.push": "sundog.collectives.all_gather_push",
    "all_gather.pull": "sundog.collectives.all_gather_pull",
    "all_gather.partitioned": "sundog.collectives.all_gather_partitioned",
    "all_gather.gluon": "sundog.collectives.all_gather_gluon",
    "all_to_all.push": "sundog.collectives.all_to_all_push",
    "all_to_all.mail": "sundog.collectives.all_to_all_mail",
    "broadcast.push": "sundog.collectives.broadcast",
    "gather.pull": "sundog.collectives.gather",
    "scatter.push": "sundog.collectives.scatter",
    "all_reduce.one_shot": "sundog.collectives.all_reduce_one_shot",
    "all_reduce.low_latency": "sundog.collectives.all_reduce_low_latency",
    "all_reduce.two_shot": "sundog.collectives.all_reduce_two_shot",
    "all_reduce.ring": "sundog.collectives.all_reduce_ring",
    "all_reduce.atomic": "sundog.collectives.all_reduce_atomic",
    "reduce_scatter.direct": "sundog.collectives.reduce_scatter",
    "reduce.direct": "sundog.collectives.reduce",
    "all_gather_matmul.barrier": "sundog.fused.all_gather_matmul_barrier",
    "all_gather_matmul.hbm_buffer": "sundog.fused.all_gather_matmul_hbm_buffer",
    "all_gather_matmul.direct": "sundog.fused.all_gather_matmul_direct",
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


@dataclass(frozen=True)
class Plan:
    """An op bound to a problem and a config, its workspaces allocated. Calling it only launches."""

    world: World
    problem: Any
    config: Any
    workspaces: tuple[torch.Tensor, ...]
    launch: Callable[..., Any]
    used: list[Use] = field(default_factory=list, repr=False, compare=False)  # the latest one

    def __call__(self, *tensors: torch.Tensor) -> Any:
        check_grad("a plan", *tensors)
        self.world._check_open()
        self.world._streams.mark_used(self)
        return self.launch(*tensors)

    def free(self) -> None:
        """Give the workspaces back, on every rank at the same place in its program.

        Refused while a captured graph uses them: graph.free() comes first.
        """
        self.world.barrier()  # a peer's kernel may still read them when this rank's has ended
        for tensor in self.workspaces:
            self.world.free(tensor)


def check_plain(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError if a tensor's memory is not what its shape, strides and dtype say."""
    found = _unusual(tensor)
    if found is not None:
        what, instead = found
        raise ValueError(f"{op}: {name} is {what}; {instead.format(name)}")


def _unusual(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is, and what to do about it. First what would break the questions below."""
    if hasattr(tensor, "to_local"):
        return "a DTensor", "pass {0}.to_local(), which is this rank's part"
    if tensor.is_nested:
        return "a nested tensor", "pass {0}.values(), or each of its tensors"
    if tensor.layout != torch.strided:
        return f"not dense ({tensor.layout})", "pass {0}.to_dense()"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})", "pass {0}.int_repr(), and the scale on its own"
    if tensor.is_meta:
        return "on the meta device, without data", "pass a tensor on this rank's device"
    if tensor.is_conj():
        return "a view that is conjugated when it is read", "pass {0}.resolve_conj()"
    if tensor.is_neg():
        return "a view that is negated when it is read", "pass {0}.resolve_neg()"
    return None


class NoFormula(ValueError):
    """A tensor requires grad, and this call would lose its gradient.

    `world.all_reduce(x)` goes on from here to the op of torch that has a formula (torch/calls.py).
    """


def check_grad(op: str, *tensors: Any, name: str = "") -> None:
    """Raise where a gradient would be lost: kernels have no backward formula.

    Inside an autograd.Function grad mode is off, so an op can be a part of one.
    """
    with torch._C.DisableTorchFunction():  # on `virtual` each look would be asked for its reason
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            called = name or f"argument {place}"
            if is_functorch_wrapped_tensor(tensor):
                raise ValueError(
                    f"{op}: {called} is a tensor of torch.func.grad, vmap or another transform, "
                    f"and {op} has no formula for them. Call it outside the transformed function."
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NoFormula(
                    f"{op}: {called} requires grad, and {op} has no backward formula: the gradient "
                    f"would be lost. Call it inside `with torch.no_grad():`, or pass "
                    f"{name or 'the tensor'}.detach()."
                )


def agree(world: World, op: str, problem: Any, config: Any, refused: str | None) -> None:
    """Compare problem and config on all ranks: a collective on the host.

    `refused` is what `valid` says. Compare before raising, so that the error names the rank that
    disagrees. A call of the op (dispatch.py) has compared them already.
    """
    if world._plans.agreed != (problem, config):
        everyone = world._compare(f"{problem}, {config}", f"plan of {op}")
        if len(set(everyone)) > 1:
            text = by_rank(everyone, world._ranks)
            raise RankMismatch(f"{op}: ranks passed different arguments:\n{text}")
    if refused is not None:
        raise ValueError(f"{op}: {refused}")


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
