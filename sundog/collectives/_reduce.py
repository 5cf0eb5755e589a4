"""The reduction over ranks that all_reduce, reduce_scatter and reduce share.

A tile is loaded from every rank, all loads in flight at once, and accumulated in rank order, 0 to
W - 1, starting with rank 0's value: in float32 (float64 for float64, int64 for integers), rounded
to the tensor's dtype once, at the end. So the bits do not depend on the algorithm, grid or config.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..device import chunks, memory
from ..ops.op import Plan, World, barrier_flags

OPERATORS = ("sum", "avg", "min", "max", "prod")
_LEAST_TILE, _LARGEST_TILE = 2048, 16384  # bytes
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
Kind = TypeVar("Kind", bound="Config")


@dataclass(frozen=True)
class Config:
    """Tiles and programs of a reduction."""

    block: int = 2048  # elements of a tile
    programs: int = 16
    num_warps: int = 4

    @classmethod
    def whole(cls: type[Kind], problem: Any, num_sms: int) -> Kind:
        """Choose for ranks that reduce all elements."""
        return cls(*tiling(problem.numel, problem.dtype, num_sms))

    @classmethod
    def sliced(cls: type[Kind], problem: Any, num_sms: int) -> Kind:
        """Choose for ranks that reduce a slice each."""
        numel = slice_of(problem.numel, problem.dtype, problem.size)
        return cls(*tiling(numel, problem.dtype, num_sms))


def configs(kind: type[Kind], *fields: tuple[int, ...]) -> list[Kind]:
    """List what a tuner may try: every combination of these blocks, programs and warps."""
    return [kind(*each) for each in itertools.product(*fields)]


def is_unusual(x: Any, op: Any) -> bool:
    """Return whether an operator is not a name, or x is complex; _given.py handles those."""
    if not isinstance(op, str):
        return True
    if not isinstance(x, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():  # on `virtual` it would check every access
        return x.is_complex()


def check(name: str, op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless this dtype can be reduced by this operator."""
    if op not in OPERATORS:
        raise ValueError(
            f"{name}: op {op!r} is not known; there are: {', '.join(OPERATORS)}. To scale, "
            "multiply x and use sum; for bits, combine the parts of world.all_gather(x) yourself"
        )
    if dtype.is_complex:
        raise ValueError(
            f"{name}: no reduction of {dtype} by {op}: complex numbers have a sum and an average, "
            "and reduce_scatter needs a dimension to split"
        )
    if dtype not in DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise ValueError(f"{name}: no reduction of {dtype}; convert it to one of {known}")
    if dtype == torch.bool and op == "avg":
        raise ValueError(f"{name}: bool has no average; convert it to a number, or use min or max")


def refused(block: int, programs: int, num_warps: int) -> str | None:
    """Return why a config can't be used, or None: every algorithm has tiles, programs and warps."""
    largest = tl.TRITON_MAX_TENSOR_NUMEL
    if block & (block - 1) or not 1 <= block <= largest:
        return f"block {block} is not a power of two from 1 to {largest}"
    if programs < 1:
        return f"programs {programs}: at least one must do the work"
    if num_warps not in (1, 2, 4, 8, 16, 32):
        return f"num_warps {num_warps} is not a power of two from 1 to 32"
    return gpu_limits.here().refuse_warps(num_warps)


def valid(problem: Any, config: Config) -> str | None:
    return refused(config.block, config.programs, config.num_warps)


