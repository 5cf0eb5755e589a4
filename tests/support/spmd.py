"""`--backend symm`: every rank is a pytest process of its own, and all of them run the same tests.

So a test with a closure needs no fork, and CUDA starts once per process instead of once per test. A
world has all processes: opening one with some of them hung, it seems because torch counts
rendezvous per process and some had made more than others. Tests of another size are skipped.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sundog import World, knobs
from sundog.backends import symm
from sundog.backends._codec import decode, encode
from sundog.backends._processes import _picklable, _results
from sundog.backends._rendezvous import join
from sundog.launch import _heap_size

__all__ = ["Ranks"]

_SECONDS = 60


class Ranks:
    """The pytest processes together."""

    def __init__(self) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        if "RANK" not in os.environ:
            pytest.skip("--backend symm: start one pytest per rank, as scripts/gpu-check does")
        _limit_sms(int(os.environ.get("SUNDOG_TEST_SMS", 0)))
        self._rank, self._size, self._store = join(_SECONDS)
        self._runs = 0

    def run(
        self, fn: Callable[[World], Any], size: int, heap_size: int = 0, timeout: float = 0
    ) -> list[Any]:
        if size != self._size:
            pytest.skip(f"{size} ranks, and there are {self._size} processes")
        self._runs += 1
        answer = self._answer(fn, heap_size, timeout)
        self._store.set(f"run/{self._runs}/{self._rank}", encode(answer, allow_pickle=True))
        keys = [f"run/{self._runs}/{rank}" for rank in range(size)]
        self._store.wait(keys, timedelta(seconds=_SECONDS))
        answers = {
            rank: decode(self._store.get(key), allow_pickle=True) for rank, key in enumerate(keys)
        }
        return _results(answers, [0] * size, size)

    def _answer(self, fn: Callable[[World], Any], heap_size: int, timeout: float) -> Any:
        nbytes = _heap_size(heap_size, True, self._size)
        seconds = timeout or knobs.timeout.get()
        world = None
        try:
            world = symm.open_world(self._rank, self._size, self._store, nbytes, seconds)
            result = fn(world)
            if not world._closed:
                world.synchronize()
            world.close()
            return result, None, ""
        except BaseException as error:
            if world is not None:
                world.__exit__(type(error), error, error.__traceback__)
            return None, _picklable(error), traceback.format_exc()


def _limit_sms(most: int) -> None:
    """Let a world take at most `most` SMs per rank: another world runs beside it."""
    fits = symm.largest_that_fits
    if most:
        symm.largest_that_fits = lambda first, measure: fits(min(first, most), measure)
