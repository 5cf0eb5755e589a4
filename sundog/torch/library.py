"""Every collective and fused op as an op of torch: torch.ops.sundog.all_reduce and so on.

`TABLE` has a row per op: its schema, the shape of its result (the fake kernel), what the backward
needs, and the backward formula. A world is passed by name, as groups are in torch's functional
collectives. A formula (formulas.py) treats the sum of all ranks' losses as the loss, so the
backward of an all-reduce is an all-reduce. Formulas call ops of this table, so they can be
differentiated again. The backward of a fused op is the fused op that mirrors it.

Kernels are registered by Library.impl, not by torch.library.custom_op, which costs the host more at
every call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, empty_like, is_grad_enabled
from torch._C import _any_requires_grad as any_requires_grad

from ..fused.moe_dispatch import Handle, Problem
from ..ops.dispatch import again, identity_of
from ..ops.load import functions
from . import formulas, shapes
from .formulas import keep, keep_matrices, keep_sum, no_formula, refused
from .names import find_world

ops = torch.ops.sundog
Adapt = Callable[[Callable[..., Any]], Callable[..., Any]]


class TorchOp(NamedTuple):
    """A row of the table."""

    arguments: str  # of the schema; `algo` and `world` follow
    shape: Callable[..., Any]  # the fake kernel
    save: Callable[..., None]  # keeps what the backward needs: save(ctx, inputs, output)
    backward: Callable[..., Any]  # the arguments' gradients, from ctx and the result's gradient
    returns: str = "Tensor"


_MATRICES = "Tensor a, Tensor b, Tensor? bias, str? activation, ScalarType? out_dtype"
_SCALED = "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale"
_ROUTES = "int experts, SymInt max_tokens, SymInt capacity"

TABLE: dict[str, TorchOp] = {
    "all_reduce": TorchOp(
        "Tensor x, str op", shapes.reduced, keep_sum("all_reduce", 1), formulas.all_reduce_backward
    ),
    "all_gather": TorchOp(
        "Tensor x, SymInt[]? splits", shapes.gathered, keep, formulas.all_gather_backward
    ),
    "reduce_scatter": TorchOp(
        "Tensor x, str op", shapes.scattered, keep_sum("reduce_scatter", 1),
        formulas.reduce_scatter_backward,
    ),
    "all_to_all": TorchOp(
        "Tensor x, SymInt[]? in_splits, SymInt[]? out_splits", shapes.exchanged, keep,
        formulas.all_to_all_backward,
    ),
    "broadcast": TorchOp("Tensor x, int src", shapes.same, keep, formulas.broadcast_backward),
    "reduce": TorchOp(
        "Tensor x, int dst, str op", shapes.reduced_to_one, keep_sum("reduce", 2),
        formulas.reduce_backward,
    ),
    "gather": TorchOp("Tensor x, int dst", shapes.whole, keep, formulas.gather_backward),
    "scatter": TorchOp("Tensor x, int src", shapes.part, keep, formulas.scatter_backward),
    "all_gather_matmul": TorchOp(
        f"{_MATRICES}, str shard", shapes.all_gathered_product, keep_matrices,
        formulas.all_gather_matmul_backward,
    ),
    "matmul_reduce_scatter": TorchOp(
        _MATRICES, shapes.by_product("matmul_reduce_scatter"), keep_matrices,
        formulas.matmul_reduce_scatter_backward,
    ),
    "matmul_all_reduce": TorchOp(
        _MATRICES, shapes.by_product("matmul_all_reduce"), keep_matrices,
        formulas.matmul_all_reduce_backward,
    ),
    "matmul_all_gather": TorchOp(
        _MATRICES, shapes.by_product("matmul_all_gather"), keep_matrices,
        formulas.matmul_all_gather_backward,
    ),
    "all_reduce_rms_norm": TorchOp(
        "Tensor x, Tensor residual, Tensor weight, float eps, Tensor? bias, bool gemma, str quant, "
        "Tensor? scale, bool both, ScalarType? fp8", shapes.normed, formulas.keep_rows,
        formulas.all_reduce_rms_norm_backward, "Tensor[]",
    ),
    "quantized_all_reduce": TorchOp(
        "Tensor x, str op, str wire", shapes.quantized_sum, no_formula("quantized_all_reduce"),
        refused,
    ),
    "quantized_all_gather": TorchOp(
        "Tensor x, str wire", shapes.quantized_whole, no_formula("quantized_all_gather"), refused
    ),
    "scaled_all_gather_matmul": TorchOp(
        f"{_SCALED}, Tensor? bias, str? activation, ScalarType? out_dtype, str shard",
        shapes.all_gathered_scaled, no_formula("scaled_all_gather_matmul"), refused,
    ),
    "scaled_matmul_reduce_scatter": TorchOp(
        f"{_SCALED}, ScalarType? out_dtype", shapes.scaled_sum("scaled_matmul_reduce_scatter"),
        no_formula("scaled_matmul_reduce_scatter"), refused,
    ),
    "scaled_matmul_all_reduce": TorchOp(
        f"{_SCALED}, ScalarType? out_dtype", shapes.scaled_sum("scaled_matmul_all_reduce"),
        no_formula("scaled_matmul_all_reduce"), refused,
    ),
    "moe_dispatch": TorchOp(
        f"Tensor x, Tensor ids, {_ROUTES}", shapes.dispatched, formulas.keep_routes,
        formulas.moe_dispatch_backward, "(Tensor, Tensor, Tensor)",
    ),
    "moe_combine": TorchOp(
        f"Tensor y, Tensor ids, Tensor slots, Tensor weights, {_ROUTES}", shapes.combined,
        formulas.keep_outputs, formulas.moe_combine_backward,
    ),
}  # fmt: skip


# kernels: a world's functions


class _Library(torch.library.Library):
    """Calls a kernel without another trip through the dispatcher, with or without a gradient."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":
            fn = _direct(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **options)


