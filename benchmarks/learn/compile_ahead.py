"""Compile a unit's binary in a process of its own, ahead of the measurements.

The process that measures gets the paths in Triton's cache and loads the binary from there; it does
not compute a cache key.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import triton

from sundog.dataset.triton.compile import gpu_target, source_of

from .kernels import SUBJECTS
from .subject import Config, Shape, Task, key_of

ARCH = "sm_90"
_INNER = r'(?:[^()"]|"[^"]*"'
_LOCATION = re.compile(rf" loc\({_INNER}|\({_INNER}|\({_INNER})*\))*\))*\)")  # three deep


@dataclass(frozen=True)
class Cell:
    """One row to be: a task and a config, in words that a pipe carries."""

    name: str
    dtype: str
    shape: Shape = field(hash=False)
    config: Config = field(hash=False)
    repeat: int = 0
    control: bool = False

    @property
    def task(self) -> Task:
        return Task(SUBJECTS[self.name], self.shape, self.dtype)


def cell_key(cell: Cell) -> str:
    return key_of(cell.name, cell.dtype, cell.shape, cell.config)


@dataclass(frozen=True)
class Binary:
    """What was compiled, and where it lies."""

    paths: dict[str, str]  # of Triton's cache
    hash: str
    seconds: float
    shared: int
    texts: dict[str, str]  # of ttir and ttgir, without locations

    @property
    def ir_ids(self) -> dict[str, str]:
        found = {stage: text.encode() for stage, text in self.texts.items()}
        return {stage: hashlib.sha256(text).hexdigest()[:20] for stage, text in found.items()}


def compiler(with_launcher: bool) -> Callable[[Cell], Binary]:
    """Return the function for a worker; on a GPU machine it also builds the launcher's C code."""
    os.nice(5)  # the process that measures must not wait for these

    def compile_cell(cell: Cell) -> Binary:
        begin = time.perf_counter()
        source, options = source_for(cell)
        made = triton.compile(source, target=gpu_target(ARCH), options=options)
        seconds = time.perf_counter() - begin
        if with_launcher:
            with suppress(Exception):  # then the process that measures builds it
                from triton.backends.nvidia.driver import CudaLauncher

                CudaLauncher(source, made.metadata)
        texts = {stage: plain_text(made.asm[stage]) for stage in ("ttir", "ttgir")}
        return Binary(made.metadata_group, made.hash, seconds, made.metadata.shared, texts)

    return compile_cell


def source_for(cell: Cell) -> tuple[Any, dict[str, Any]]:
    task = cell.task
    given = {**task.plain, **task.launch_fields(cell.config), **task.compile_fields(cell.config)}
    return source_of(task.subject.kernel, (), given, arch=ARCH)


def plain_text(text: str) -> str:
    """Return a module's text without its locations, which name files and lines."""
    lines = [_LOCATION.sub("", line) for line in text.splitlines() if not line.startswith("#loc")]
    return "\n".join(lines) + "\n"
