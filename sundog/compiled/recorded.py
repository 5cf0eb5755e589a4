"""A launch without its memory: what Triton's compiler needs to compile it for any GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from ..dataset.triton.compile import gpu_target, source_of
from ..errors import SundogError
from ..world.tensors import heaps

CTX, FLAGS, DATA, FEW = "ctx", "flags", "data", "few"


@dataclass(frozen=True)
class Pointer:
    """A tensor as Triton's compiler sees an argument, without its memory."""

    dtype: torch.dtype
    address: int
    reach: int  # bytes of the storage, which decides whether AMD offsets have 32 bits

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.reach


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: the kernel, and its arguments as Triton's compiler needs them."""

    kernel: JITFunction
    args: tuple
    kwargs: dict[str, Any]
    roles: dict[str, str]  # of arguments that are tensors or tuples: ctx, flags, data or few


def compile_launch(launch: RecordedLaunch, target: str) -> Any:
    """Compile a launch for a target, as Triton would on such a GPU, which need not be here."""
    try:
        source, options = source_of(launch.kernel, launch.args, launch.kwargs, arch=target)
        return triton.compile(source, target=gpu_target(target), options=options)
    except (KeyError, RuntimeError, TritonError) as error:
        raise SundogError(
            f"{launch.kernel.__name__} does not compile for {target}: {_cause(error)}"
        ) from error


def _cause(error: BaseException) -> str:
    """Return the innermost of Triton's errors; each of the outer ones shows its caller's source."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def pointer(value: Any, heap_size: int) -> Any:
    """Replace a tensor by a Pointer, also inside a tuple; keep any other argument."""
    if isinstance(value, tuple):  # a view of a matrix, say
        items = [pointer(item, heap_size) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunction():
        storage = value.untyped_storage()
        reach = heap_size if storage.data_ptr() in heaps else storage.nbytes()
        return Pointer(value.dtype, value.data_ptr(), reach)
