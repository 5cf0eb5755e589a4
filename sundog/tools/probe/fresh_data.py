"""The probe's inputs, the answers that it expects, and its judgement of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...world.tensors import poison_tensor
from ...world.world import World
from .._subject import difference

Tensors = tuple[torch.Tensor, ...]
Seen = tuple[int, int, Tensors]  # replay (0: without a graph), round, outputs


@dataclass(frozen=True)
class Subject:
    """What is probed. `prepare(world)` returns the function of the inputs that is captured.

    `make_inputs(world, seed)` returns a rank's tensors: random, the same for the same seed.
    `reference(rank, *parts)` returns the answer on a rank, from every rank's first, second, ...
    input. A function that returns nothing is judged by what it leaves in its inputs.
    """

    name: str
    prepare: Callable[[World], Callable[..., Any]]
    make_inputs: Callable[[World, int], Tensors]
    reference: Callable[..., Any]
    tolerance: float = 0.0  # relative to the largest element; 0 compares bits
    expected: str = "CAPTURABLE"
    beside: bool = False  # another one, prepared separately, may run on another stream meanwhile
    case: str = ""  # which of several with one name
    columns: tuple[str, ...] = ()  # default: all


@dataclass(frozen=True)
class Observed:
    """What one rank saw: the first replay that went wrong, if any, and how."""

    replay: int = -1  # 0: the call without a graph
    stale: bool = False
    text: str = ""


def rounds(world: World, subject: Subject, count: int) -> list[tuple[Tensors, Tensors]]:
    """Make inputs on the device, whose answers differ from the previous round's on all ranks."""
    found: list[tuple[Tensors, Tensors]] = []
    before: list[Tensors] = []
    for mine, answers in _candidates(world, subject, count):
        if any(_old(new, old) for new, old in zip(answers, before, strict=False)):
            continue
        before = answers
        found.append((mine, answers[world.rank]))
        if len(found) == count:
            return found
    raise ValueError(
        f"{subject.name}: make_inputs gives the same answer for one seed after another, so an old "
        "result could not be told from a new one. Make inputs that depend on the seed."
    )


def _candidates(
    world: World, subject: Subject, count: int
) -> Iterator[tuple[Tensors, list[Tensors]]]:
    for first in range(1, 20 * count, count):
        mine = []
        for seed in range(first, first + count):
            with world.scope():
                mine.append(tuple(each.clone() for each in subject.make_inputs(world, seed)))
        everyone = world.exchange(to_host(mine), "inputs of the probe")
        for number, own in enumerate(mine):
            given = [[part[number] for part in parts] for parts in zip(*everyone, strict=True)]
            yield own, [as_tuple(subject.reference(r, *given)) for r in range(world.size)]


def to_host(many: list[Tensors]) -> Tensors:
    """Stack the first, second, ... tensor of each, for one copy to the host each."""
    return tuple(torch.stack(each).cpu() for each in zip(*many, strict=True))


def _old(new: Tensors, old: Tensors) -> bool:
    """Return whether one may be mistaken for the other. A rank without a result can't be misled."""
    return _same(new, old) and any(each.numel() for each in new)


def as_tuple(result: Any) -> Tensors:
    return result if isinstance(result, tuple) else (result,)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _same(a: Tensors, b: Tensors, tolerance: float = 0.0) -> bool:
    if not tolerance:
        return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))
    return all(
        torch.allclose(x.double(), y.double(), 0, tolerance * _largest(y))
        for x, y in zip(a, b, strict=True)
    )


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite element, since relative to an infinite one every error is small."""
    sizes = tensor.double().abs()
    return float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0


def judge(rank: int, subject: Subject, answers: list[Tensors], seen: list[Seen]) -> Observed:
    """Find which replay went wrong first, and whether it shows an old result or a wrong one."""
    tolerance = subject.tolerance
    wants = [
        tuple(w.reshape(o.shape) for w, o in zip(want, seen[0][2], strict=True)) for want in answers
    ]
    outs = zip(*to_host([outs for _, _, outs in seen]), strict=True)
    seen = [(r, n, got) for (r, n, _), got in zip(seen, outs, strict=True)]
    bad = [(r, n, got) for r, n, got in seen if not _same(got, wants[n], tolerance)]
    if not bad:
        return Observed()
    replay, number, got = bad[0]
    never_right = len(bad) == len([each for each in seen if each[0] > 0])
    old = all(any(_same(each, want, tolerance) for want in wants) for _, _, each in bad)
    stale = never_right and (old or all(_is_poison(each) for _, _, each in bad))
    return Observed(replay, stale, _difference(rank, got, wants[number]))


def _is_poison(got: Tensors) -> bool:
    poison = tuple(torch.empty_like(each) for each in got)
    for each in poison:
        poison_tensor(each)
    return _same(got, poison)


def _difference(rank: int, got: Tensors, want: Tensors) -> str:
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        if text := difference(a, b, f" of output {place}" if len(got) > 1 else ""):
            return f"rank {rank}: {text}"
    return f"rank {rank}: other bits than expected"
