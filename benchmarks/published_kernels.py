"""Time models of kernels that others wrote: NCCL's collectives, and the engines' all-reduce.

They are here to be held to public tables, not to choose anything: sundog/predict has the models of
our own kernels. The engines' two are put together from the same parts.

NCCL: a ring, or for all-to-all one exchange, by three protocols, of which the fastest counts:

    start + steps * step + sent / rate + own / copying

`sent` is what crosses a GPU's link, `own` its part of the result, which is copied from its input.
One all-reduce is not a ring: where a switch reduces (NVLS), which NCCL 2.29 does from 8 GPUs on.
2 and 4 GPUs say nothing about its rate, so that is a stated parameter, link.multicast_rate.

The engines (SGLang 0.5.9 and 0.5.10, vLLM) have one kernel in two variants, 36 blocks of 512
threads with 16 bytes each. One shot: barrier, read all, barrier. Two shots: barrier, reduce a
slice, barrier, read all slices one after the other, barrier. Only the barrier between the two shots
has a fence: the others set their flags by volatile stores (vLLM's custom_all_reduce.cuh). The
second is taken from 512 KB on with 4 GPUs, from 256 KB on with 8, and never with 2.
"""

from __future__ import annotations

from sundog.hardware.description import Hardware
from sundog.predict.parts import (
    Part,
    Ranks,
    Round,
    Traffic,
    barrier,
    copied,
    launch,
    total,
    waves,
)

PROTOCOLS = ("ll", "ll128", "simple")
NCCL_START = {
    "ll.start": 4e-6, "ll.step": 1e-6, "ll.rate": 4e10, "ll128.start": 5e-6, "ll128.step": 1.2e-6,
    "ll128.rate": 1.5e11, "simple.start": 1.5e-5, "simple.step": 1.5e-6, "simple.rate": 3.5e11,
    "copying": 1e12,
}  # fmt: skip
_BLOCKS, _BLOCK_BYTES = 36, 512 * 16
_TWO_SHOT_FROM = {2: float("inf"), 4: 512 << 10, 8: 256 << 10}  # bytes


def nccl_seconds(
    figures: dict[str, float], op: str, gpus: int, nbytes: float, multicast_rate: float = 0.0
) -> float:
    """One collective of `nbytes` in total."""
    is_reduced = op == "all_reduce"
    steps = 1 if op == "alltoall" else (gpus - 1) * (2 if is_reduced else 1)
    sent = nbytes * (gpus - 1) / gpus * (2 if is_reduced else 1)
    own = nbytes / gpus / figures["copying"]
    times = [
        figures[f"{p}.start"] + steps * figures[f"{p}.step"] + sent / figures[f"{p}.rate"] + own
        for p in PROTOCOLS
    ]
    if is_reduced and multicast_rate and gpus == 8:
        times.append(figures["simple.start"] + sent / multicast_rate)
    return min(times)


def is_two_shot(gpus: int, nbytes: float) -> bool:
    """Return whether the engines would take two shots."""
    return nbytes >= _TWO_SHOT_FROM[gpus]


def engine_seconds(hardware: Hardware, gpus: int, nbytes: float, two_shot: bool) -> float:
    """Return the time of an all-reduce by the engines' kernel."""
    ranks = Ranks.on(hardware, gpus)
    return total((_two_shot if two_shot else _one_shot)(ranks, nbytes)).seconds


def _one_shot(ranks: Ranks, n: float) -> list[Part]:
    block = min(n / _BLOCKS, _BLOCK_BYTES)
    traffic = Traffic(n, n, read_there=n * (ranks.size - 1))
    tile = Round(block * ranks.size, block, is_there=True)
    rounds = waves(n, _BLOCKS * _BLOCK_BYTES)
    reduced = copied(ranks, "reduce", traffic, tile, rounds)
    flag = barrier(ranks, is_released=False)
    return [launch(ranks), flag, reduced, flag]


def _two_shot(ranks: Ranks, n: float) -> list[Part]:
    size, part = ranks.size, n / ranks.size
    block = min(part / _BLOCKS, _BLOCK_BYTES)
    rounds, far = waves(part, _BLOCKS * _BLOCK_BYTES), part * (size - 1)
    reduced = copied(
        ranks,
        "reduce",
        Traffic(n, part, read_there=far),
        Round(block * size, block, is_there=True),
        rounds,
    )
    gathered = copied(
        ranks,
        "gather",
        Traffic(n, n, read_there=far),
        Round(block * size, block * size, size, is_there=True),
        rounds,
    )
    flag = barrier(ranks, is_released=False)
    return [launch(ranks), flag, reduced, barrier(ranks), gathered, flag]
