"""Compile a recorded launch for a target and count what matters: widths, atomics, registers.

`marks` name what falls short. The *wide path* is every access of a whole tile through an argument
that holds data. These are not part of it:

scalar   a single element: an epoch, a size
flags    through `world.ctx` or what `world.signals` gave: words, one for each peer
small    a tile of less than a sixteenth of the kernel's largest, in no deeper loop: a bias, a row
         of scales, the last few elements; or of a tensor of at most 64 KB, whose time is latency
tail     masked, and either a 16-byte access of the same kind and argument stands in a deeper loop
         (the tail comes after the loop over whole tiles), or in the other branch of an `if`
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from triton import knobs

from .. import gpu_limits
from ..dataset.triton.compile import gpu_target
from ..dataset.triton.mlir import MlirOperation
from ..dataset.triton.triton_module import read_module
from ..device.context import DELTAS
from ..errors import SundogError
from . import assembly, hoisted, ttgir
from .recorded import CTX, DATA, FEW, RecordedLaunch, compile_launch
from .ttgir import Flow, MemoryAccess, descriptor_bytes

_ATOMIC = re.compile(r"\batomic_(?:rmw )?(\w+)(?:, | )([a-z_]+), ([a-z]+),")


@dataclass(frozen=True)
class Site:
    """An access in the source, with its instructions, all unrolled copies together."""

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
    shared = compiled.metadata.shared
    kernel = CompiledKernel(flow, met, launch.roles, threads, target, shared)
    roles = classify(kernel)
    registers, spills = resources(compiled, target)
    moves = {kind: _widths(read.moves, kind, met) for kind in ("load", "store")}
    atomics = dict(Counter(" ".join(found) for found in _ATOMIC.findall(compiled.asm["ttgir"])))
    return Kernel(
        op, launch.kernel.__name__, target, registers, spills, shared,
        moves["load"], moves["store"], atomics, read.barriers,
        read.tensor_cores, read.tma, _sites(met, roles),
        judge(kernel, roles, spills) + _hoisted(compiled.asm, launch.roles),
    )  # fmt: skip


def resources(compiled: Any, target: str) -> tuple[int, int]:
    """Return a compiled kernel's registers and bytes of spills, per thread."""
    if gpu_target(target).backend == "cuda":
        return _ptx_resources(compiled.asm["cubin"])
    return _amd_resources(compiled.asm["amdgcn"])


def _hoisted(asm: dict[str, Any], roles: dict[str, str]) -> list[IsaMark]:
    """Mark loads issued before a wait. Gluon has no TTIR, and its kernels are not pipelined."""
    if "ttir" not in asm:
        return []
    constant = {name for name, role in roles.items() if role == CTX}
    found = hoisted.find(asm["ttir"], asm["ttgir"], constant)
    return list(dict.fromkeys(IsaMark("hoisted", each.where, each.text) for each in found))


def _widths(
    moves: list[assembly.Instruction], kind: str, met: list[ttgir.MemoryAccess]
) -> dict[int, int]:
    here = [access.place for access in met if access.kind == kind]
    # AMD reads a flag by a plain load that bypasses the caches, where the source has no load.
    plain = [m for m in moves if not m.ordered or any(m.is_at(place) for place in here)]
    return dict(sorted(Counter(m.nbytes for m in plain if m.kind == kind).items()))


def _sites(met: list[ttgir.MemoryAccess], roles: list[str]) -> list[Site]:
    sites: dict[tuple, Site] = {}
    for a, role in zip(met, roles, strict=True):
        if role != "atomic":
            site = Site(a.kind, role, a.arguments, a.where, a.tile, a.itemsize, dict(a.widths))
            sites.setdefault((a.kind, role, a.arguments, a.place, a.tile), site)
    return list(sites.values())


def _ptx_resources(cubin: bytes) -> tuple[int, int]:
    """Read a thread's registers and spilled bytes. Triton uses a stack for nothing else."""
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


FULL = 16  # bytes of the widest access of one thread
_SMALL = 16
_A_FEW = 16  # bytes: ptxas sometimes keeps 8 or 12 on the stack, even for a trivial kernel


@dataclass(frozen=True)
class IsaMark:
    """Something that falls short."""

    rule: str  # narrow, lost, reload, cut, spill, shared or hoisted
    where: str
    text: str


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's accesses, and what is known of its launch."""

    flow: Flow
    accesses: list[MemoryAccess]
    roles: dict[str, str]  # of its tensor arguments
    threads: int
    arch: str = ""
    shared: int = 0  # bytes of a program


