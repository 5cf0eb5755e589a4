"""Where `world.all_reduce(x)` goes when x requires grad, or when torch.compile traces the call.

Such calls go to the ops of torch (library.py), which have a backward formula and a fake kernel. All
others go straight to the collective. The functions here have the collectives' signatures. Dynamo
traces them, so they are plain Python, and read only a world's name, size and rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_dynamo_compiling as is_tracing

from ..collectives._given import name_of
from ..collectives._unequal import check_counts, check_pair
from ..fused._call import check_activation, check_shard, first_dim
from ..fused.all_reduce_rms_norm import number
from ..fused.moe_dispatch import Handle, parted, problem_of, with_scales
from ..ops.op import NoFormula
from .library import ops

if TYPE_CHECKING:
    from ..world.world import World


def routed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of World: the function itself, or the op of torch where that is needed.

    The function finds out in its own checks that a tensor requires grad. Asking the first tensor
    before saves those checks.
    """
    graph_call = _CALLS.get(name)
    if graph_call is None:
        return function

    @functools.wraps(function)
    def method(world: World, *args: Any, **kwargs: Any) -> Any:
        if is_tracing() or is_recorded() or (args and _has_grad(args[0])):
            return graph_call(world, *args, **kwargs)
        try:
            return function(world, *args, **kwargs)
        except NoFormula:
            pass
        return graph_call(world, *args, **kwargs)

    return method


def is_recorded() -> bool:
    """Return whether torch.jit.trace, make_fx, torch.export or a fake mode records this call.

    They would see what the host does for a collective, not the kernels.
    """
    if torch._C._get_tracing_state() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(each) for each in (keys.PROXY, keys.FAKE))


def _has_grad(x: Any) -> bool:
    """Return whether this is a usual tensor in training; the collective finds the others."""
    if type(x) not in _USUAL or not torch.is_grad_enabled() or is_functorch_wrapped_tensor(x):
        return False
    with torch._C.DisableTorchFunction():  # on `virtual` it would check every access
        return not x.is_nested and bool(x.requires_grad)


_USUAL = (torch.Tensor, torch.nn.Parameter)


