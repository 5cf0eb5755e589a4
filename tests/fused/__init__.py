"""Fused GEMM and communication: what the tests share."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import sundog
from sundog.dataset.triton.compile import gpu_target
from sundog.tools._subject import expected

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


A_FEW = 16  # bytes: ptxas keeps 8 or 12 on the stack of any kernel now and then, even a trivial one


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


def answers(op: Any, problem: Any, config: Any, calls: int = 2, exact: bool = True) -> Callable:
    """A rank's function: calls back to back on different data, and then what was wanted of each."""

    def main(world: sundog.World) -> list[tuple[torch.Tensor, torch.Tensor]]:
        plan = op.plan(world, problem, config)
        given = [op.inputs(world, problem, seed, exact) for seed in range(calls)]
        wanted = [expected(world, op, problem, each) for each in given]
        outs = [world.empty(want.shape, want.dtype, "out") for want in wanted]
        world.barrier()  # peers may be touched
        for each, out in zip(given, outs, strict=True):
            plan(*each, out)
        return [(out.cpu(), want) for out, want in zip(outs, wanted, strict=True)]

    return main


def compare(results: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Bit by bit."""
    for rank, calls in enumerate(results):
        for number, (got, want) in enumerate(calls):
            assert torch.equal(got, want), f"rank {rank}, call {number}: {(got - want).nonzero()}"
