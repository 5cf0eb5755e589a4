"""Hypothesis strategies for `generated`: what the hosts and programs of a small world do.

Mostly random, but half of what a program does comes in idioms (store, barrier, signal; wait,
barrier, load) with a random part left out or weakened: without them nearly every pair would race.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

__all__ = ["LOCAL", "WORDS", "Case", "HostOp", "Op", "Phase", "cases"]

WORDS = 12  # int32 words per rank: 0 to 7 are mostly data, 8 to 11 mostly flags
LOCAL = -1  # as owner: the rank's ordinary tensor instead of a symmetric one
ATOMICS = ("add", "max", "min", "and", "or", "xor", "xchg", "cas")
SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
SCOPES = ("cta", "gpu", "sys")


@dataclass(frozen=True)
class Op:
    """One operation of a program: a CTA barrier, or an access to `lanes` words from `word` on."""

    kind: str  # load store atomic wait barrier
    owner: int = 0  # rank whose memory it touches, or LOCAL
    word: int = 0
    lanes: int = 0  # 0: scalar; else a tensor of that many lanes
    masked: bool = False  # the last lane is masked off
    byte: int = -1  # a plain access to single bytes of the word (of each word), from this one on
    name: str = ""  # of the atomic; of a wait: "add", or "" for a volatile load
    sem: str = ""
    scope: str = ""


@dataclass(frozen=True)
class HostOp:
    """A torch operation of a host on words of a rank."""

    kind: str  # read write copy (from its own word 7, which no host writes)
    owner: int
    word: int
    count: int


@dataclass(frozen=True)
class Phase:
    """What one rank does between two places where it may meet the others."""

    before: tuple[HostOp, ...]
    programs: tuple[tuple[Op, ...], ...]  # empty: no launch
    after: tuple[HostOp, ...]


@dataclass(frozen=True)
class Case:
    phases: tuple[tuple[Phase, ...], ...]  # by number, then rank
    barriers: tuple[bool, ...]  # a world barrier after each phase
    schedule: str
    num_sms: int

    @property
    def world_size(self) -> int:
        return len(self.phases[0])


def atomics(owners: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.builds(
        Op,
        kind=st.just("atomic"),
        owner=owners,
        word=st.sampled_from((8, 9, 8, 9, 0, 2)),
        lanes=st.sampled_from((0, 0, 0, 1, 2)),
        masked=st.booleans(),
        name=st.sampled_from(ATOMICS),
        sem=st.sampled_from(SEMANTICS),
        scope=st.sampled_from(SCOPES[::-1]),
    )


def waits(owners: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.builds(
        Op,
        kind=st.just("wait"),
        owner=owners,
        word=st.sampled_from((8, 9)),
        lanes=st.sampled_from((0, 2)),
        name=st.sampled_from(("add", "add", "add", "")),
        sem=st.sampled_from(("acquire", "acquire", "acq_rel", "relaxed")),
        scope=st.sampled_from(("sys", "sys", "sys", "gpu", "cta")),
    )


def signals(owners: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.builds(
        Op,
        kind=st.just("atomic"),
        owner=owners,
        word=st.sampled_from((8, 9)),
        lanes=st.sampled_from((0, 2)),
        name=st.sampled_from(("xchg", "add")),
        sem=st.sampled_from(("release", "release", "acq_rel", "relaxed")),
        scope=st.sampled_from(("sys", "sys", "sys", "gpu", "cta")),
    )


def plain(owners: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.builds(
        Op,
        kind=st.sampled_from(("store", "load")),
        owner=owners,
        word=st.sampled_from((0, 2, 4, 0, 8)),
        lanes=st.sampled_from((0, 1, 2, 4)),
        masked=st.booleans(),
        byte=st.sampled_from((-1, -1, 2)),
    )


def fragments(owners: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Op, ...]]:
    """One operation, or an idiom, perhaps without its CTA barrier."""
    fence = st.sampled_from(((Op("barrier"),), (Op("barrier"),), ()))
    access = plain(owners)
    message = st.builds(Op, st.sampled_from(("store", "load")), owners, st.just(0), st.just(4))
    produce = st.tuples(message, fence, signals(owners)).map(lambda t: (t[0], *t[1], t[2]))
    consume = st.tuples(waits(owners), fence, message).map(lambda t: (t[0], *t[1], t[2]))
    spoil = st.builds(  # a plain store to a flag, or to half of it
        Op,
        kind=st.just("store"),
        owner=owners,
        word=st.sampled_from((8, 9)),
        lanes=st.sampled_from((0, 2)),
        byte=st.sampled_from((-1, 2)),
    )
    single = st.one_of(access, atomics(owners), st.just(Op("barrier")), waits(owners), spoil)
    return st.one_of(single.map(lambda op: (op,)), produce, consume)


def bodies(owners: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Op, ...]]:
    many = st.lists(fragments(owners), min_size=1, max_size=6)
    return many.map(lambda parts: tuple(op for part in parts for op in part)[:12])


def phases(owners: st.SearchStrategy[int]) -> st.SearchStrategy[Phase]:
    host = st.builds(
        HostOp,
        st.sampled_from(("read", "write", "copy")),
        owners,
        st.sampled_from((0, 2, 8)),
        st.sampled_from((1, 2, 4)),
    )
    few = st.lists(host, max_size=1).map(tuple)
    programs = st.lists(bodies(owners), max_size=3).map(tuple)
    return st.builds(Phase, few, programs, few)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(2, 4))
    touched = draw(st.integers(1, world_size))  # memory of few ranks: more meets there
    owners = st.sampled_from((*range(touched), *range(touched), *range(touched), LOCAL))
    number = draw(st.integers(1, 3))
    by_rank = st.tuples(*[phases(owners)] * world_size)
    token = draw(st.sampled_from(("random:{}", "pct:{}:3"))).format(draw(st.integers(0, 999)))
    return Case(
        tuple(draw(by_rank) for _ in range(number)),
        tuple(draw(st.booleans()) for _ in range(number)),
        token,
        draw(st.sampled_from((16, 16, 1))),
    )