def classify(kernel: CompiledKernel) -> list[str]:
    """Name the kind of each access: atomic, scalar, flags, small, tail or wide."""
    found = [_without_tiles(access, kernel.roles) for access in kernel.accesses]
    tiles = [a for a, role in zip(kernel.accesses, found, strict=True) if not role]
    if not tiles:
        return found
    largest = max(tiles, key=lambda a: (a.nbytes, len(a.loops)))
    most = max(largest.nbytes, descriptor_bytes(kernel.flow))
    for n, access in enumerate(kernel.accesses):
        if not found[n]:
            is_small = access.nbytes * _SMALL <= most and len(access.loops) <= len(largest.loops)
            is_tail = any(_is_tail_of(kernel.flow, access, other) for other in tiles)
            found[n] = "small" if is_small else "tail" if is_tail else "wide"
    return found


def _without_tiles(access: MemoryAccess, roles: dict[str, str]) -> str:
    if access.kind == "atomic":
        return "atomic"
    if not access.tile:
        return "scalar"
    # Through no known argument, such as an address from a table: treated like data.
    found = {roles.get(name, DATA) for name in access.arguments or ("",)}
    return "" if DATA in found else "small" if FEW in found else "flags"


def judge(kernel: CompiledKernel, classes: list[str], spills: int) -> list[IsaMark]:
    marks = []
    for access, role in zip(kernel.accesses, classes, strict=True):
        if role == "wide":
            marks += _narrow(access, kernel.threads) + _reloads(kernel.flow, access)
        marks += _cuts(access, kernel.roles)
    most = gpu_limits.LIMITS.get(kernel.arch)
    if most is not None and kernel.shared > most.shared:
        text = f"{kernel.shared:,} bytes of shared memory, and a program of {kernel.arch} has "
        marks.append(IsaMark("shared", "", f"{text}{most.shared:,}: it can't be launched"))
    if spills > _A_FEW:
        marks.append(IsaMark("spill", "", f"{spills} bytes a thread are spilled to memory"))
    return list(dict.fromkeys(marks))


def _narrow(access: MemoryAccess, threads: int) -> list[IsaMark]:
    name = ", ".join(access.arguments) or "memory"
    size = "x".join(map(str, access.tile))
    tile = f"a tile of {size} elements of {access.itemsize} bytes over {threads} threads"
    if not access.widths:
        text = f"{access.kind} of {name}, {tile}: not found in the assembly, its width is unknown"
        return [IsaMark("lost", access.where, text)]
    least = min(access.widths)
    if least >= FULL:
        return []
    return [
        IsaMark("narrow", access.where, f"{access.kind} of {name}, {tile}: {least} bytes at a time")
    ]


def _reloads(flow: Flow, access: MemoryAccess) -> list[IsaMark]:
    """Find addresses that need a word that the innermost loop loads again.

    It was loaded before in the same loop, or when an outer loop last ran it.
    """
    marks = []
    for load in access.needs:
        is_inside = access.loops == flow.loops(load.op)[: len(access.loops)]
        if is_inside and not all(flow.varies(load.address, loop) for loop in access.loops):
            name = ", ".join(load.arguments) or "memory"
            text = (
                f"the address of this {access.kind} needs a word of {name} that the loop loads "
                "again and again: load it (translate the scalar base) before the loop"
            )
            marks.append(IsaMark("reload", access.where, text))
    return marks


def _cuts(access: MemoryAccess, roles: dict[str, str]) -> list[IsaMark]:
    """Mark a peer's distance that loses its upper 32 bits before it is added to an offset."""
    for load in access.needs:
        is_distance = load.offset is None or load.offset >= DELTAS.value
        if load.cut and is_distance and CTX in (roles.get(name) for name in load.arguments):
            text = (
                f"the address of this {access.kind} cuts the distance to a peer's heap to 32 bits: "
                "AMD does so in memory below 2 GiB, so the heap must be larger"
            )
            return [IsaMark("cut", access.where, text)]
    return []


def _is_tail_of(flow: Flow, access: MemoryAccess, other: MemoryAccess) -> bool:
    same = access.kind == other.kind and set(access.arguments) & set(other.arguments)
    is_wide = bool(other.widths) and min(other.widths) >= FULL
    if not (access.masked and same and is_wide):
        return False
    return len(other.loops) > len(access.loops) or _excludes(flow, access.op, other.op)


def _excludes(flow: Flow, one: MlirOperation, two: MlirOperation) -> bool:
    """Return whether they are in the two branches of one `if`."""
    branches = {id(op): n for op, n in flow.parents(one) if op.name == "scf.if"}
    return any(n != branches.get(id(op), n) for op, n in flow.parents(two))
