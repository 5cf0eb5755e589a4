"""Compile a recorded launch for a target and count what matters: widths, atomics, registers.

`marks` are what falls short; the rules are in marks.py.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from triton import knobs

from ..dataset.triton.compile import gpu_target
from ..dataset.triton.triton_module import read_module
from ..errors import SundogError
from . import assembly, hoisted, ttgir
from .marks import CompiledKernel, IsaMark, classify, judge
from .recorded import CTX, RecordedLaunch, compile_launch

__all__ = ["Kernel", "Site", "inspect_launch"]

_ATOMIC = re.compile(r"\batomic_(?:rmw )?(\w+)(?:, | )([a-z_]+), ([a-z]+),")


@dataclass(frozen=True)
class Site:
    """An access in the source and what became of it, all its unrolled copies together."""

    kind: str
    role: str  # wide, tail, small, flags or scalar
    arguments: tuple[str, ...]
    where: str
    tile: tuple[int, ...]
    itemsize: int
    widths: dict[int, int]  # bytes: instructions


@dataclass(frozen=True)
class Kernel:
    """One kernel, compiled for one target."""

    op: str
    name: str
    target: str
    registers: int
    spills: int  # bytes of a thread
    shared: int  # bytes of a program
    loads: dict[int, int]  # of global memory, bytes: instructions
    stores: dict[int, int]
    atomics: dict[str, int]  # "add acquire sys": how many in the kernel
    barriers: int
    tensor_cores: dict[str, int]
    tma: int
    sites: list[Site]
    marks: list[IsaMark]


def inspect_launch(op: str, launch: RecordedLaunch, target: str) -> Kernel:
    gpu = gpu_target(target)
    compiled = compile_launch(launch, target)
    is_ptx = gpu.backend == "cuda"
    text = compiled.asm["ptx" if is_ptx else "amdgcn"]
    if ".loc" not in text:
        raise SundogError("the assembly has no line numbers: unset TRITON_DISABLE_LINE_INFO")
    read = assembly.read(text, is_ptx)
    flow = ttgir.Flow(read_module(compiled))
    met = ttgir.find(flow, read.moves)
    threads = compiled.metadata.num_warps * gpu.warp_size
    kernel = CompiledKernel(flow, met, launch.roles, threads)
    roles = classify(kernel)
    registers, spills = _ptx_resources(compiled.asm["cubin"]) if is_ptx else _amd_resources(text)
    moves = {kind: _widths(read.moves, kind, met) for kind in ("load", "store")}
    return Kernel(
        op, launch.kernel.__name__, target, registers, spills, compiled.metadata.shared,
        moves["load"], moves["store"], _atomics(compiled.asm["ttgir"]), read.barriers,
        read.tensor_cores, read.tma, _sites(met, roles),
        judge(kernel, roles, spills) + _hoisted(compiled.asm, launch.roles),
    )  # fmt: skip


def _hoisted(asm: dict[str, Any], roles: dict[str, str]) -> list[IsaMark]:
    """Loads issued before a wait. Gluon has no TTIR: nothing pipelines its kernels."""
    if "ttir" not in asm:
        return []
    constant = {name for name, role in roles.items() if role == CTX}
    found = hoisted.find(asm["ttir"], asm["ttgir"], constant)
    return list(dict.fromkeys(IsaMark("hoisted", each.where, each.text) for each in found))


def _widths(
    moves: list[assembly.Instruction], kind: str, met: list[ttgir.MemoryAccess]
) -> dict[int, int]:
    here = [access.place for access in met if access.kind == kind]
    # AMD reads a flag by a plain load past the caches, where the source has no load.
    plain = [m for m in moves if not m.ordered or any(m.is_at(place) for place in here)]
    return dict(sorted(Counter(m.nbytes for m in plain if m.kind == kind).items()))


def _sites(met: list[ttgir.MemoryAccess], roles: list[str]) -> list[Site]:
    sites: dict[tuple, Site] = {}
    for a, role in zip(met, roles, strict=True):
        if role != "atomic":
            site = Site(a.kind, role, a.arguments, a.where, a.tile, a.itemsize, dict(a.widths))
            sites.setdefault((a.kind, role, a.arguments, a.place, a.tile), site)
    return list(sites.values())


def _atomics(ttgir: str) -> dict[str, int]:
    return dict(Counter(" ".join(found) for found in _ATOMIC.findall(ttgir)))


def _ptx_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread. Triton's kernels have nothing else on a stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _amd_resources(text: str) -> tuple[int, int]:
    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s+(\d+)", text, re.MULTILINE)
        return int(found[1]) if found else 0

    # Not sgpr_spill_count: those go into lanes of vector registers, which is not memory.
    return number("vgpr_count"), number("private_segment_fixed_size")
