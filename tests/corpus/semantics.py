"""Polls that learn nothing and signals that publish nothing: relaxed, plain, volatile."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.findings import Rule
from sundog.checker.races import PAYLOAD, PLAIN_FLAG, RELAXED_ACQUIRE, RELAXED_RELEASE
from sundog.device import memory, signal

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def push_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def relaxed_poll_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    # wrong: a relaxed poll orders nothing after it
    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def relaxed_poll_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
        pass
    tl.atomic_add(flag, 0, sem="acquire", scope="sys")  # cheap polls, then one that learns
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def relaxed_poll_and_barrier_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
        pass
    # wrong: a CTA barrier hands on what the program has learnt, and it has learnt nothing
    tl.debug_barrier()
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def cas_poll_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    one = tl.full((), 1, tl.int64)
    # wrong: a compare-and-swap that only releases does not acquire
    while tl.atomic_cas(flag, one, one, sem="release", scope="sys") != 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def cas_poll_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    one = tl.full((), 1, tl.int64)
    while tl.atomic_cas(flag, one, one, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def relaxed_signal_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    # wrong: a relaxed signal publishes nothing
    memory.atomic_xchg(flag, 1, peer, ctx, sem="relaxed")
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def acquire_signal_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    # wrong: the half of acq_rel that a signal does not need
    memory.atomic_xchg(flag, 1, peer, ctx, sem="acquire")
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def plain_poll_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    # wrong: a plain load may be hoisted out of the loop, and nothing after it is ordered
    while tl.load(flag) < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def volatile_poll_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    # wrong: a volatile poll is relaxed, so it orders nothing after it
    while tl.load(flag, volatile=True) < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def volatile_poll_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    while tl.load(flag, volatile=True) < 1:
        pass
    tl.atomic_add(flag, 0, sem="acquire", scope="sys")  # cheap polls, then one that learns
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def plain_signal_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    # wrong: a plain store to the flag publishes nothing
    memory.store(flag, 1, peer, ctx)
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def words_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    # wrong: words that validate themselves say nothing of other data
    memory.store(inbox + BLOCK + at, tl.full([BLOCK], 1, tl.float32), peer, ctx)
    while tl.min(tl.load(inbox + BLOCK + at, volatile=True)) == 0:
        pass
    tl.store(out + at, tl.load(inbox + at))


def exchange(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox = world.zeros((2 * BLOCK,), name="inbox")
    flag = world.signals((1,), "flag")
    world.barrier()
    kernel[(1,)](x, inbox, out, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world, -1), BLOCK))


def _pair(family: str, name: str, wrong: Kernel, fixed: Kernel, rule: Rule) -> Pair:
    return Pair(family, name, partial(exchange, wrong), partial(exchange, fixed), 2, rule)


POLL, SIGNAL = "relaxed poll", "relaxed signal"
PAIRS = [
    _pair(POLL, "add 0, relaxed", relaxed_poll_wrong, relaxed_poll_fixed, RELAXED_ACQUIRE),
    _pair(
        POLL,
        "add 0, relaxed, then a CTA barrier",
        relaxed_poll_and_barrier_wrong,
        push_fixed,
        RELAXED_ACQUIRE,
    ),
    _pair(POLL, "compare and swap, release", cas_poll_wrong, cas_poll_fixed, RELAXED_ACQUIRE),
    _pair(SIGNAL, "exchange, relaxed", relaxed_signal_wrong, push_fixed, RELAXED_RELEASE),
    _pair(SIGNAL, "exchange, acquire", acquire_signal_wrong, push_fixed, RELAXED_RELEASE),
    _pair("plain poll", "load in a loop", plain_poll_wrong, push_fixed, PLAIN_FLAG),
    _pair(
        "volatile poll",
        "volatile load in a loop",
        volatile_poll_wrong,
        volatile_poll_fixed,
        RELAXED_ACQUIRE,
    ),
    _pair("self-validating words", "and other data", words_wrong, push_fixed, PAYLOAD),
    _pair("plain signal", "store to the flag", plain_signal_wrong, push_fixed, PLAIN_FLAG),
]
