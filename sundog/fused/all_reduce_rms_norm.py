"""All-reduce, residual and RMSNorm in one kernel, with which a tensor-parallel layer ends.

    one_shot          every rank reads all ranks' rows and computes everything: one barrier
    two_shot          a row's owner normalises it and stores it to all ranks: large results
    two_shot_sliced   a slice's owner adds it, for all ranks, which normalise: fewer bytes on links
    low_latency       two shots in which every word carries its own flag: the smallest

A row's bits depend on that row alone: not on how many rows there are, nor on the algorithm, the
config, the grid or the graph (_rms_norm.py says why). The new residual has the bits of all_reduce
followed by torch's additions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from .. import gpu_limits
from ..collectives import _reduce
from ..ops.dispatch import CallOptions, call, packed
from ..ops.op import Cost, Plan
from . import _rms_norm
from ._call import check_apart, check_tensors
from ._rms_norm import GROUP, Outputs
from ._rms_norm_reference import expected, expected_fp8

if TYPE_CHECKING:
    from ..world.world import World

OP = "all_reduce_rms_norm"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SCALES = ("", "tensor", "token", "group")
LONGEST = 1 << 16  # elements of a row: a program holds it in its registers
LARGEST_EPS = torch.finfo(torch.float32).max
_ALIGNED = 16  # bytes: each output in their shared memory begins at a multiple


@dataclass(frozen=True)
class Problem:
    tokens: int
    hidden: int
    dtype: torch.dtype
    size: int  # ranks
    eps: float = 1e-6
    has_bias: bool = False
    gemma: bool = False  # scale by 1 + weight
    quant: str = ""  # what an FP8 scale is for: a tensor, a token or a group; "": no FP8
    is_static: bool = False  # the caller gives the scale
    both: bool = False  # with FP8, the normalised rows in x's dtype too
    fp8: torch.dtype = torch.float8_e4m3fn

    @property
    def groups(self) -> int:
        """Return the number of FP8 scales of a row."""
        return triton.cdiv(self.hidden, GROUP.value) if self.quant == "group" else 1


def unfit(problem: Problem) -> str | None:
    """Return why no algorithm takes a problem, or None."""
    if problem.dtype not in DTYPES:
        return f"{problem.dtype}: expected one of bfloat16, float16 and float32"
    if not 1 <= problem.hidden <= LONGEST:
        return f"hidden {problem.hidden}: a row has 1 to {LONGEST} elements"
    if problem.quant not in SCALES:
        return f"quant {problem.quant!r}: expected 'tensor', 'token' or 'group'"
    if problem.fp8 not in FP8:
        return f"FP8 as {problem.fp8}: expected float8_e4m3fn or float8_e4m3fnuz"
    if problem.quant == "tensor" and not problem.is_static:
        return (
            "a dynamic scale of the whole tensor would make the bits of a row depend on the other "
            "rows; pass scale=, or use quant='token'"
        )
    if not problem.quant and (problem.is_static or problem.both):
        return "a scale and both outputs go with quant='tensor', 'token' or 'group'"
    return None


@dataclass(frozen=True)
class Config:
    """Warps and block depend on the size of a row."""

    programs: int = 16  # at most: never more than rows


def valid(problem: Problem, config: Config) -> str | None:
    if config.programs < 1:
        return f"programs {config.programs}: at least one must do the work"
    return unfit(problem)


def space(problem: Problem) -> list[Config]:
    return [Config(programs) for programs in _rms_norm.PROGRAMS]


def default(problem: Problem, num_sms: int) -> Config:
    """Choose no more programs than SMs, since all of them wait for their peers at once."""
    return Config(max(num_sms, 1))


def programs_of(config: Config, rows: int) -> int:
    """Return the number of programs that are launched for a rank's `rows`."""
    return max(min(config.programs, rows), 1)


def cost(problem: Problem) -> Cost:
    """Count: each rank reads its x and the residual that it normalises, and gets all outputs."""
    numel, size = problem.tokens * problem.hidden, problem.size
    item, others = problem.dtype.itemsize, size - 1
    own = triton.cdiv(problem.tokens, size) * problem.hidden * item
    sent = numel * item * others // size + packed_bytes(problem) * others // size
    read = numel * item + own + problem.hidden * item
    return Cost(numel * (others + 6), read, packed_bytes(problem), sent)


