"""The files of a run: written as it goes, read to go on from them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
import os
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from sundog.dataset.hardware import hardware, versions
from sundog.dataset.shards import load

from .compile_ahead import Binary, Cell, cell_key
from .kernels import SUBJECTS
from .measure import Measured

_CHUNK = 600  # texts of IR that are compressed together
_ROWS = 4000  # rows, likewise
_SMI = "clocks.sm,clocks.mem,temperature.gpu,power.draw"


class Records:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.known = {cell_key(cell_of(row)) for row in read_rows(folder) if not row["repeat"]}
        self._seen = {line["id"] for line in read_xz(folder / "ir.xz")}
        self._rows = _open_to_append(folder / "rows.jsonl")
        self._binaries = _open_to_append(folder / "binaries.jsonl")
        self._texts: list[str] = []
        self._lines: list[str] = []
        self._moving: Future[None] | None = None
        self._packer = ThreadPoolExecutor(1)  # compressing must not keep the GPU waiting

    def add_row(self, cell: Cell, measured: Measured, binary: str | None) -> None:
        """Write what was chosen and measured; `pack` computes the rest from it."""
        row = {
            "kernel": cell.name, "dtype": cell.dtype, "shape": cell.shape, "config": cell.config,
            "repeat": cell.repeat, "control": cell.control, "binary": binary,
            **dataclasses.asdict(measured),
        }  # fmt: skip
        line = json.dumps(row, separators=(",", ":"))
        self._rows.write(line + "\n")
        self._rows.flush()
        self._lines.append(line)
        if len(self._lines) >= _ROWS:
            self._pack_rows()

    def _pack_rows(self) -> None:
        """Move the rows so far into rows.xz: a machine that is lent gives no large file back."""
        if self._moving is not None:
            self._moving.result()  # one at a time: 4,000 rows before this
        self._rows.close()
        moved, plain = self._folder / "rows.moving.jsonl", self._folder / "rows.jsonl"
        lines = [line for path in (moved, plain) for line in _texts_of(path)]
        moved.write_text("".join(f"{line}\n" for line in lines))
        self._rows = plain.open("w")
        self._lines = []
        self._moving = self._packer.submit(_move_xz, moved, self._folder / "rows.xz", lines)

    def add_binary(self, key: str, cell: Cell, binary: Binary) -> None:
        line = {
            "binary": key,
            "kernel": cell.name,
            "dtype": cell.dtype,
            "fields": cell.task.compile_fields(cell.config),
            "shared": binary.shared,
            "compile_s": round(binary.seconds, 4),
            **binary.ir_ids,
        }
        self._binaries.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._binaries.flush()
        for stage, ir_id in binary.ir_ids.items():
            if ir_id not in self._seen:
                self._seen.add(ir_id)
                about = {"id": ir_id, "stage": stage, "kernel": cell.name}
                self._texts.append(json.dumps({**about, "text": binary.texts[stage]}))
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
        self._pack_rows()
        self._packer.shutdown()
        self._rows.close()
        self._binaries.close()
        about = {
            **summary,
            "ended": time.time(),
            "hardware": hardware(),
            "versions": versions(),
            "commit": os.environ.get("SUNDOG_COMMIT") or _commit(),
        }
        with (self._folder / "run.json").open("a") as file:  # a line per run of this folder
            file.write(json.dumps(about) + "\n")


def _open_to_append(path: Path) -> TextIO:
    """Open a file, and end the line that a killed run left open."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    file = path.open("a")
    file.write("\n" if torn else "")
    return file


def _append_xz(path: Path, texts: list[str]) -> None:
    with path.open("ab") as file:
        file.write(lzma.compress(("\n".join(texts) + "\n").encode(), preset=4))


def _move_xz(moved: Path, path: Path, lines: list[str]) -> None:
    if lines:
        _append_xz(path, lines)
    moved.unlink()


def _texts_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or None


def cell_of(row: dict[str, Any]) -> Cell:
    """Return what a line of rows.jsonl measured."""
    return Cell(row["kernel"], row["dtype"], row["shape"], row["config"])


def known_rows(folder: Path) -> set[str]:
    """Return the keys of the cells that a dataset's shards have."""
    return {cell_key(cell) for cell in known_cells(folder, load(folder).tasks.status.unique())}


def known_cells(folder: Path, statuses: Collection[str] = ("ok",)) -> list[Cell]:
    """Return the cells that a dataset's shards have, of our kernels, that ended like this."""
    tasks = load(folder).tasks
    chosen = tasks[tasks.status.isin(list(statuses)) & tasks.kernel.isin(list(SUBJECTS))]
    rows = chosen[["kernel", "dtype", "shape", "config"]].to_dict("records")
    read = ({**row, **{n: json.loads(row[n]) for n in ("shape", "config")}} for row in rows)
    return [cell_of(row) for row in read]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file that may be missing, or end in the middle of a line."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run, each once: those that were moved, then those of the open file."""
    seen = set()
    packed = read_xz(folder / "rows.xz")
    plain = (read_lines(folder / name) for name in ("rows.moving.jsonl", "rows.jsonl"))
    for row in itertools.chain(packed, *plain):
        text = json.dumps(row, sort_keys=True)
        if text not in seen:  # a run that was killed while it moved them has them twice
            seen.add(text)
            yield row


def read_xz(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with lzma.open(path, "rt") as file:
        try:
            for line in file:
                yield json.loads(line)
        except (EOFError, lzma.LZMAError, json.JSONDecodeError):
            return  # a run that was killed while it wrote
