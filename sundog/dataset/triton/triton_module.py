"""Triton's in-memory modules to generic-form MLIR, and text to modules: no GPU, no driver.

libtriton has no switch for the generic form, but MLIR prints whatever does not verify in it. So
for the length of one print the module gets a second block, which a module may not have; the block
is erased again and the module is as it was. (Seen on Triton 3.6.0, 3.7.1 and 3.9.0; nothing is
written to stderr.)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .mlir import MlirModule, parse_module


def read_module(module_or_kernel: Any) -> MlirModule:
    """Read the operations of an `ir.module`, a compiled kernel's TTGIR, or TTIR or TTGIR text."""
    source = module_or_kernel
    if hasattr(source, "asm"):
        if "ttgir" not in source.asm:
            raise ValueError(
                "the compiled kernel kept no TTGIR: compile with TRITON_STORE_BINARY_ONLY=0, "
                "or get the module from sundog.dataset.triton.compile.lower"
            )
        source = source.asm["ttgir"]
    if not isinstance(source, str):
        return _read(source, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.mlir"
        return _read(_load(source, path), str(path))


def load_module(text: str) -> Any:
    """Triton's module of a text, pretty or generic, with every dialect that Triton has."""
    with tempfile.TemporaryDirectory() as folder:
        return _load(text, Path(folder) / "module.mlir")


def generic_text(module: Any) -> str:
    """Print the module in generic form with locations; it has one empty block more at its end."""
    from triton._C.libtriton import ir

    context = getattr(module, "context", None)
    if context is None:
        raise ValueError("the module has no context: set module.context to the one it was made in")
    region = module.get_operation().get_region(0)
    block = ir.builder(context).create_block_with_parent(region, [])
    try:
        return str(module)
    finally:
        block.erase()


def _read(module: Any, inferred_from: str | None) -> MlirModule:
    parsed = parse_module(generic_text(module), inferred_from=inferred_from)
    extra = parsed.operation.regions[0].pop()
    assert not extra.operations, "the block that makes the module print in generic form is empty"
    return parsed


def _load(text: str, path: Path) -> Any:
    try:
        from triton._C.libtriton import amd, ir, nvidia
    except ModuleNotFoundError as error:
        raise ImportError(
            "graphs are made from a module's text by Triton's parser, and Triton is not installed: "
            "pip install triton (torch is not needed)"
        ) from error
    path.write_text(text)
    context = ir.context()
    for dialects in (ir, nvidia, amd):
        dialects.load_dialects(context)
    try:
        module = ir.parse_mlir_module(str(path), context)
    except RuntimeError as error:
        raise ValueError(f"Triton cannot parse this module (stderr says where): {error}") from error
    module.context = context
    return module