def cases(size: int) -> list[Problem]:
    """Return small problems: fewer rows than ranks, odd sizes, every kind of FP8 scale."""
    bf16, f32 = torch.bfloat16, torch.float32
    return [
        Problem(2 * size + 1, 64, bf16, size),
        Problem(1, 37, torch.float16, size, has_bias=True, gemma=True),
        Problem(3, 301, bf16, size, quant="group", both=True),
        Problem(2, 130, f32, size, quant="token"),
        Problem(2, 48, bf16, size, quant="tensor", is_static=True),
    ]


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Make a rank's rows, and the residual, weight, bias and scale that all ranks have.

    The reference has the same bits for any data, so `exact` only asks for smaller numbers.
    """
    torch.manual_seed(seed * 1000 + world.rank)
    shape, dtype = (problem.tokens, problem.hidden), problem.dtype
    x = _reduce.randomize(world.empty(shape, dtype, "x"), "sum", exact)
    torch.manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=world.device)

    made = [x, normal(*shape).to(dtype), normal(problem.hidden).to(dtype)]
    if problem.has_bias:
        made.append(normal(problem.hidden).to(dtype))
    if problem.is_static:
        made.append(normal(*_scale_shape(problem)).abs() / 64 + 2**-9)
    return tuple(made)


def _scale_shape(problem: Problem) -> tuple[int, ...]:
    return (1,) if problem.quant == "tensor" else (problem.tokens, problem.groups)


def reference(
    problem: Problem, rank: int, x: list[torch.Tensor], residual: list[torch.Tensor],
    weight: list[torch.Tensor], *more: list[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Return the answer on every rank, from all inputs: all outputs in one tensor of bytes."""
    rest = [each[rank] for each in more]
    total = _reduce.reference("sum", x).view(problem.tokens, problem.hidden)
    if problem.has_bias:
        total = total + rest.pop(0)
    added = total + residual[rank]
    value = expected(added, weight[rank], problem.eps, problem.gemma)
    out = torch.zeros(packed_bytes(problem), dtype=torch.uint8, device=added.device)
    to = split(problem, out)
    to.residual.copy_(added)
    if to.normed is not None:
        to.normed.copy_(value.to(problem.dtype))
    if to.quantised is not None:
        scale = rest[0] if problem.is_static else None
        quantised, scales = expected_fp8(value, scale, problem.quant, problem.fp8)
        to.quantised.view(torch.uint8).copy_(quantised.view(torch.uint8))
        if to.scales is not None:
            to.scales.copy_(scales)
    return out


# all outputs in one tensor: one offset on the heap, and one copy if it is staged


class _Field(NamedTuple):
    """An output, and its bytes; each but the first begins at a multiple of 16."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    begin: int
    end: int


def _fields(problem: Problem) -> Iterator[_Field]:
    end = 0
    for name, shape, dtype in _outputs(problem):
        begin = triton.cdiv(end, _ALIGNED) * _ALIGNED
        end = begin + shape[0] * shape[1] * dtype.itemsize
        yield _Field(name, shape, dtype, begin, end)


def _outputs(problem: Problem) -> Iterator[tuple[str, tuple[int, int], torch.dtype]]:
    """Yield name, shape and dtype of the outputs that a problem has."""
    rows = problem.tokens, problem.hidden
    if not problem.quant or problem.both:
        yield "normed", rows, problem.dtype
    yield "residual", rows, problem.dtype
    if problem.quant:
        yield "quantised", rows, problem.fp8
        if not problem.is_static:
            yield "scales", (problem.tokens, problem.groups), torch.float32


def packed_bytes(problem: Problem) -> int:
    """Count the bytes of all outputs."""
    *_, last = _fields(problem)
    return last.end


def split(problem: Problem, out: torch.Tensor) -> Outputs:
    """View the outputs in the bytes that hold them all; None for one that the problem lacks."""
    found: dict[str, Any] = dict.fromkeys(Outputs._fields)
    for each in _fields(problem):
        found[each.name] = out[each.begin : each.end].view(each.dtype).view(each.shape)
    return Outputs(**found)


def gaps(problem: Problem) -> list[slice]:
    """Find the bytes between outputs, where sizes are odd. A launch zeroes them."""
    pairs = itertools.pairwise(_fields(problem))
    return [slice(one.end, two.begin) for one, two in pairs if one.end < two.begin]


def planned(
    world: World, problem: Problem, config: Config, kernel: Any, programs: int,
    workspaces: Sequence[torch.Tensor], *sizes: int, block: int, num_warps: int, stride: int = 0,
    mode: Callable[[int], int] = int, **more: Any,
) -> Plan:  # fmt: skip
    """Plan a kernel. `sizes` are its arguments after the tokens, `more` those after its constants.

    A part of a row has `block` elements; parts are `stride` columns apart. `mode` maps the form of
    signals that the world asks for to the one that the kernel takes.
    """
    between = gaps(problem)

    def launch(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *alike, out = rest
        constants = _rms_norm.constants(problem, block, mode(world.kernel_mode), stride)
        for gap in between:
            out[gap].zero_()
        kernel[(programs,)](
            x, _rms_norm.given(problem, tuple(alike)), split(problem, out), *workspaces, world.ctx,
            problem.tokens, *sizes, constants, num_warps=num_warps, **more,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(workspaces), launch)


def all_reduce_rms_norm(
    world: World, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
    eps: float = 1e-6, *, bias: torch.Tensor | None = None, gemma: bool = False,
    quant: str = "", scale: torch.Tensor | None = None, both: bool = False,
    fp8: torch.dtype | None = None, out: torch.Tensor | None = None,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return RMSNorm of x summed over ranks, plus bias, plus residual; and the new residual.

    Returns (normed, residual). With `quant` the normalised rows are FP8, with a scale per "tensor",
    "token" or "group" of 128 columns: (quantised, scales, residual). With `scale`, a float32 tensor
    that is used as it is: (quantised, residual). With `both`, normed comes first. `fp8` is the
    dtype, by default this GPU's. `gemma` scales by 1 + weight. All but x are the same on all ranks.

    x is [..., hidden], and so are the results. They share the memory of `out`, if given: a
    contiguous tensor of as many bytes; without FP8, of x's dtype and twice its size. Both forms of
    two_shot want x and `out` on the heap, else they copy. A strided input is copied too. The top of
    this file says what a row's bits depend on.
    """
    shared = {} if scale is None else {"scale": scale}
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias, **shared}
    check_tensors(world, OP, **given, out=out)
    problem = _problem(world, x, eps, gemma, bias, quant, scale, both, fp8)
    refused = unfit(problem)
    if refused is not None:
        raise ValueError(f"{OP}: {refused}")
    check_shapes(problem, x, residual, weight, bias, scale)
    room = _room(problem, x, out)
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in tensors.items():
        check_apart(OP, name, tensor, room)
    if problem.tokens:
        options = CallOptions(algo, config, False, explain)
        read = {name: packed(world, OP, t, explain, name) for name, t in tensors.items()}
        rows = {name: read[name].view(-1, problem.hidden) for name in ("x", "residual")}
        call(world, OP, problem, {**read, **rows, "out": room}, options, is_flat=False)
    return _results(split(problem, room), x)


