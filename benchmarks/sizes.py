"""`python -m benchmarks sizes`: what odd sizes and ordinary tensors cost, on ranks of one GPU.

Two questions, in one world and as many minutes as are given:

- **Cliffs.** Sizes are drawn by a fixed seed, a third of them primes. Each is timed beside the next
  larger multiple of 4,096 elements, which may take at most 1.15 times as long.
- **Ordinary tensors.** An op is called with input and output on the heap, then with an ordinary
  output, then with both ordinary: as a user calls it, so the copies count.

Calls are `auto`'s. Times are medians over graph replays, of the slowest rank, on normal data.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sundog.launch import run
from sundog.tools.timing import Variant, measure
from sundog.world.world import World

from .result_files import Figures

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_STEP = 4096  # elements: what a size is compared with is a multiple
_ALLOWED = 1.15
_SEED = 22
_LEAST, _MOST = 1, 100_000_000  # elements of the largest tensor of a call
_HEAP = 4 << 30
_SAMPLES = 7
_ORDINARY = (1 << 20, 1 << 22, 33 << 20)  # elements


class Case(NamedTuple):
    op: str
    dtype: torch.dtype
    numel: int  # of the smaller of a rank's tensors, or of a part of all_to_all's


def next_multiple(numel: int) -> int:
    return math.ceil(numel / _STEP) * _STEP


def draw_cases(count: int, size: int, seed: int = _SEED) -> list[Case]:
    """Draw sizes that are equally many in each power of ten; every third one is prime."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        op = OPS[number % len(OPS)]
        dtype = (torch.bfloat16, torch.float32)[number // len(OPS) % 2]
        numel = int(math.exp(draw.uniform(math.log(_LEAST), math.log(_MOST // size))))
        cases.append(Case(op, dtype, _prime_from(numel) if number % 3 == 0 else numel))
    return cases


def _prime_from(numel: int) -> int:
    while numel > 2 and any(numel % n == 0 for n in range(2, math.isqrt(numel) + 1)):
        numel += 1
    return max(numel, 2)


def main(minutes: float, size: int, json_file: str) -> None:
    seconds = 60 * minutes
    rows = run(lambda world: _measure_all(world, seconds), size, "virtual", heap_size=_HEAP)[0]
    worst = max((row for row in rows["cliffs"]), key=lambda row: row[-1], default=None)
    text = (
        f"{size} ranks of one GPU, {len(rows['cliffs'])} sizes drawn with seed {_SEED}; time over "
        f"that of the next multiple of {_STEP:,}, at most {_ALLOWED} is allowed. "
        f"Over it: {sum(row[-1] > _ALLOWED for row in rows['cliffs'])}. Worst: {worst}."
    )
    head = ["op", "dtype", "elements", "us", "us of the multiple", "ratio"]
    shown = sorted(rows["cliffs"], key=lambda row: -row[-1])
    table = [
        [*map(str, row[:3]), *(f"{t:.1f}" for t in row[3:5]), f"{row[5]:.3f}"] for row in shown
    ]
    Figures("Sizes", text, head, table).show(json_file)
    head = ["op", "elements", "on the heap, us", "ordinary output, us", "both ordinary, us"]
    table = [[row[0], str(row[1]), *(f"{t:.1f}" for t in row[2:])] for row in rows["ordinary"]]
    text = "bfloat16; the algorithm is what auto takes for where the tensors are."
    beside = json_file.replace(".json", "-ordinary.json") if json_file else ""
    Figures("Ordinary tensors", text, head, table).show(beside)


def _measure_all(world: World, seconds: float) -> dict[str, list[list[Any]]]:
    """Stop when the time is up: rank 0's clock says so, for all."""
    end = time.monotonic() + seconds
    found: dict[str, list[list[Any]]] = {"ordinary": [], "cliffs": []}
    for op in OPS:
        for numel in _ORDINARY:
            with world.scope():
                variants = list(_where_variants(world, op, numel))
                found["ordinary"].append([op, numel, *_micros(world, variants)])
    for case in draw_cases(400, world.size):
        if not world.broadcast_object(time.monotonic() < end):
            break
        with world.scope():
            sizes = (case.numel, next_multiple(case.numel))
            variants = [_variant(world, case._replace(numel=n)) for n in sizes]
            mine, multiple = _micros(world, variants)
            dtype = str(case.dtype).removeprefix("torch.")
            found["cliffs"].append([case.op, dtype, case.numel, mine, multiple, mine / multiple])
    return found


def _micros(world: World, variants: list[Variant]) -> list[float]:
    return [1e6 * times.median for times in measure(world, variants, _SAMPLES, at_least=10)]


def _variant(world: World, case: Case, is_ordinary: tuple[bool, bool] = (False, False)) -> Variant:
    x = _tensor(world, case, "x", is_ordinary[0])
    out = _tensor(world, case, "out", is_ordinary[1])
    x.normal_()
    return Variant(f"{case} {is_ordinary}", [_call(world, case.op, x, out)])


def _call(world: World, op: str, x: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    return lambda: getattr(world, op)(x, out=out)


def _where_variants(world: World, op: str, numel: int) -> Iterator[Variant]:
    for is_ordinary in ((False, False), (False, True), (True, True)):
        yield _variant(world, Case(op, torch.bfloat16, numel), is_ordinary)


def _tensor(world: World, case: Case, name: str, is_ordinary: bool) -> torch.Tensor:
    """Give the tensor of a call: of each op the smaller one has `numel` elements."""
    larger = {"all_gather": "out", "reduce_scatter": "x"}
    whole = case.op == "all_to_all" or larger.get(case.op) == name
    numel = case.numel * (world.size if whole else 1)
    if is_ordinary:
        return torch.empty(numel, dtype=case.dtype, device=world.device)
    return world.empty((numel,), case.dtype, name)
