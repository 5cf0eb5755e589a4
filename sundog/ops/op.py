"""What every op has: a Problem, a Config, a Plan, a Cost, and an entry in the table of ops.

An op's algorithm is a module with the names of `SHAPE`. Tools (check, bench, tune, ...) need
nothing else, so they work on a user's own op as on ours. load.py turns a name into a module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from ..world.streams import Use
    from ..world.world import World
else:  # ops name a world only in annotations, and take this name from here
    World = Any

# op.algorithm and its file. An op's first algorithm is used where nothing was measured.
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
    "quantized_all_gather.push": "sundog.collectives.quantized_all_gather",
    "quantized_all_reduce.two_shot": "sundog.collectives.quantized_all_reduce",
    "all_reduce_rms_norm.one_shot": "sundog.fused.all_reduce_rms_norm_one_shot",
    "all_reduce_rms_norm.low_latency": "sundog.fused.all_reduce_rms_norm_low_latency",
    "all_reduce_rms_norm.two_shot": "sundog.fused.all_reduce_rms_norm_two_shot",
    "all_reduce_rms_norm.two_shot_sliced": "sundog.fused.all_reduce_rms_norm_two_shot_sliced",
    "all_gather_matmul.barrier": "sundog.fused.all_gather_matmul_barrier",
    "all_gather_matmul.hbm_buffer": "sundog.fused.all_gather_matmul_hbm_buffer",
    "all_gather_matmul.direct": "sundog.fused.all_gather_matmul_direct",
    "all_gather_matmul.cublas": "sundog.fused.all_gather_matmul_cublas",
    "all_gather_matmul.copy_engine": "sundog.fused.all_gather_matmul_copy_engine",
    "matmul_all_gather.push": "sundog.fused.matmul_all_gather",
    "matmul_all_gather.barrier": "sundog.fused.matmul_all_gather_barrier",
    "matmul_all_gather.cublas": "sundog.fused.matmul_all_gather_cublas",
    "matmul_reduce_scatter.push": "sundog.fused.matmul_reduce_scatter",
    "matmul_reduce_scatter.barrier": "sundog.fused.matmul_reduce_scatter_barrier",
    "matmul_reduce_scatter.cublas": "sundog.fused.matmul_reduce_scatter_cublas",
    "matmul_all_reduce.one_shot": "sundog.fused.matmul_all_reduce_one_shot",
    "matmul_all_reduce.two_shot": "sundog.fused.matmul_all_reduce_two_shot",
    "matmul_all_reduce.barrier": "sundog.fused.matmul_all_reduce_barrier",
    "matmul_all_reduce.cublas": "sundog.fused.matmul_all_reduce_cublas",
    "scaled_all_gather_matmul.barrier": "sundog.fused.scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter.barrier": "sundog.fused.scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce.barrier": "sundog.fused.scaled_matmul_all_reduce",
    "moe_dispatch.push": "sundog.fused.moe_dispatch_push",
    "moe_dispatch.low_latency": "sundog.fused.moe_dispatch_low_latency",
    "moe_combine.pull": "sundog.fused.moe_combine",
}
# Other functions of a world, which have no algorithms.
FUNCTIONS = {
    "device_barrier": "sundog.collectives.device_barrier",
    "send": "sundog.collectives.send_recv",
    "recv": "sundog.collectives.send_recv",
}
BY_REQUEST = ("all_reduce.ring", "all_reduce.atomic")  # other orders of addition
# What a file of an algorithm has. docs/reference/own_ops.md says what each name is.
SHAPE = (
    "Problem", "Config", "valid", "space", "default", "cost", "cases", "inputs", "reference",
    "plan",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """The least that an op must do, per rank, for roofline, bench and cost models."""

    flops: int
    read_bytes: int  # of device memory, on any rank
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
        """Free the workspaces, on every rank at the same place in its program.

        Refused while a captured graph uses them: call graph.free() first.
        """
        self.world.barrier()  # a peer's kernel may still read them when this rank's has ended
        for tensor in self.workspaces:
            self.world.free(tensor)


# what every plan checks


def check_plain(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if a tensor's memory is not what its shape, strides and dtype say."""
    found = _unusual(tensor)
    if found is not None:
        what, instead = found
        raise ValueError(f"{op}: {name} is {what}; {instead.format(name)}")


