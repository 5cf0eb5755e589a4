"""Before ranks map each other's memory: everything that would not work, all of it at once."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import triton

from ..errors import RankMismatch

__all__ = ["Facts", "check", "facts"]

_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class Facts:
    """What one rank tells the others about itself."""

    host: str
    pid: int
    gpu: str  # a name that is the same in every process
    reaches: tuple[str, ...]  # GPUs that this one can access directly
    versions: tuple[tuple[str, str], ...]
    heap_size: int
    free: int  # bytes
    overlap: bool  # may ranks share a GPU?


def facts(device: torch.device, heap_size: int) -> Facts:
    from .. import __version__

    own = device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    reached = [i for i in others if torch.cuda.can_device_access_peer(own, i)]
    versions = {"torch": torch.__version__, "triton": triton.__version__, "sundog": __version__}
    return Facts(
        platform.node(),
        os.getpid(),
        _name(own),
        tuple(_name(i) for i in reached),
        tuple(versions.items()),
        heap_size,
        torch.cuda.mem_get_info(own)[0],
        os.environ.get(_OVERLAP) == "1",
    )


def _name(index: int) -> str:
    known = torch.cuda.get_device_properties(index)
    return f"{known.name} {getattr(known, 'uuid', index)}"


def check(everyone: Sequence[Facts]) -> None:
    """Raise RankMismatch with a line for every bad pair, and for every GPU without the memory."""
    bad = [
        line for pair in combinations(range(len(everyone)), 2) for line in _pair(*pair, everyone)
    ]
    bad += _memory(everyone)
    if bad:
        raise RankMismatch(
            f"these {len(everyone)} ranks can't share memory:\n" + "\n".join(f"  {b}" for b in bad)
        )


def _pair(a: int, b: int, everyone: Sequence[Facts]) -> list[str]:
    mine, theirs = everyone[a], everyone[b]
    pair = f"ranks {a} and {b}"
    bad = []
    if mine.host != theirs.host:
        return [f"{pair}: on different machines, {mine.host} and {theirs.host}"]
    for (name, version), (_, other) in zip(mine.versions, theirs.versions, strict=True):
        if version != other:
            bad.append(f"{pair}: {name} {version} and {other}")
    if mine.heap_size != theirs.heap_size:
        bad.append(f"{pair}: heap_size {mine.heap_size:,} and {theirs.heap_size:,}")
    if mine.gpu == theirs.gpu:
        if not (mine.overlap and theirs.overlap):
            bad.append(f"{pair}: both on {mine.gpu}; to allow it set {_OVERLAP}=1 (docs/gpu.md)")
    elif theirs.gpu not in mine.reaches or mine.gpu not in theirs.reaches:
        bad.append(f"{pair}: no peer access between {mine.gpu} and {theirs.gpu}")
    return bad


def _memory(everyone: Sequence[Facts]) -> list[str]:
    bad = []
    for gpu in dict.fromkeys(each.gpu for each in everyone):
        ranks = [rank for rank, each in enumerate(everyone) if each.gpu == gpu]
        needed = sum(everyone[rank].heap_size for rank in ranks)
        free = min(everyone[rank].free for rank in ranks)
        if needed > free:
            names = ", ".join(map(str, ranks))
            bad.append(
                f"{gpu}: the heaps of rank {names} take {needed:,} bytes, and {free:,} are free"
            )
    return bad