def _problem(
    world: World, x: torch.Tensor, eps: float, gemma: bool, bias: torch.Tensor | None, quant: str,
    scale: torch.Tensor | None, both: bool, fp8: torch.dtype | None,
) -> Problem:  # fmt: skip
    if x.dim() < 1:
        raise ValueError(f"{OP}: x is a scalar, expected rows, [..., hidden]")
    hidden = x.shape[-1]
    tokens = x.numel() // max(hidden, 1)
    usual = gpu_limits.here().fp8 if quant else Problem.fp8  # to ask for the GPU takes time
    kind = fp8 or usual
    if quant and x.device.type == "cuda" and kind in FP8 and kind != usual:
        raise ValueError(
            f"{OP}: fp8 {kind}: this GPU converts to {usual} only; pass that one, or leave fp8 out"
        )
    has_bias, is_static = bias is not None, scale is not None
    return Problem(
        tokens, hidden, x.dtype, world.size, number(eps), has_bias, gemma, quant, is_static, both,
        kind,
    )  # fmt: skip


def number(eps: Any) -> float:
    try:
        value = float(eps)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= LARGEST_EPS or isinstance(eps, bool):
        raise ValueError(f"{OP}: eps {eps!r}: expected a number from 0 to {LARGEST_EPS:.1e}")
    return value


def check_shapes(
    problem: Problem, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, scale: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise a ValueError that names the tensor, what it is and what it should be."""
    row, kinds = (problem.hidden,), (x.dtype, torch.float32)
    wanted: list[tuple[str, torch.Tensor | None, Any, tuple[torch.dtype, ...]]] = [
        ("x", x, tuple(x.shape), (x.dtype,)),
        ("residual", residual, tuple(x.shape), (x.dtype,)),
        ("weight", weight, row, kinds),
        ("bias", bias, row, (x.dtype,)),
    ]
    for name, tensor, shape, dtypes in wanted:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"{OP}: {name} is {tuple(tensor.shape)} of {tensor.dtype}, expected {shape} of "
                f"{' or '.join(map(str, dict.fromkeys(dtypes)))}"
            )
    if scale is not None:
        count = torch.Size(_scale_shape(problem)).numel()
        if scale.numel() != count or scale.dtype != torch.float32:
            raise ValueError(
                f"{OP}: scale has {scale.numel()} elements of {scale.dtype}, expected {count} of "
                f"torch.float32, as quant={problem.quant!r} asks for"
            )


def _room(problem: Problem, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Allocate the bytes for all outputs."""
    nbytes = packed_bytes(problem)
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    if out.numel() * out.itemsize != nbytes or not out.is_contiguous():
        raise ValueError(
            f"{OP}: out has {out.numel() * out.itemsize} bytes and strides {out.stride()}, "
            f"expected {nbytes} bytes, contiguous: all outputs, each at a multiple of {_ALIGNED}"
        )
    return out.view(-1).view(torch.uint8)


def _results(to: Outputs, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return which there are of normed, quantised, scales, residual; rows in the shape of x."""
    shape = x.shape[:-1]
    given = (to.normed, to.quantised, to.scales, to.residual)
    return tuple(each.view(*shape, each.shape[-1]) for each in given if each is not None)
