"""All-reduce, low latency: one shot in which every word carries its own flag.

A word of 64 bits holds up to 4 bytes of data and the epoch. It arrives whole, so a reader that sees
the epoch has the data. That saves the fence, the barrier and the second round of loads, which are
most of what one_shot waits for. But every byte crosses as two, and every rank reads W tensors, so
it is for the smallest tensors only. No rank touches a peer's x or out: they may be any tensors, and
out may be x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device import context, signal, trace
from ..ops.op import Plan, World, agree
from . import _reduce, _words
from .all_reduce import Problem, cost, inputs, reference

SYMMETRIC = ()
LARGEST = 64 << 10  # bytes: each program has one tile, and all programs are resident at once


@dataclass(frozen=True)
class Config:
    block: int = 256  # elements of a program, all handled at once
    num_warps: int = 1
    poll: str = "atomic"  # or "load": see _words.POLLS


def valid(problem: Problem, config: Config) -> str | None:
    nbytes = problem.numel * problem.dtype.itemsize
    if problem.dtype.itemsize > 4:
        return f"low_latency of {problem.dtype}: a word has room for 4 bytes; use one_shot"
    if nbytes > LARGEST:
        return f"low_latency of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    if config.poll not in _words.POLLS:
        return f"poll {config.poll!r}: expected one of {', '.join(_words.POLLS)}"
    if config.block < 2:
        return f"block {config.block}: a program takes at least 2 elements"
    return _reduce.refused(config.block, 1, config.num_warps)


def space(problem: Problem) -> list[Config]:
    return [
        Config(block, num_warps, poll)
        for block in (64, 128, 256, 512, 1024)
        for num_warps in (1, 2, 4, 8)
        for poll in _words.POLLS
        if 2 <= block // (32 * num_warps) <= 16
    ]


def default(problem: Problem, num_sms: int) -> Config:
    """Choose a word or two per thread: polls are atomics, which the cache serves one at a time."""
    return Config(128, 2) if problem.size > 2 else Config(128, 1)


def cases(size: int) -> list[Problem]:
    """Return all_reduce's cases whose elements fit in a word."""
    return [
        Problem(37, torch.float32, size, "sum"),
        Problem(519, torch.bfloat16, size, "avg"),
        Problem(1, torch.int8, size, "prod"),
    ]


@triton.jit
def _low_latency_kernel(
    x, out, boxes, epochs, ctx, numel, stride,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    POLL: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Send words, await the peers'. `boxes`: for two epochs and every rank, `stride` words."""
    PER: tl.constexpr = 2 if x.dtype.element_ty.primitive_bitwidth == 16 else 1  # in a word
    program = tl.program_id(0)
    # These loads are in flight together: none needs the result of another.
    at = program * BLOCK + tl.arange(0, BLOCK // PER)
    data = _words.load_word(x, at, numel, BLOCK // PER, PER)
    epoch = tl.load(epochs + program) + 1
    rank = tl.load(ctx + context.RANK)
    mine = ()
    for peer in tl.static_range(SIZE):
        mine = mine + (signal.translate(boxes, peer, ctx),)  # type: ignore[assignment]
    # Nobody polls these boxes any more. They are those of the call before the last. Every peer's
    # program with this number had seen their words before it sent those of the last call, which I
    # have seen.
    box = (epoch % 2) * SIZE * stride + program * (BLOCK // PER) + tl.arange(0, BLOCK // PER)
    word = (epoch << _words.BITS) | data
    trace.begin(trace.SIGNAL, epochs + program, epoch, trace.ALL, ctx, TRACE)
    words = ()
    for peer in tl.static_range(SIZE):
        # Relaxed suffices: data and epoch are one word, and nothing else is published by it.
        place = mine[peer] + rank * stride + box
        others = (at < numel) & (peer != rank)
        signal.set_words(place, word, others, TRACE)
        words = words + (tl.where(others, (epoch - 1) << _words.BITS, word),)  # type: ignore[assignment]
    trace.begin(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, TRACE)
    words = _words.wait_words(words, boxes + box, stride, epoch, ctx, SIZE, POLL)
    trace.end(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, TRACE)
    for part in tl.static_range(PER):
        total = _reduce.widen(_words.element(words[0], part, out.dtype.element_ty))
        for peer in tl.static_range(1, SIZE):
            element = _reduce.widen(_words.element(words[peer], part, out.dtype.element_ty))
            total = _reduce.combine(total, element, OP)
        result = _reduce.finish(total, OP, SIZE).to(out.dtype.element_ty)
        to = at + part * (BLOCK // PER)
        tl.store(out + to, result, mask=to < numel)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate boxes for two epochs. The plan takes any contiguous tensors."""
    agree(world, "all_reduce.low_latency", problem, config, valid(problem, config))
    per = 2 if problem.dtype.itemsize == 2 else 1
    programs = max(triton.cdiv(problem.numel, config.block), 1)
    stride = programs * (config.block // per)
    boxes = world.signals((2, problem.size, stride), "all_reduce.boxes")
    epochs = world.signals(programs, "all_reduce.epochs")
    world.barrier()  # every rank's boxes are empty before the first word
    op = _reduce.operator(problem.op, problem.dtype)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _low_latency_kernel[(programs,)](
            _reduce.storage(x), _reduce.storage(out), boxes, epochs, world.ctx,
            problem.numel, stride, OP=op, SIZE=problem.size, BLOCK=config.block,
            POLL=config.poll, TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (boxes, epochs), launch)