_kernels: dict[str, Callable[..., Any]] = {}
# The keys of tensors with dense, real data, outside every mode and function transform.
_PLAIN = {"CPU", "CUDA", "BackendSelect", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA"}


def _direct(name: str, dispatched: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of the Autograd key. Torch's own one asks the dispatcher again."""
    is_plain: dict[int, bool] = {}  # by a call's keys
    kernel, differentiated = _kernels[name], _differentiated(name)

    def call(keyset: Any, *arguments: Any) -> Any:
        keys = keyset.raw_repr()
        if keys not in is_plain:
            is_plain[keys] = _PLAIN.issuperset(re.findall(r"(\w+)[,)]", str(keyset)))
        if not is_plain[keys]:
            return dispatched(keyset, *arguments)
        if not (is_grad_enabled() and any_requires_grad(*arguments)):
            return kernel(*arguments)
        if differentiated is None:
            return dispatched(keyset, *arguments)
        return differentiated(*arguments)

    return call


def _differentiated(name: str) -> Callable[..., Any] | None:
    """Return what makes the autograd graph; None for an op whose result is a list of tensors."""
    row, kernel = TABLE[name], _kernels[name]
    if row.returns == "Tensor[]":
        return None

    def forward(ctx: Any, *arguments: Any) -> Any:
        result = kernel(*arguments)
        row.save(ctx, arguments, result)
        return result

    members = {"forward": staticmethod(forward), "backward": staticmethod(row.backward)}
    made: Any = type(f"sundog_{name}", (torch.autograd.Function,), members)
    apply: Callable[..., Any] = made.apply
    return apply


_NONE: dict[str, Callable[..., Any]] = {}
_CONTIGUOUS = torch.contiguous_format


def _kernel(name: str, function: Callable[..., Any], adapt: Adapt) -> Callable[..., Any]:
    """Find the world and call its function, or that of a world over several machines."""
    by_class: dict[type, Callable[..., Any]] = {}

    def kernel(*arguments: Any) -> Any:
        world = find_world(arguments[-1])
        call = by_class.get(type(world))
        if call is None:
            own = getattr(type(world), "SPANNING", _NONE).get(name, function)
            call = by_class[type(world)] = adapt(own)
        return call(world, *arguments[:-2], algo=arguments[-2])

    return kernel


def _relaunched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Ask first whether the call is a repetition: the dispatcher knows that x is a plain tensor."""

    def all_reduce(x: Tensor, op: str, algo: str, world: str) -> Tensor:
        found = find_world(world)
        if found.num_nodes == 1:
            out = empty_like(x, memory_format=_CONTIGUOUS)
            if again(found, identity_of(found, ("all_reduce", op, True), algo, x, out), x, out):
                return out
            del out  # so that the function allocates the same memory
        return cast(Tensor, kernel(x, op, algo, world))

    return all_reduce


# how a function's arguments and results become the op's


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _to_one(is_whole: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Run an op whose result one rank gets. The others return zeros, for their backward."""

    def on_all(world: Any, x: Tensor, *rest: Any, algo: str) -> Tensor:
        result = function(world, x, *rest, algo=algo)
        if result is not None:
            return result
        return x.new_zeros(shapes.whole_shape(x, world.size) if is_whole else x.shape)

    return on_all


def _by_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda world, x, splits, algo: function(world, x, splits=splits, algo=algo)


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy all results but one: they share memory, which an op of torch must not.

    The one that stays begins that memory, as the fake kernel's results do.
    """

    def apart(world: Any, *given: Any, algo: str) -> list[Tensor]:
        x, residual, weight, eps, bias, gemma, quant, scale, both, fp8 = given
        first, *rest = function(
            world, x, residual, weight, eps, bias=bias, gemma=gemma, quant=quant, scale=scale,
            both=both, fp8=fp8, algo=algo,
        )  # fmt: skip
        return [
            first.clone() if first.storage_offset() else first,
            *[each.clone() for each in rest],
        ]

    return apart


def _rows_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Reorder arguments: all_to_all takes `out` before the splits."""
    return lambda world, x, *splits, algo: function(world, x, None, *splits, algo=algo)


def _by_wire(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: Any, *given: Any, algo: str) -> Tensor:
        *before, wire = given
        found = shapes.wire_named(function.__name__, wire)
        return cast(Tensor, function(world, *before, wire=found, algo=algo))

    return call


def _dispatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Send only tokens; the caller keeps the weights. Counts, in the tokens' memory, are copied."""

    def dispatch(
        world: Any, x: Tensor, ids: Tensor, experts: int, max_tokens: int, capacity: int, algo: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.empty(ids.shape, device=ids.device)
        more: Any = {"max_tokens": max_tokens, "capacity": capacity, "algo": algo}
        tokens, counts, handle = function(world, x, ids, weights, experts=experts, **more)
        return tokens, counts.clone(), handle.slots

    return dispatch


def _combine(function: Callable[..., Any]) -> Callable[..., Any]:
    def combine(
        world: Any, y: Tensor, ids: Tensor, slots: Tensor, weights: Tensor, experts: int,
        max_tokens: int, capacity: int, algo: str,
    ) -> Tensor:  # fmt: skip
        sizes = (max_tokens, y.shape[-1], y.dtype, world.size, experts, ids.shape[1], capacity)
        handle = Handle(Problem(*sizes), ids, slots, weights)
        return cast(Tensor, function(world, y, handle, algo=algo))

    return combine


_ADAPTED: dict[str, Adapt] = {
    "reduce": functools.partial(_to_one, False),
    "gather": functools.partial(_to_one, True),
    "all_to_all": _rows_first,
    "all_gather": _by_parts,
    "all_reduce_rms_norm": _apart,
    "quantized_all_reduce": _by_wire,
    "quantized_all_gather": _by_wire,
    "moe_dispatch": _dispatch,
    "moe_combine": _combine,
}


def _register(library: torch.library.Library) -> None:
    found = functions()
    for name, row in TABLE.items():
        library.define(f"{name}({row.arguments}, str algo, str world) -> {row.returns}")
        kernel = _kernel(name, found[name], _ADAPTED.get(name, _as_it_is))
        _kernels[name] = _relaunched(kernel) if name == "all_reduce" else kernel
        for device in ("CPU", "CUDA"):
            library.impl(name, _kernels[name], device)
        fake = shapes.on_device(name, row.arguments, row.shape)
        torch.library.register_fake(f"sundog::{name}", fake, lib=library)
        # A rank that does not use the result, such as that of a reduce, still takes part.
        torch.fx.node.has_side_effect(getattr(ops, name).default)
        torch.library.register_autograd(
            f"sundog::{name}", row.backward, setup_context=row.save, lib=library
        )


_library = _Library("sundog", "DEF")
_register(_library)
