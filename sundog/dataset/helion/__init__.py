"""Record Helion kernels: their tuning runs and their device IR.

    from sundog.dataset.helion import record_autotuning

Importing this does not import helion; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collector import collect, describe, record_autotuning

__all__ = ["CODEGEN_SETTINGS", "collect", "describe", "record_autotuning"]

# Settings that change the generated code; the others are recorded, but are no identity.
CODEGEN_SETTINGS = (
    "allow_warp_specialize",
    "backend",
    "debug_dtype_asserts",
    "dot_precision",
    "fast_math",
    "index_dtype",
    "persistent_reserved_sms",
    "static_shapes",
    "triton_do_not_specialize",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(".collector", __name__), name)
