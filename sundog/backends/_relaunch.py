"""Repeat a call with the same tensors, which only needs to start its kernels.

A repeated call has the same arguments, grid and binary; only the stream may change. So the first
repetition is watched. If it only launched kernels that were launched before (an op that can be
captured in a graph has no state on the host), later ones pass the arguments, as addresses instead
of tensors, straight to Triton's launcher. Looking the launches up again took half of the host's
time for a small collective, which was 30 us beside an H200.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from ..target import Footprint
from ._gpu import Known, footprint_of, in_order, launched, needs_scratch


class Again:
    """A launch that needs only a stream. To `Gang` it is a launch like any other."""

    loaded = True

    def __init__(self, known: Known, given: set[int]) -> None:
        """`given` has the storages of the caller's tensors, which the caller keeps alive."""
        kernel, grid, args, kwargs, compiled = known
        arguments = in_order(kernel, args, kwargs)
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        self._kept = [each for each in tensors if _storage(each) not in given]
        self.pointers = [each.data_ptr() for each in tensors]
        self._grid = (*grid, 1, 1)[:3]
        self._run, self._rest = _bare(
            compiled.run, self._grid,
            (compiled.function, compiled.packed_metadata, None, None, None,
             *[each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]),
        )  # fmt: skip
        self.compiled = compiled
        self.name = kernel.__name__
        self.programs = math.prod(self._grid) * getattr(compiled.metadata, "num_ctas", 1)

    def load(self) -> None:
        """Do nothing: it was loaded when it was launched before."""

    def footprint(self) -> Footprint | None:
        return footprint_of(self.compiled)

    def start(self, stream: torch.cuda.Stream) -> Any:
        self.put(stream.cuda_stream)
        return self.compiled

    def put(self, handle: int) -> None:
        """Start it on the stream with this handle."""
        self._run(*self._grid, handle, *self._rest)


def _bare(launcher: Any, grid: tuple, rest: tuple) -> tuple[Callable[..., None], tuple]:
    """Return the function that starts the kernel, and the arguments that follow the stream.

    Triton's launcher adds arguments and calls a function in C. They stay the same, so we record
    them once, which saves 2 us each time; but not if the launcher reports every launch to a
    sanitizer.
    """
    if not hasattr(launcher, "launch") or getattr(launcher, "gsan_enabled", False):
        return launcher, rest
    seen: list[tuple] = []
    recorder = copy.copy(launcher)
    recorder.launch = lambda *args: seen.append(args)
    recorder(*grid, 0, *rest)
    assert seen[0][:4] == (*grid, 0), "the grid and the stream come first"
    return launcher.launch, seen[0][4:]


class _NothingElse(TorchDispatchMode):
    """Notes whether torch does more than make views of tensors."""

    holds = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call imports the compiler, which takes two seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.holds = self.holds and func.is_view
        return func(*args, **(kwargs or {}))


def again(
    run: Callable[[], None], given: tuple[torch.Tensor, ...], start: Callable[[list[Again]], bool]
) -> Callable[[], bool] | None:
    """Run a call. If it only made known launches, return a function that starts them, else None.

    `given` has the caller's tensors, which exist when the caller calls again.
    """
    launches = _watch(run, given)
    return functools.partial(start, launches) if launches else None


def _watch(run: Callable[[], None], given: tuple[torch.Tensor, ...]) -> list[Again]:
    seen: list[Known | None] = []
    before = launched.set(seen)
    try:
        with _NothingElse() as nothing_else:
            run()
    finally:
        launched.reset(before)
    if not nothing_else.holds or not all(each and not needs_scratch(each[-1]) for each in seen):
        return []
    with torch._C.DisableTorchFunction():
        storages = {_storage(each) for each in given}
        return [Again(each, storages) for each in seen if each]


def is_hooked() -> bool:
    """Return whether launches are hooked, by a profiler for example: then Triton must make them."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
