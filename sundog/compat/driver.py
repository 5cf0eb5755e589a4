"""A stand-in for cuda-python's `cuda.bindings.driver`: the stream operations that programs use.

They are operations on a stream of the simulated rank. Importable where cuda-python is not
installed, after `provide()`.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import SundogError
from . import stream_kernels as kernels
from .patches import current

__all__ = ["provide", "withdraw"]

_NAMES = ("cuda", "cuda.bindings", "cuda.bindings.driver")


class StreamFlags:
    """CUstreamWaitValue_flags and CUstreamWriteValue_flags."""

    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_EQ = 1
    CU_STREAM_WRITE_VALUE_DEFAULT = 0


def _on(stream: Any) -> Any:
    rank = current()
    if rank is None:
        raise SundogError("cuda.bindings.driver is a stand-in here: use it in a simulated rank")
    return rank.world.stream(int(stream))


def _wait_value(stream: Any, address: Any, value: Any, flags: int) -> tuple[int]:
    if flags != StreamFlags.CU_STREAM_WAIT_VALUE_EQ:
        raise SundogError("cuStreamWaitValue32: only CU_STREAM_WAIT_VALUE_EQ is simulated")
    with _on(stream):
        kernels.wait_value[(1,)](int(address), int(value))
    return (0,)


def _write_value(stream: Any, address: Any, value: Any, flags: int = 0) -> tuple[int]:
    with _on(stream):
        kernels.write_value[(1,)](int(address), int(value))
    return (0,)


def _unknown(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise SundogError(f"cuda.bindings.driver.{name} is not simulated: run this program on a GPU")


def provide() -> None:
    """Make the module importable, unless cuda-python is installed."""
    if "cuda" in sys.modules or importlib.util.find_spec("cuda") is not None:
        return
    modules = [ModuleType(name, "A stand-in of sundog's.") for name in _NAMES]
    for module in modules:
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    package, bindings, driver = modules
    package.bindings, bindings.driver = bindings, driver  # type: ignore[attr-defined]
    vars(driver).update(
        cuStreamWaitValue32=_wait_value, cuStreamWriteValue32=_write_value,
        CUstreamWaitValue_flags=StreamFlags, CUstreamWriteValue_flags=StreamFlags, CUdeviceptr=int,
        CUstream=int, __getattr__=_unknown,
    )  # fmt: skip
    sys.modules |= dict(zip(_NAMES, modules, strict=True))


def withdraw() -> None:
    """Take the stand-in back; modules that have imported it keep it."""
    found = sys.modules.get("cuda.bindings.driver")
    if found is not None and getattr(found, "__getattr__", None) is _unknown:
        for name in _NAMES:
            del sys.modules[name]
