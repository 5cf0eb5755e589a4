"""The files of a run: written as it goes, read to go on from them."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sundog.dataset.hardware import hardware, versions

from .compile_ahead import Binary, Cell
from .measure import Measured
from .subject import shape_kind

__all__ = ["Records", "occupancy", "read_ir", "read_lines"]

_CHUNK = 200  # texts of IR that are compressed together
_SMI = "clocks.sm,clocks.mem,temperature.gpu,power.draw"


class Records:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.known = {row["key"] for row in read_lines(folder / "rows.jsonl") if not row["repeat"]}
        self._seen = {line["id"] for line in read_ir(folder / "ir.xz")}
        self._rows = (folder / "rows.jsonl").open("a")
        self._binaries = (folder / "binaries.jsonl").open("a")
        self._texts: list[str] = []
        self._packer = ThreadPoolExecutor(1)  # compressing must not keep the GPU waiting

    def add_row(self, cell: Cell, measured: Measured, binary: str | None, key: str) -> None:
        task = cell.task
        nbytes, flops = task.work
        row = {
            "key": key, "kernel": cell.name, "family": task.subject.family, "dtype": cell.dtype,
            "task": task.id, "shape": cell.shape, "shape_kind": shape_kind(cell.shape),
            "config": cell.config, "repeat": cell.repeat, "control": cell.control,
            "binary": binary, "grid": task.grid(cell.config), "bytes": nbytes, "flops": flops,
            "trips": task.subject.trips(cell.shape, cell.config), **dataclasses.asdict(measured),
        }  # fmt: skip
        self._rows.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._rows.flush()

    def add_binary(self, key: str, cell: Cell, binary: Binary) -> None:
        line = {
            "binary": key, "kernel": cell.name, "dtype": cell.dtype,
            "fields": cell.task.compile_fields(cell.config), "shared": binary.shared,
            "compile_s": round(binary.seconds, 4), **binary.ir_ids,
        }  # fmt: skip
        self._binaries.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._binaries.flush()
        for stage, ir_id in binary.ir_ids.items():
            if ir_id not in self._seen:
                self._seen.add(ir_id)
                text = {
                    "id": ir_id,
                    "stage": stage,
                    "kernel": cell.name,
                    "text": binary.texts[stage],
                }
                self._texts.append(json.dumps(text))
        if len(self._texts) >= _CHUNK:
            self._pack()

    def _pack(self) -> None:
        texts, self._texts = self._texts, []
        self._packer.submit(_append_xz, self._folder / "ir.xz", texts)

    def watch_gpu(self) -> subprocess.Popen:
        """Note clocks, temperature and power five times a second, until it is terminated."""
        command = [
            "nvidia-smi",
            f"--query-gpu={_SMI}",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        def note() -> None:
            with (self._folder / "gpu.csv").open("a") as file:
                for line in watch.stdout or ():
                    file.write(f"{time.time():.2f}, {line}")
                    file.flush()

        threading.Thread(target=note, daemon=True).start()
        return watch

    def close(self, summary: dict[str, Any]) -> None:
        """Write what is left, and run.json: this uses CUDA, so it comes last."""
        if self._texts:
            self._pack()
        self._packer.shutdown()
        self._rows.close()
        self._binaries.close()
        about = {
            **summary, "ended": time.time(), "hardware": hardware(), "versions": versions(),
            "commit": os.environ.get("SUNDOG_COMMIT") or _commit(),
        }  # fmt: skip
        with (self._folder / "run.json").open("a") as file:  # a line per run of this folder
            file.write(json.dumps(about) + "\n")


def _append_xz(path: Path, texts: list[str]) -> None:
    with path.open("ab") as file:
        file.write(lzma.compress(("\n".join(texts) + "\n").encode(), preset=4))


def _commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file that may be missing, or end in the middle of a line."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_ir(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with lzma.open(path, "rt") as file:
        try:
            for line in file:
                yield json.loads(line)
        except (EOFError, lzma.LZMAError, json.JSONDecodeError):
            return  # a run that was killed while it wrote


def occupancy(registers: int, shared: int, num_warps: int) -> float:
    """Return the warps that an SM of sm_90 holds of this kernel, as a part of its 64."""
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = 65536 // (per_warp * num_warps)
    by_shared = (228 << 10) // (shared + 1024)  # the driver keeps 1 KiB of each program's
    programs = min(by_registers, by_shared, 64 // num_warps, 32)
    return programs * num_warps / 64
