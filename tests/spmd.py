"""`--backend symm`: every rank is a pytest process of its own, and all of them run the same tests.

`run(fn, size)` opens a world of the first `size` processes; the others only hear the results. So a
test with a closure needs no fork, and CUDA starts once per process instead of once per test.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from sundog import World, knobs
from sundog.backends import symm
from sundog.backends.exchange import join, open_store
from sundog.backends.processes import _picklable, _results
from sundog.backends.wire import pack, unpack

__all__ = ["Ranks"]

_SECONDS = 60


class Ranks:
    """The pytest processes together."""

    def __init__(self) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        if "RANK" not in os.environ:
            pytest.skip("--backend symm: start one pytest per rank, as scripts/gpu-check does")
        self._rank, self._size, self._store = join(_SECONDS)
        self._groups: dict[int, Any] = {}
        self._runs = 0

    def run(
        self, fn: Callable[[World], Any], size: int, heap_size: int = 0, timeout: float = 0
    ) -> list[Any]:
        if size > self._size:
            pytest.skip(f"{size} ranks, and there are {self._size} processes")
        if size not in self._groups:
            self._groups[size] = dist.new_group(list(range(size)))
        self._runs += 1
        if self._rank < size:
            answer = self._answer(fn, size, heap_size, timeout)
            self._store.set(f"run/{self._runs}/{self._rank}", pack(answer))
        else:
            open_store(self._store)  # worlds are counted, on every rank alike
        keys = [f"run/{self._runs}/{rank}" for rank in range(size)]
        self._store.wait(keys, timedelta(seconds=_SECONDS))
        answers = {rank: unpack(self._store.get(key)) for rank, key in enumerate(keys)}
        return _results(answers, [0] * size, size)

    def _answer(self, fn: Callable[[World], Any], size: int, heap_size: int, timeout: float) -> Any:
        nbytes = heap_size or knobs.heap_size.get()
        seconds = timeout or knobs.timeout.get()
        store = dist.PrefixStore(f"worlds/{self._runs}", self._store)
        world = None
        try:
            world = symm.open_world(self._rank, size, store, nbytes, seconds, self._groups[size])
            result = fn(world)
            if not world._closed:
                world.synchronize()
            world.close()
            return result, None, ""
        except BaseException as error:
            if world is not None:
                world._backend.fail(error)  # type: ignore[attr-defined]
                world.close()
            return None, _picklable(error), traceback.format_exc()
