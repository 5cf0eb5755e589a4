"""A kernel of somebody else: how it is called, what was found, and what makes it clean."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Substitution:
    """One line of a file in a copy of their checkout, changed: the text `old` becomes `new`."""

    path: str
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.old}` becomes `{self.new}`"


@dataclass(frozen=True)
class Repair:
    """Why a finding is right by docs/memory_model.md, and the change that makes it go away."""

    rule: str
    why: str
    changes: tuple[Substitution, ...]


@dataclass(frozen=True)
class Case:
    """One kernel. `program` is called in every rank, as torchrun would, and compares its result."""

    kernel: str
    path: str  # of its file in the checkout
    program: Callable[[], Any]
    world: int = 4
    schedules: int = 6
    repairs: tuple[Repair, ...] = ()
    note: str = ""
    num_sms: int = 0  # programs that are resident at a time; 0: also fewer than the grid has
    kernels: int = 1  # of theirs that it runs, and that no case before it has run


def start(seed: int = 0) -> int:
    """Do what every program begins with; return the rank."""
    dist.init_process_group(os.environ.get("SUNDOG_PEERS_BACKEND", "nccl"))
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(seed + rank)
    return rank


def group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def checkout() -> str:
    """Return the folder of the checkout that is being run."""
    return os.environ["SUNDOG_PEERS_CHECKOUT"]


@functools.cache
def alone(path: str) -> ModuleType:
    """Load one file of the checkout, without the packages that it is in."""
    name = f"peer_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, os.path.join(checkout(), path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def repaired(path: str, package: str, case: Case) -> Iterator[str]:
    """Yield a copy of the checkout, as far as the case needs it, with its repairs made."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(path, package), Path(folder, package)
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        if not Path(folder, case.path).exists():  # a test, beside the package
            shutil.copytree(Path(path, case.path).parent, Path(folder, case.path).parent)
        for change in (change for repair in case.repairs for change in repair.changes):
            file = Path(folder, change.path)
            lines = file.read_text().splitlines(keepends=True)
            line = lines[change.line - 1]
            if change.old not in line:
                raise ValueError(f"{change}: the line is {line.strip()!r}: another commit?")
            lines[change.line - 1] = line.replace(change.old, change.new)
            file.write_text("".join(lines))
        yield folder
