"""Every rank writes a span of its tensor to each peer: what all-to-all, scatter and broadcast are.

A program serves one peer at a time, another one on every rank, so that ranks write to different
targets. It tells the rank that will write here that the output is free, waits for the same word
from the rank that it writes to, copies, tells it so, and waits for what comes here. Where nothing
goes, nobody waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal, trace
from ..ops.op import Plan
from . import _copy
from ._copy import Config

if TYPE_CHECKING:
    from ..world.world import World

__all__ = ["Span", "default_config", "plan_spans", "wrong_programs"]

_ROW = tl.constexpr(4)  # words of the table per peer: the fields of Span


@dataclass(frozen=True)
class Span:
    """What one rank sends to one peer and gets from it, in bytes."""

    start: int  # in x
    place: int  # in the peer's out
    nbytes: int
    received: int


def wrong_programs(config: Config, size: int) -> str | None:
    if config.programs > size and config.programs % size:
        return f"programs {config.programs} do not divide among {size} peers"
    return _copy.wrong_config(config)


def default_config(nbytes: int, size: int, num_sms: int) -> Config:
    """For `nbytes` to each peer: equally many programs per peer, or several peers per program."""
    each = _copy.config_for(nbytes, max(num_sms // size, 1))
    return dataclasses.replace(each, programs=min(each.programs * size, num_sms))


@triton.jit
def _spans_kernel(
    x, out, table, ready, arrived, epochs, ctx,
    SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """`table`: a Span per peer. PARTS programs share what goes to a peer."""
    nbytes: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    rank = tl.load(ctx + context.RANK)
    part = tl.program_id(0) % PARTS
    for step in range(tl.program_id(0) // PARTS, SIZE, tl.num_programs(0) // PARTS):
        flag = step * PARTS + part
        epoch = tl.load(epochs + flag) + 1
        peer = (rank + step) % SIZE  # I write there, with this flag
        writer = (rank + SIZE - step) % SIZE  # and this one here, with the same
        num_sent = tl.load(table + peer * _ROW + 2) // nbytes
        num_received = tl.load(table + writer * _ROW + 3)
        if num_received > 0:
            # This rank's output is free: what read it last came before this kernel on the stream.
            signal.signal(ready + flag, writer, epoch, ctx, TRACE)
        if num_sent > 0:
            # The peer's output is free.
            signal.wait(ready + flag, peer, epoch, ctx, TRACE)
            src = x + tl.load(table + peer * _ROW) // nbytes
            dst = memory.translate(out + tl.load(table + peer * _ROW + 1) // nbytes, peer, ctx)
            trace.begin(trace.FETCH, step, 0, peer, ctx, TRACE)
            _copy.copy((dst,), src, num_sent, part, PARTS, 1, BLOCK, ALIGNED)
            trace.end(trace.FETCH, step, 0, peer, ctx, TRACE)
            # My words before the flag.
            signal.signal(arrived + flag, peer, epoch, ctx, TRACE)
        if num_received > 0:
            # The writer's words before whatever follows this kernel here.
            signal.wait(arrived + flag, writer, epoch, ctx, TRACE)
        tl.store(epochs + flag, epoch)  # read by the next call on the stream


def plan_spans(world: World, op: str, problem: Any, config: Config, spans: Sequence[Span]) -> Plan:
    """Allocate flags. The plan takes any x, read here only, and a symmetric out."""
    size = world.size
    parts = max(config.programs // size, 1)
    flags = [world.signals(size * parts, f"{op}.{name}") for name in ("ready", "arrived", "epochs")]
    rows = [dataclasses.astuple(span) for span in spans]
    table = torch.tensor(rows, dtype=torch.int64, device=world.device)
    unit = 0
    for row in rows:
        for number in row:
            unit |= number
    world.barrier()  # everybody's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if unit:
            (source, target), aligned = _copy.as_words(unit, x, out)
            _spans_kernel[(config.programs,)](
                source, target, table, *flags, world.ctx,
                SIZE=size, PARTS=parts, BLOCK=config.block, ALIGNED=aligned,
                TRACE=world.trace, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