def _unusual(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Say what a tensor is, and what to do. What would break a later question is asked first."""
    if hasattr(tensor, "to_local"):
        return "a DTensor", "pass {0}.to_local(), which is this rank's part"
    if type(tensor) is not torch.Tensor and hasattr(tensor, "fake_mode"):
        return "a fake tensor, without data", "pass a tensor that was made outside the fake mode"
    if tensor.is_nested:
        return "a nested tensor", "pass {0}.values(), or each of its tensors"
    if hasattr(type(tensor), "__tensor_flatten__"):
        what = f"an instance of {type(tensor).__name__}, which wraps a tensor and has no memory"
        return what, "pass the tensor inside; for a functional collective's result {0}.wait()"
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
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory", "pass {0}.clone()"
    if tensor.dtype in _SHELLS:
        return f"of {tensor.dtype}, which torch can't copy", "pass {0}.view(torch.uint8)"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor, without data", "pass a tensor that was made outside of that"
    return None


# Dtypes that torch has no kernels for: an element takes a byte, and nothing reads it.
_SHELLS = frozenset(
    getattr(torch, f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in range(1, 8)
    if hasattr(torch, f"{sign}int{bits}")
)


class NoFormula(ValueError):
    """A tensor requires grad, and this call would lose its gradient.

    `world.all_reduce(x)` then calls the op of torch, which has a formula (torch/calls.py).
    """


def checked_rank(rank: Any, size: int) -> int:
    """Return a rank as the int that kernels take; it may come as a tensor or from numpy."""
    try:
        number = rank if isinstance(rank, int) else operator.index(rank)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        raise ValueError(f"rank {rank!r} is outside this world of {size} ranks (0 to {size - 1})")
    return number


def checked_tensor(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a tensor, got a {type(tensor).__name__}: {tensor!r:.60}")
    return tensor


def check_grad(op: str, *tensors: Any, name: str = "") -> None:
    """Raise where a gradient would be lost: kernels have no backward formula.

    Inside an autograd.Function grad mode is off, so an op can be part of one.
    """
    with torch._C.DisableTorchFunction():  # on `virtual` it would check every access
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            called = name or f"argument {place}"
            if is_functorch_wrapped_tensor(tensor):
                raise ValueError(
                    f"{op}: {called} is a tensor of torch.func.grad, vmap or another transform, "
                    f"and {op} has no formula for them. Call it outside the transformed function."
                )
            if (
                forward_ad._current_level >= 0
                and forward_ad.unpack_dual(tensor).tangent is not None
            ):
                raise ValueError(
                    f"{op}: {called} has a tangent of forward-mode differentiation, and {op} has "
                    "no formula for it: the tangent would be lost. Call it outside dual_level."
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NoFormula(
                    f"{op}: {called} requires grad, and {op} has no backward formula: the gradient "
                    f"would be lost. Call it inside `with torch.no_grad():`, or pass "
                    f"{name or 'the tensor'}.detach()."
                )


def new_output(x: Any, times: int = 1, parts: int = 1) -> torch.Tensor | None:
    """Return memory for a result with `times / parts` as many rows as x; None if rows do not split.

    If nobody keeps the previous result, torch returns its memory again: the call can be repeated.
    """
    if not is_dense(x):
        return None
    with torch._C.DisableTorchFunction():  # on `virtual` it would check every access
        shape, dtype, device = x.shape, x.dtype, x.device
    rows = (shape[0] if shape else 1) * times
    if rows % parts:
        return None
    return torch.empty((rows // parts, *shape[1:]), dtype=dtype, device=device)


def is_dense(x: Any) -> bool:
    """Return whether x is a tensor with strides, neither sparse nor nested."""
    if not isinstance(x, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():  # on `virtual` it would check every access
        return x.layout is torch.strided and not x.is_nested


def agree(world: World, op: str, problem: Any, config: Any, refused: str | None) -> None:
    """Compare problem and config on all ranks: a collective on the host.

    `refused` is what `valid` returned. Compare before raising, so that the error names the rank
    that disagrees. A call of the op (dispatch.py) has already compared them.
    """
    if world._plans.agreed != (problem, config):
        world._plans.compare(op, f"{problem}, {config}")
    if refused is not None:
        raise ValueError(f"{op}: {refused}")


def barrier_flags(world: World, op: str, programs: int, *names: str) -> list[torch.Tensor]:
    """Allocate flags for barriers of the programs with the same number on all ranks, and epochs.

    A kernel passes `flags + program * size` to signal.barrier_ranks.
    """
    flags = [world.signals((programs, world.size), f"{op}.{name}") for name in names]
    epochs = world.signals(programs, f"{op}.epochs")
    world.barrier()  # every rank's flags are zero before the first signal
    return [*flags, epochs]
