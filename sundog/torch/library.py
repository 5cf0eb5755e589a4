"""Every collective and fused op as an op of torch: torch.ops.sundog.all_reduce and so on.

`TABLE` has a row per op: its schema, the shape of its result (the fake kernel), what the backward
needs, and the backward formula. A world travels by name, as groups do in torch's functional
collectives. A formula (_py) treats the sum of all ranks' losses as the loss, so the
backward of an all-reduce is an all-reduce; formulas call ops of this table, so they can be
differentiated again. The backward of a fused op is the fused op that mirrors it.

Kernels are registered by Library.impl and not by torch.library.custom_op, which costs more on the
host at every call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, empty_like, is_grad_enabled
from torch._C import _any_requires_grad as any_requires_grad

from ..collectives._given import has_views
from ..collectives._reduce import check
from ..fused import all_reduce_rms_norm as rms_norm
from ..fused.all_reduce_rms_norm import fp8_of
from ..ops.dispatch import latest
from ..ops.load import functions
from .formulas import (
    all_gather_backward,
    all_gather_matmul_backward,
    all_reduce_backward,
    all_reduce_rms_norm_backward,
    all_to_all_backward,
    broadcast_backward,
    gather_backward,
    keep,
    keep_matrices,
    keep_rows,
    keep_sum,
    matmul_all_gather_backward,
    matmul_all_reduce_backward,
    matmul_reduce_scatter_backward,
    reduce_backward,
    reduce_scatter_backward,
    scatter_backward,
)
from .names import find_world

__all__ = ["TABLE", "TorchOp", "ops"]

ops = torch.ops.sundog


class TorchOp(NamedTuple):
    """A row of the table."""

    arguments: str  # of the schema; `algo` and `world` follow
    shape: Callable[..., Any]  # the fake kernel
    save: Callable[..., None]  # keeps what the backward needs: save(ctx, inputs, output)
    backward: Callable[..., Any]  # gradients of the arguments, from ctx and that of the result
    returns: str = "Tensor"


# fake kernels: a tensor of the result's shape, or the sentence that the kernel would raise


def _checked(op: str, x: Tensor, world: str, name: str = "x") -> int:
    """Return the number of ranks; raise for a tensor that the kernel would not take."""
    found = find_world(world)
    if x.device.type != found.device.type:
        raise ValueError(
            f"{op}: {name} is on {x.device}, but this rank is on {found.device}; move it"
        )
    return found.size


def _check_reduction(name: str, op: str, x: Tensor) -> None:
    if not has_views(x, op):
        check(name, op, x.dtype)


def _same(x: Tensor, src: int, algo: str, world: str) -> Tensor:
    _checked("broadcast", x, world)
    return x.new_empty(x.shape)  # contiguous, whatever x is


def _reduced(x: Tensor, op: str, algo: str, world: str) -> Tensor:
    _checked("all_reduce", x, world)
    _check_reduction("all_reduce", op, x)
    return x.new_empty(x.shape)  # contiguous, whatever x is


def _reduced_to_one(x: Tensor, dst: int, op: str, algo: str, world: str) -> Tensor:
    _checked("reduce", x, world)
    _check_reduction("reduce", op, x)
    return x.new_empty(x.shape)  # contiguous, whatever x is


def _whole(op: str) -> Callable[..., Tensor]:
    def shape(x: Tensor, *rest: Any) -> Tensor:
        return x.new_empty(_whole_shape(x, _checked(op, x, rest[-1])))

    return shape


def _whole_shape(x: Tensor, size: int) -> tuple[int, ...]:
    return (size * x.shape[0], *x.shape[1:]) if x.dim() else (size,)


def _gathered(x: Tensor, splits: list[int] | None, algo: str, world: str) -> Tensor:
    size = _checked("all_gather", x, world)
    if splits is None:
        return x.new_empty(_whole_shape(x, size))
    if len(splits) != size or (x.shape[0] if x.dim() else 1) not in splits:
        raise ValueError(
            f"all_gather: splits {list(splits)} for x of shape {tuple(x.shape)}: expected the rows "
            f"of {size} ranks, x's own among them"
        )
    return x.new_empty((sum(splits), *x.shape[1:]))


def _scattered(x: Tensor, op: str, algo: str, world: str) -> Tensor:
    _check_reduction("reduce_scatter", op, x)
    return _slice("reduce_scatter", x, _checked("reduce_scatter", x, world))


def _part(x: Tensor, src: int, algo: str, world: str) -> Tensor:
    return _slice("scatter", x, _checked("scatter", x, world))


def _slice(op: str, x: Tensor, size: int) -> Tensor:
    length = x.shape[0] if x.dim() else 1
    if length % size:
        raise ValueError(
            f"{op}: x of shape {tuple(x.shape)} does not split into {size} equal slices"
        )
    return x.new_empty((length // size, *x.shape[1:]))


def _exchanged(
    x: Tensor, in_splits: list[int] | None, out_splits: list[int] | None, algo: str, world: str
) -> Tensor:
    _checked("all_to_all", x, world)
    return x.new_empty((x.shape[0] if out_splits is None else sum(out_splits), *x.shape[1:]))


def _all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None,
    out_dtype: torch.dtype | None, shard: str, algo: str, world: str,
) -> Tensor:  # fmt: skip
    size = _checked("all_gather_matmul", a, world, "a")
    rows, inner = (size, 1) if shard == "m" else (1, size)
    return _product("all_gather_matmul", a, b, a.shape[0] * rows, a.shape[1] * inner, out_dtype)


def _by_product(op: str) -> Callable[..., Tensor]:
    def shape(
        a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None,
        out_dtype: torch.dtype | None, algo: str, world: str,
    ) -> Tensor:  # fmt: skip
        size = _checked(op, a, world, "a")
        slices = size if op == "matmul_reduce_scatter" else 1
        copies = size if op == "matmul_all_gather" else 1
        if a.shape[0] % slices:
            raise ValueError(
                f"{op}: the {a.shape[0]} rows of a do not split into {slices} equal slices"
            )
        return _product(op, a, b, a.shape[0] * copies // slices, a.shape[1], out_dtype)

    return shape


def _normed(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None, gemma: bool,
    quant: str, scale: Tensor | None, both: bool, fp8: torch.dtype | None, algo: str, world: str,
) -> list[Tensor]:  # fmt: skip
    """Return them like all_reduce_rms_norm: normed, quantised, scales, residual, if they exist."""
    name = "all_reduce_rms_norm"
    size, hidden = _checked(name, x, world), x.shape[-1]
    kind = fp8 or fp8_of(x.device)
    problem = rms_norm.Problem(
        x.numel() // max(hidden, 1), hidden, x.dtype, size, eps, bias is not None, gemma, quant,
        scale is not None, both, kind,
    )  # fmt: skip
    refused = rms_norm.unfit(problem)
    if refused is not None:
        raise ValueError(f"{name}: {refused}")
    rms_norm.check_shapes(problem, x, residual, weight, bias, scale)
    found = [torch.empty_like(x)] if both or not quant else []
    if quant:
        found.append(torch.empty_like(x, dtype=kind))
        if scale is None:
            found.append(x.new_empty((*x.shape[:-1], problem.groups), dtype=torch.float32))
    return [*found, torch.empty_like(x)]


def _product(
    op: str, a: Tensor, b: Tensor, rows: int, inner: int, dtype: torch.dtype | None
) -> Tensor:
    if b.dim() != 2 or b.shape[0] != inner:
        raise ValueError(
            f"{op}: b has shape {tuple(b.shape)}, expected {inner} rows and two dimensions"
        )
    return a.new_empty((rows, b.shape[1]), dtype=dtype or a.dtype)


_MATRICES = "Tensor a, Tensor b, Tensor? bias, str? activation, ScalarType? out_dtype"

TABLE: dict[str, TorchOp] = {
    "all_reduce": TorchOp(
        "Tensor x, str op", _reduced, keep_sum("all_reduce", 1), all_reduce_backward
    ),
    "all_gather": TorchOp("Tensor x, SymInt[]? splits", _gathered, keep, all_gather_backward),
    "reduce_scatter": TorchOp(
        "Tensor x, str op", _scattered, keep_sum("reduce_scatter", 1), reduce_scatter_backward
    ),
    "all_to_all": TorchOp(
        "Tensor x, SymInt[]? in_splits, SymInt[]? out_splits", _exchanged, keep,
        all_to_all_backward,
    ),
    "broadcast": TorchOp("Tensor x, int src", _same, keep, broadcast_backward),
    "reduce": TorchOp(
        "Tensor x, int dst, str op", _reduced_to_one, keep_sum("reduce", 2), reduce_backward
    ),
    "gather": TorchOp("Tensor x, int dst", _whole("gather"), keep, gather_backward),
    "scatter": TorchOp("Tensor x, int src", _part, keep, scatter_backward),
    "all_gather_matmul": TorchOp(
        f"{_MATRICES}, str shard", _all_gather_matmul, keep_matrices, all_gather_matmul_backward
    ),
    "matmul_reduce_scatter": TorchOp(
        _MATRICES, _by_product("matmul_reduce_scatter"), keep_matrices,
        matmul_reduce_scatter_backward,
    ),
    "matmul_all_reduce": TorchOp(
        _MATRICES, _by_product("matmul_all_reduce"), keep_matrices, matmul_all_reduce_backward
    ),
    "matmul_all_gather": TorchOp(
        _MATRICES, _by_product("matmul_all_gather"), keep_matrices, matmul_all_gather_backward
    ),
    "all_reduce_rms_norm": TorchOp(
        "Tensor x, Tensor residual, Tensor weight, float eps, Tensor? bias, bool gemma, str quant, "
        "Tensor? scale, bool both, ScalarType? fp8", _normed, keep_rows,
        all_reduce_rms_norm_backward, "Tensor[]",
    ),
}  # fmt: skip


# kernels: the functions that a world has


class _Library(torch.library.Library):
    """Calls a kernel without another turn through the dispatcher where no gradient is wanted."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":
            fn = _direct(_kernels[op_name], fn)
        super().impl(op_name, fn, dispatch_key, **options)