def all_reduce(
    world: World, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("all_reduce", world, config, async_op, explain, out, x=x)
    return _into(out, ops.all_reduce.default(x, name_of(op), algo, world.name))


def all_gather(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None, *, algo: str = "auto",
    config: Any = None, async_op: bool = False, explain: bool = False,
    splits: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    _check_call("all_gather", world, config, async_op, explain, out, x=x)
    parts = None
    if splits is not None:
        parts = check_counts(world.size, "all_gather: splits", splits)
    return _into(out, ops.all_gather.default(x, parts, algo, world.name))


def reduce_scatter(
    world: World, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("reduce_scatter", world, config, async_op, explain, out, x=x)
    return _into(out, ops.reduce_scatter.default(x, name_of(op), algo, world.name))


def all_to_all(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None,
    in_splits: Sequence[int] | None = None, out_splits: Sequence[int] | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("all_to_all", world, config, async_op, explain, out, x=x)
    if in_splits is not None or out_splits is not None:
        in_splits, out_splits = check_pair(world.size, in_splits, out_splits)
    return _into(out, ops.all_to_all.default(x, in_splits, out_splits, algo, world.name))


def broadcast(
    world: World, x: torch.Tensor, src: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("broadcast", world, config, async_op, explain, out, x=x)
    src = world._check_rank(src)
    return _into(out, ops.broadcast.default(x, src, algo, world.name))


def reduce(
    world: World, x: torch.Tensor, dst: int, op: str = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    _check_call("reduce", world, config, async_op, explain, out, x=x)
    dst = world._check_rank(dst)
    result = ops.reduce.default(x, dst, name_of(op), algo, world.name)
    return _on_one(world, dst, out, result, x)


def gather(
    world: World, x: torch.Tensor, dst: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    _check_call("gather", world, config, async_op, explain, out, x=x)
    dst = world._check_rank(dst)
    result = ops.gather.default(x, dst, algo, world.name)
    return _on_one(world, dst, out, result, x)


def scatter(
    world: World, x: torch.Tensor | None, src: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("scatter", world, config, async_op, explain, out, x=x)
    src = world._check_rank(src)
    if x is None:
        raise ValueError(
            "scatter: x is None; where scatter is differentiated or compiled, every rank passes a "
            "tensor of the shape of the source's x"
        )
    return _into(out, ops.scatter.default(x, src, algo, world.name))


def all_gather_matmul(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None, shard: str = "k",
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("all_gather_matmul", world, config, False, explain, out, a=a, b=b, bias=bias)
    check_activation("all_gather_matmul", activation)
    check_shard("all_gather_matmul", shard)
    call = ops.all_gather_matmul.default
    more = (b, bias, activation, out_dtype, shard, algo, world.name)
    times = world.size if shard == "m" else 1
    return _into(out, _by_rows("all_gather_matmul", a, lambda rows: call(rows, *more), times))


def _by_rows(
    name: str, a: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], times: int = 1,
    slices: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Do as by_rows of the fused ops: the op of torch takes a matrix, and views have gradients."""
    if a.dim() <= 2:
        return product(a)
    first = first_dim(name, a, times, slices)
    result = product(a.flatten(0, -2))
    return result.view(first, *a.shape[1:-1], result.shape[-1])


def _summed_or_gathered(name: str) -> Callable[..., torch.Tensor]:
    """Return the function for a product that a collective follows."""

    def call(
        world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None, *,
        algo: str = "auto", config: Any = None, explain: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        _check_call(name, world, config, False, explain, out, a=a, b=b, bias=bias)
        check_activation(name, activation)
        op, more = getattr(ops, name).default, (b, bias, activation, out_dtype, algo, world.name)
        times = world.size if name == "matmul_all_gather" else 1
        slices = world.size if name == "matmul_reduce_scatter" else 1
        return _into(out, _by_rows(name, a, lambda rows: op(rows, *more), times, slices))

    return call


def all_reduce_rms_norm(
    world: World, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
    eps: float = 1e-6, *, bias: torch.Tensor | None = None, gemma: bool = False,
    quant: str = "", scale: torch.Tensor | None = None, both: bool = False,
    fp8: torch.dtype | None = None, out: torch.Tensor | None = None,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    name = "all_reduce_rms_norm"
    _refuse_out(name, out)
    tensors = {"x": x, "residual": residual, "weight": weight, "bias": bias, "scale": scale}
    _check_call(name, world, config, False, explain, out, **tensors)
    call = ops.all_reduce_rms_norm.default
    given = (x, residual, weight, number(eps), bias, gemma, str(quant), scale, both, fp8)
    return tuple(call(*given, algo, world.name))


def quantized_all_reduce(
    world: World, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, *,
    wire: str | torch.dtype = "fp8", algo: str = "auto", config: Any = None,
    async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("quantized_all_reduce", world, config, async_op, explain, out, x=x)
    call = ops.quantized_all_reduce.default
    return _into(out, call(x, op, _wire_name(wire), algo, world.name))


def quantized_all_gather(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None, *,
    wire: str | torch.dtype = "fp8", algo: str = "auto", config: Any = None,
    async_op: bool = False, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check_call("quantized_all_gather", world, config, async_op, explain, out, x=x)
    call = ops.quantized_all_gather.default
    return _into(out, call(x, _wire_name(wire), algo, world.name))


def _wire_name(wire: Any) -> str:
    return wire if isinstance(wire, str) else str(wire).removeprefix("torch.")


def scaled_all_gather_matmul(
    world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None, shard: str = "k", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    tensors = {"a": a, "b": b, "bias": bias, "a_scale": a_scale, "b_scale": b_scale}
    _check_call("scaled_all_gather_matmul", world, config, False, explain, out, **tensors)
    check_activation("scaled_all_gather_matmul", activation)
    check_shard("scaled_all_gather_matmul", shard)
    given = (a, b, a_scale, b_scale, bias, activation, out_dtype, shard)
    return _into(out, ops.scaled_all_gather_matmul.default(*given, algo, world.name))


def _scaled_sum(name: str) -> Callable[..., torch.Tensor]:
    """Return the function for an FP8 product that a collective adds up."""

    def call(
        world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor,
        b_scale: torch.Tensor, out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None, *,
        algo: str = "auto", config: Any = None, explain: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        tensors = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
        _check_call(name, world, config, False, explain, out, **tensors)
        op = getattr(ops, name).default
        return _into(out, op(a, b, a_scale, b_scale, out_dtype, algo, world.name))

    return call


def moe_dispatch(
    world: World, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    experts: int, max_tokens: int = 0, capacity: int = 0, scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None, algo: str = "auto", config: Any = None,
    explain: bool = False,
) -> tuple[Any, torch.Tensor, Handle]:  # fmt: skip
    name = "moe_dispatch"
    _refuse_out(name, out)
    tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    _check_call(name, world, config, False, explain, out, **tensors)
    has_grad = x.requires_grad or (scales is not None and scales.requires_grad)
    if scales is not None and has_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: x or scales requires grad, and with scales {name} has no backward formula: "
            "the gradient would be lost. Pass .detach() of both."
        )
    problem = problem_of(world, x, topk_ids, topk_weights, experts, max_tokens, capacity)
    given, problem = with_scales(problem, x, scales)
    ids, asked = topk_ids.contiguous(), (experts, problem.max_tokens, capacity, algo, world.name)
    tokens, counts, slots = ops.moe_dispatch.default(given, ids, *asked)
    found = tokens if scales is None else parted(tokens, x, scales)
    return found, counts, Handle(problem, ids, slots, topk_weights.float().contiguous())


def moe_combine(
    world: World, y: torch.Tensor, handle: Handle, *, out: torch.Tensor | None = None,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    if not isinstance(handle, Handle):
        raise ValueError(f"moe_combine: handle is a {type(handle)}, expected moe_dispatch's")
    _check_call("moe_combine", world, config, False, explain, out, y=y, topk_weights=handle.weights)
    asked = handle.problem
    sizes = (asked.experts, asked.max_tokens, asked.capacity)
    call = ops.moe_combine.default
    result = call(y, handle.ids, handle.slots, handle.weights, *sizes, algo, world.name)
    return _into(out, result)


def _refuse_out(name: str, out: torch.Tensor | None) -> None:
    if out is not None:
        raise ValueError(
            f"{name}: out= is not possible where {name} is differentiated or compiled; leave it out"
        )


def _check_call(
    name: str, world: World, config: Any, async_op: bool, explain: bool,
    out: torch.Tensor | None, **inputs: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for arguments that a graph can't hold."""
    world._check_open()
    for called, x in inputs.items():
        may_lack = called in ("bias", "scale") or name == "scatter"  # whose own error says more
        if not isinstance(x, torch.Tensor) and not (x is None and may_lack):
            raise ValueError(f"{name}: {called} is a {type(x).__name__}, expected a tensor")
    if config is not None or async_op or explain:
        option = "config" if config is not None else "async_op" if async_op else "explain"
        raise ValueError(
            f"{name}: {option}=... is not possible where {name} is differentiated or compiled; "
            "leave it out, or call it inside `with torch.no_grad():`, uncompiled"
        )
    if out is None or not torch.is_grad_enabled():
        return
    for called, tensor in (("out", out), *inputs.items()):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name}: {called} requires grad, and with out= {name} has no backward formula: "
                f"the gradient would be lost. Leave out= out, call it inside `with "
                f"torch.no_grad():`, or pass {called}.detach()."
            )


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    if out is None:
        return result
    if out.numel() != result.numel() or out.dtype != result.dtype or out.device != result.device:
        raise ValueError(
            f"out has {out.numel()} elements of {out.dtype} on {out.device}, expected "
            f"{result.numel()} of {result.dtype} on {result.device}"
        )
    return out.copy_(result.view(out.shape))


def _on_one(
    world: World, dst: int, out: torch.Tensor | None, result: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    """Return the result on rank `dst`. Others only need a tensor for their part in the backward."""
    if world.rank == dst:
        return _into(out, result)
    return result if torch.is_grad_enabled() and x.requires_grad else None


_CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
        all_gather_matmul, all_reduce_rms_norm, quantized_all_reduce, quantized_all_gather,
        scaled_all_gather_matmul, moe_dispatch, moe_combine,
    )
}  # fmt: skip
for _name in ("matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"):
    _CALLS[_name] = _summed_or_gathered(_name)
for _name in ("scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"):
    _CALLS[_name] = _scaled_sum(_name)
