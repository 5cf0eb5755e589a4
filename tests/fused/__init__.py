"""Fused GEMM and communication: what the tests share."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sundog.dataset.compile import gpu_target

ARCHS = ("sm_90", "gfx942", "gfx950")
on_every_arch = pytest.mark.parametrize("arch", ARCHS)

Run = Callable[..., list[Any]]


def compiled(kernel: JITFunction, arch: str, args: tuple, options: dict[str, Any]) -> Any:
    """What a launch with these arguments would run on `arch`. No GPU is needed."""
    target = gpu_target(arch)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **options}
    bound, specialization, rest = bind(*args, **given)
    chosen, signature, constants, attrs = kernel._pack_args(
        backend, given, bound, specialization, rest
    )
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=target, options=chosen.__dict__)


def assembly(made: Any) -> str:
    return made.asm.get("ptx") or made.asm["amdgcn"]


def spills(made: Any) -> int:
    """Bytes of memory that stand in for registers, per thread."""
    if "cubin" in made.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            text = subprocess.run(
                [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        return max(int(n) for n in re.findall(r"STACK:(\d+)", text))
    return max(int(n) for n in re.findall(r"\.private_segment_fixed_size: *(\d+)", assembly(made)))