_kernels: dict[str, Callable[..., Any]] = {}
# Of tensors that are dense and real data, outside every mode and function transform.
_PLAIN = {"CPU", "CUDA", "BackendSelect", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA"}


def _direct(kernel: Callable[..., Any], differentiated: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of the Autograd key. `differentiated`: torch's own, which takes 4 us."""
    is_plain: dict[int, bool] = {}  # by the keys of a call

    def call(keyset: Any, *arguments: Any) -> Any:
        keys = keyset.raw_repr()
        if keys not in is_plain:
            is_plain[keys] = _PLAIN.issuperset(re.findall(r"(\w+)[,)]", str(keyset)))
        if not is_plain[keys] or (is_grad_enabled() and any_requires_grad(*arguments)):
            return differentiated(keyset, *arguments)
        return kernel(*arguments)

    return call


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        *given, algo, name = arguments
        return function(find_world(name), *given, algo=algo)

    return kernel


_NONE: dict[str, Callable[..., Any]] = {}


def _of_world(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or the one that a world over several machines has for it."""

    def call(world: Any, *given: Any, **options: Any) -> Any:
        spanning = getattr(type(world), "SPANNING", _NONE)
        return spanning.get(name, function)(world, *given, **options)

    return call


def _all_reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    """Launch only, if it was called before with tensors at these places.

    The dispatcher has found that x is plain and needs no gradient, and `out` is made here: that is
    less to compare than in a call of `world.all_reduce` (ops/dispatch.py).
    """

    def all_reduce(world: Any, x: Tensor, op: str, algo: str) -> Tensor:
        if not x.is_contiguous():
            return cast(Tensor, function(world, x, op, algo=algo))
        out, plans = empty_like(x), world._plans
        place = (op, algo, x.data_ptr(), out.data_ptr(), x.shape, x.dtype)
        key = (place, world._backend.stream_number, plans.heap.num_calls, world.kernel_mode)
        repeat = plans.repeats.get(key)
        if repeat is not None:
            repeat.run(world, plans, x, out)
            return out
        function(world, x, op, out, algo=algo)
        repeat = latest(world, ("all_reduce", op, algo), x, out)
        if repeat is not None:
            plans.remember(key, repeat)
        return out

    return all_reduce


def _to_one(function: Callable[..., Any], is_whole: bool) -> Callable[..., Any]:
    """Run an op whose result one rank gets. The others return zeros: their part in the backward."""

    def on_all(world: Any, x: Tensor, *rest: Any, algo: str) -> Tensor:
        result = function(world, x, *rest, algo=algo)
        if result is not None:
            return result
        return x.new_zeros(_whole_shape(x, world.size) if is_whole else x.shape)

    return on_all


def _by_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda world, x, splits, algo: function(world, x, splits=splits, algo=algo)


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy all results but the first: they share memory, which an op of torch's may not."""

    def apart(world: Any, *given: Any, algo: str) -> list[Tensor]:
        x, residual, weight, eps, bias, gemma, quant, scale, both, fp8 = given
        first, *rest = function(
            world, x, residual, weight, eps, bias=bias, gemma=gemma, quant=quant, scale=scale,
            both=both, fp8=fp8, algo=algo,
        )  # fmt: skip
        return [first, *[each.clone() for each in rest]]

    return apart


def _rows_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """all_to_all takes `out` before the splits."""
    return lambda world, x, *splits, algo: function(world, x, None, *splits, algo=algo)


def _register(library: torch.library.Library) -> None:
    given = dict(functions())
    given["all_reduce"] = _all_reduce(given["all_reduce"])
    found = {name: _of_world(name, function) for name, function in given.items()}
    found["reduce"] = _to_one(found["reduce"], is_whole=False)
    found["gather"] = _to_one(found["gather"], is_whole=True)
    found["all_to_all"] = _rows_first(found["all_to_all"])
    found["all_gather"] = _by_parts(found["all_gather"])
    found["all_reduce_rms_norm"] = _apart(found["all_reduce_rms_norm"])
    for name, row in TABLE.items():
        library.define(f"{name}({row.arguments}, str algo, str world) -> {row.returns}")
        _kernels[name] = _kernel(found[name])
        for device in ("CPU", "CUDA"):
            library.impl(name, _kernels[name], device)
        torch.library.register_fake(f"sundog::{name}", row.shape, lib=library)
        torch.library.register_autograd(
            f"sundog::{name}", row.backward, setup_context=row.save, lib=library
        )


_library = _Library("sundog", "DEF")
_register(_library)
