"""A call once more, with the very same tensors: nothing is left to do but to start its kernels.

Where a call repeats one before, arguments, grid and binary are those of then: all that changes is
the stream. So the first repetition is watched. If it did nothing but launch kernels that were
launched before (an op that can be captured in a graph has no state on the host), later ones hand
the arguments, addresses instead of tensors, straight to Triton's launcher. Of the host's time for
a small collective, 30 us on an H200's machine, half went into finding all of that again.
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

__all__ = ["Again", "again", "is_hooked"]


class Again:
    """A launch that has all it needs but a stream; to `Gang`, one like any other."""

    loaded = True

    def __init__(self, known: Known, given: set[int]) -> None:
        """`given`: storages of the caller's tensors, which are not kept alive: he has them."""
        kernel, grid, args, kwargs, compiled = known
        arguments = in_order(kernel, args, kwargs)
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        self._kept = [each for each in tensors if _storage(each) not in given]
        self._grid = (*grid, 1, 1)[:3]
        self._run, self._behind = _bare(
            compiled.run, self._grid,
            (compiled.function, compiled.packed_metadata, None, None, None,
             *[each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]),
        )  # fmt: skip
        self.compiled = compiled
        self.name = kernel.__name__
        self.programs = math.prod(self._grid) * getattr(compiled.metadata, "num_ctas", 1)

    def load(self) -> None:
        """It was, when it was launched before."""

    def footprint(self) -> Footprint | None:
        return footprint_of(self.compiled)

    def start(self, stream: torch.cuda.Stream) -> Any:
        self.put(stream.cuda_stream)
        return self.compiled

    def put(self, handle: int) -> None:
        """On the stream with this handle."""
        self._run(*self._grid, handle, *self._behind)


def _bare(launcher: Any, grid: tuple, behind: tuple) -> tuple[Callable[..., None], tuple]:
    """What starts the kernel, and its arguments behind the stream.

    Triton's launcher adds some and calls one in C. They stay the same, so we let it tell us once,
    which saves 2 us each time; but not where it would tell a sanitizer of every launch.
    """
    if not hasattr(launcher, "launch") or getattr(launcher, "gsan_enabled", False):
        return launcher, behind
    told: list[tuple] = []
    teller = copy.copy(launcher)
    teller.launch = lambda *args: told.append(args)
    teller(*grid, 0, *behind)
    assert told[0][:4] == (*grid, 0), "the grid and the stream come first"
    return launcher.launch, told[0][4:]


class _NothingElse(TorchDispatchMode):
    """While it is entered: does torch do more than look at tensors in another way?"""

    holds = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.holds = self.holds and func.is_view
        return func(*args, **(kwargs or {}))


def again(
    run: Callable[[], None], given: tuple[torch.Tensor, ...], start: Callable[[list[Again]], bool]
) -> Callable[[], bool] | None:
    """Run it. `start` of its launches, if they are all that it did and all were known; else None.

    `given`: tensors of the caller's, which he has when he calls again.
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
    """Does somebody, a profiler, want to know of every launch? Then Triton must make it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