def tiling(numel: int, dtype: torch.dtype, num_sms: int) -> tuple[int, int, int]:
    """Choose block, programs and warps where nothing was measured, by a rule that held on an H200.

    A thread takes 16 bytes of every rank's tile, and 32 if tensors are large: reduce_scatter of 64
    MB on 8 ranks reached 50 % of the limit with 4 warps an SM and 2048 elements in flight, and 92 %
    with 16 warps and 8192 elements. Small tensors get as many programs as there are SMs, down to
    tiles of 2 KB. There are no more programs than SMs, since all of them wait for their peers at
    once.
    """
    share = triton.next_power_of_2(triton.cdiv(max(numel, 1) * dtype.itemsize, num_sms))
    # Bytes are accumulated in words of 8 bytes, for which 16 warps have too few registers.
    largest = _LARGEST_TILE if dtype.itemsize > 1 else _LARGEST_TILE // 4
    tile = min(max(share, _LEAST_TILE), largest)
    block = tile // dtype.itemsize
    programs = max(1, min(triton.cdiv(numel, block), num_sms))
    return block, programs, min(tile // warp_bytes(), 16)


def warp_bytes() -> int:
    return chunks.WIDE.value * gpu_limits.here().warp_size


def slice_of(numel: int, dtype: torch.dtype, size: int) -> int:
    """Count a rank's elements: a multiple of 128 bytes. The last ranks may have fewer."""
    line = 128 // dtype.itemsize
    return triton.cdiv(triton.cdiv(numel, size), line) * line


def operator(op: str, dtype: torch.dtype) -> str:
    """Return the kernel's operator: for bool, as 0 and 1, a sum is max and a product is min."""
    return {"sum": "max", "prod": "min"}.get(op, op) if dtype == torch.bool else op


def kind(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the kernel sees: bytes for bool."""
    return torch.uint8 if dtype == torch.bool else dtype


def is_aligned(nbytes: int, *tensors: torch.Tensor) -> bool:
    """Return whether the tensors, and `nbytes` between their slices, are multiples of 16 bytes."""
    for tensor in tensors:
        nbytes |= tensor.data_ptr()
    return nbytes % chunks.WIDE.value == 0


def block_of(config: Config, dtype: torch.dtype, aligned: bool) -> int:
    """Return a kernel's tile: half as large where each chunk is two loads, to save registers."""
    least = config.num_warps * warp_bytes() // dtype.itemsize
    return config.block if aligned or config.block // 2 < least else config.block // 2


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the kernel sees it."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def plan_framed(
    world: World, op: str, problem: Any, config: Config, kernel: Any, numel: int, apart: int = 0
) -> Plan:
    """Allocate flags, and plan a kernel that begins and ends with a barrier.

    `numel` is the kernel's argument, `apart` the bytes between the slices of x, if it has any.
    """
    flags = barrier_flags(world, op, config.programs, "ready", "done")
    how = operator(problem.op, problem.dtype)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        aligned = is_aligned(apart, x, out)
        kernel[(config.programs,)](
            storage(x), storage(out), *flags, world.ctx, numel,
            OP=how, SIZE=problem.size, BLOCK=block_of(config, x.dtype, aligned), ALIGNED=aligned,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)


def reference(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Reduce the ranks' tensors by torch, with the bits of every deterministic algorithm."""
    return rounded(op, accumulated(op, parts), len(parts), parts[0].dtype)


def accumulated(
    op: str, parts: Sequence[torch.Tensor], total: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum (minimum, ...) before rounding; `total` is the sum of earlier ranks."""
    for part in parts:
        wide = part.flatten().to(accumulator(part.dtype))
        total = wide if total is None else _COMBINE[operator(op, part.dtype)](total, wide)
    assert total is not None
    return total


def rounded(op: str, total: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the result on `size` ranks, in the tensors' dtype."""
    if operator(op, dtype) == "avg":
        mode = None if dtype.is_floating_point else "trunc"
        total = torch.div(total, size, rounding_mode=mode)
    return total.to(dtype)


def randomize(x: torch.Tensor, op: str, exact: bool) -> torch.Tensor:
    """Fill `x` at random. `exact` takes integers so small that no order of reducing rounds."""
    if x.dtype.is_floating_point and not exact:
        return x.normal_()
    if x.dtype == torch.bool:
        return x.random_(0, 2)
    if op == "prod":  # with 8 ranks up to 256, which bfloat16 holds
        values = torch.tensor([-2, -1, 1, 2], device=x.device).to(x.dtype)
        return x.copy_(values[torch.randint(0, 4, x.shape, device=x.device)])
    return x.random_(0 if x.dtype == torch.uint8 else -9, 10)


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `widen` accumulates in."""
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64


@triton.jit
def slice_length(numel, NBYTES: tl.constexpr, SIZE: tl.constexpr):
    """Compute `slice_of` in a kernel, for elements of NBYTES bytes over SIZE ranks."""
    LINE: tl.constexpr = 128 // NBYTES
    return tl.cdiv(tl.cdiv(tl.cast(numel, tl.int64), SIZE), LINE) * LINE


@triton.jit
def everywhere(ptr, first, ctx, SIZE: tl.constexpr):
    """Translate an address to every rank, from rank `first` on: once, before a loop."""
    pointers = ()
    for step in tl.static_range(SIZE):
        peer = (first + step) % SIZE
        pointers = pointers + (memory.translate(ptr, peer, ctx),)  # type: ignore[assignment]
    return pointers


@triton.jit
def reduce_ranks(pointers, at, mask, OP: tl.constexpr, SIZE: tl.constexpr):
    """Reduce the tile at `at`, a multiple of 16 bytes, over all ranks in rank order."""
    tiles = ()
    for peer in tl.static_range(SIZE):  # all loads first, to be in flight together
        # On the tile, not on its base: a hint on a function's argument is lost.
        tile = tl.load(tl.multiple_of(pointers[peer] + at, chunks.WIDE), mask=mask)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    total = widen(tiles[0])  # type: ignore[misc]
    for peer in tl.static_range(1, SIZE):
        total = combine(total, widen(tiles[peer]), OP)
    return finish(total, OP, SIZE).to(pointers[0].dtype.element_ty)


@triton.jit
def reduce_span(
    outs, pointers, n, part, parts, OP: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Reduce this program's part of n elements over all ranks into each of COUNT `outs`.

    `outs` are equal modulo 16, and so are `pointers`. ALIGNED: the pointers are multiples of 16, so
    tile i begins at element i * BLOCK; otherwise a tile begins where the first of the outs is a
    multiple of 128. The last part also does the ends. It works in place: an element is stored only
    after it was loaded from all ranks, and where outs are the pointers no two programs load the
    same chunk.
    """
    PER: tl.constexpr = chunks.WIDE // (outs[0].dtype.element_ty.primitive_bitwidth // 8)
    if ALIGNED:
        body = tl.cast(n, tl.int64) // PER * PER
        # Counts tiles: for a counter of 64 bits the compiler keeps an address per pointer.
        for tile in range(part, tl.cast(tl.cdiv(body, BLOCK), tl.int32), parts):
            at = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            _store_all(outs, reduce_ranks(pointers, at, at < body, OP, SIZE), at, at < body, COUNT)
        if part == parts - 1:
            last = body + tl.arange(0, PER)
            few = reduce_few(pointers, last, last < n, OP, SIZE)
            _store_all(outs, few, last, last < n, COUNT)
    else:
        head, skew, count = chunks.span(outs[0], pointers[0], n)
        TILE: tl.constexpr = BLOCK // PER
        for tile in range(part, tl.cast(tl.cdiv(count, TILE), tl.int32), parts):
            chunk = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
            words = _reduce_chunks(pointers, head, skew, chunk, chunk < count, OP, SIZE)
            for i in tl.static_range(COUNT):
                chunks.store(outs[i] + head, words, chunk, chunk < count)
        if part == parts - 1:
            few, is_one = chunks.ends(head, count, n, PER)
            _store_all(outs, reduce_few(pointers, few, is_one, OP, SIZE), few, is_one, COUNT)


@triton.jit
def _store_all(outs, tile, at, mask, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        tl.store(outs[i] + at, tile, mask=mask)


@triton.jit
def reduce_few(pointers, at, mask, OP: tl.constexpr, SIZE: tl.constexpr):
    """Do as `reduce_ranks`, for a few elements at any address."""
    total = widen(tl.load(pointers[0] + at, mask=mask))
    for peer in tl.static_range(1, SIZE):
        total = combine(total, widen(tl.load(pointers[peer] + at, mask=mask)), OP)
    return finish(total, OP, SIZE).to(pointers[0].dtype.element_ty)


@triton.jit
def _reduce_chunks(pointers, head, skew, chunk, mask, OP: tl.constexpr, SIZE: tl.constexpr):
    """Reduce chunks over all ranks in rank order, element by element, and return them as words."""
    DTYPE: tl.constexpr = pointers[0].dtype.element_ty
    words = ()
    for peer in tl.static_range(SIZE):  # all loads first, to be in flight together
        word = chunks.load(pointers[peer] + head, skew, chunk, mask)
        words = words + (word,)  # type: ignore[assignment]
    result = words[0] * 0  # type: ignore[misc]
    for part in tl.static_range(64 // DTYPE.primitive_bitwidth):
        total = widen(chunks.element(words[0], part, DTYPE))  # type: ignore[misc]
        for peer in tl.static_range(1, SIZE):
            total = combine(total, widen(chunks.element(words[peer], part, DTYPE)), OP)
        result |= chunks.word_of(finish(total, OP, SIZE).to(DTYPE), part)
    return result


@triton.jit
def widen(tile):
    """Convert to the accumulator's dtype: float32, float64 for float64, int64 for integers."""
    if tile.dtype == tl.float64:
        wide = tile
    elif tile.dtype.is_floating():
        wide = tile.to(tl.float32)
    else:
        wide = tile.to(tl.int64)
    return wide


@triton.jit
def combine(total, tile, OP: tl.constexpr):
    """Add one more rank. A NaN on any rank gives a NaN."""
    if OP == "sum" or OP == "avg":
        total = total + tile
    elif OP == "min":
        total = tl.minimum(total, tile, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "max":
        total = tl.maximum(total, tile, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(OP == "prod", "OP is one of OPERATORS")
        total = total * tile
    return total


@triton.jit
def finish(total, OP: tl.constexpr, SIZE: tl.constexpr):
    """Divide an average's sum by the number of ranks. Integers round towards zero."""
    if OP == "avg":
        if total.dtype == tl.float32:
            # `/` would be the fast division, which is not correctly rounded
            total = tl.div_rn(total, tl.full((), SIZE, tl.float32))
        elif total.dtype == tl.float64:
            total = total / SIZE
        else:
            total = total // SIZE
    return total
