"""Read the instructions of PTX and AMD assembly that move, wait and multiply.

Every instruction keeps the source position that the compiler wrote beside it, the innermost call
first: ("memory.py", 52, 13), ("all_gather.py", 107, 31). TTGIR has the same positions, by which an
instruction finds its access. Line 0 stands for several lines, where the compiler has merged two
branches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

Place = tuple[tuple[str, int, int], ...]

_LOC = re.compile(r"^\s*\.loc\s+(\d+ \d+ \d+)(?:.*inlined_at (\d+ \d+ \d+))?.*?(?://|;)\s*(.*)$")
_STEP = re.compile(r"([^\s\[\]@:]+):(\d+)(?::(\d+))?")
_PTX = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s*(.*)$")
_AMD = re.compile(r"^\s+([a-z]\w+)\b(.*)$")
_AMD_MOVE = re.compile(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
_AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_ORDERED = {"acquire", "release", "relaxed"}


@dataclass(frozen=True)
class Instruction:
    """An access of global memory."""

    kind: str  # load or store
    nbytes: int  # of one thread
    ordered: bool  # AMD: past a cache, as Triton reads a flag, but also by a cache modifier
    place: Place

    def is_at(self, place: Place) -> bool:
        if self.place == place:
            return True
        pairs = zip(self.place, place, strict=False)
        merged = len(self.place) == len(place) and any(line == 0 for _, line, _ in self.place)
        return merged and all(mine == theirs or mine[1] == 0 for mine, theirs in pairs)


@dataclass(frozen=True)
class Assembly:
    moves: list[Instruction]
    atomics: int
    barriers: int
    tensor_cores: dict[str, int]  # by instruction
    tma: int


def read(text: str, is_ptx: bool) -> Assembly:
    moves: list[Instruction] = []
    others: Counter[str] = Counter()
    matrix: Counter[str] = Counter()
    for name, rest, place in _instructions(text, _PTX if is_ptx else _AMD):
        move = _ptx_move(name, rest) if is_ptx else _amd_move(name)
        if move is not None:
            ordered = not is_ptx and bool(re.search(r"\b(sc0|sc1|glc)\b", rest))
            moves.append(Instruction(*move, ordered, place))
        elif product := re.match(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_s?mfma\w*", name):
            matrix[product[0].split("_f32")[0] if is_ptx else name] += 1
        else:
            others[_other(name)] += 1
    return Assembly(moves, others["atomic"], others["barrier"], dict(matrix), others["tma"])


def instructions(ptx: str) -> Iterator[tuple[str, Place]]:
    """Yield every instruction of a kernel, with its source position."""
    return ((name, place) for name, _, place in _instructions(ptx, _PTX))


def _instructions(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str, Place]]:
    place: Place = ()
    latest: dict[str, Place] = {}  # by file, line and column
    in_asm = False  # where Triton 3.9 counts lines as if the text were in the kernel's file
    for line in text.splitlines():
        in_asm = "begin inline asm" in line or (in_asm and "end inline asm" not in line)
        if loc := _LOC.match(line):
            if not in_asm:
                place = latest[loc[1]] = _place(loc[3]) + latest.get(loc[2], ())
        elif found := pattern.match(line):
            yield found[1], found[2], place


def _place(text: str) -> Place:
    """`memory.py:52:13 @[ push.py:107:31 ]`; without the calls where `inlined_at` has them."""
    return tuple((file, int(line), int(column or 0)) for file, line, column in _STEP.findall(text))


def _ptx_move(name: str, rest: str) -> tuple[str, int] | None:
    """ld.global.L1::evict_first.v4.b32, st.global.b16, cp.async.cg.shared.global [..], [..], 16."""
    parts = name.split(".")
    if name.startswith("cp.async.c") and "global" in parts:
        count = re.findall(r",\s*(0x[0-9a-f]+|\d+)\b", rest)
        return ("load", int(count[0], 0)) if count else None
    if parts[0] not in ("ld", "st") or "global" not in parts or _ORDERED & set(parts):
        return None
    bits = re.fullmatch(r"[a-z]+(\d+)", parts[-1])
    lanes = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d+", p)), 1)
    assert bits is not None, name
    return "load" if parts[0] == "ld" else "store", lanes * int(bits[1]) // 8


def _amd_move(name: str) -> tuple[str, int] | None:
    """global_store_dwordx4, buffer_load_ushort, global_load_lds_dwordx4; gfx12: store_b128."""
    found = _AMD_MOVE.fullmatch(name)
    if found is None:
        return None
    kind, what = found[1], found[2]
    if what in _AMD_BYTES:
        return kind, _AMD_BYTES[what]
    if bits := re.fullmatch(r"[bui](\d+)", what):
        return kind, int(bits[1]) // 8
    return kind, 2 if "short" in what else 1


def _other(name: str) -> str:
    if name.startswith(("atom.", "red.")) or "_atomic_" in name:
        return "atomic"
    if name.startswith(("ld.", "st.")) and _ORDERED & set(name.split(".")):
        return "atomic"  # how Triton reads a flag
    if re.match(r"(bar|barrier)\.(cta\.)?(sync|arrive)|s_barrier", name):
        return "barrier"
    if name.startswith("cp.async.bulk.tensor"):
        return "tma"
    return ""
