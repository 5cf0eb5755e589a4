"""Triton litmus programs as kernels, run on the simulator under the checker."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sundog.tools.check.schedules import check_once

from .memory_model.triton_litmus import RESULTS, TritonLitmus, TritonOp

RANKS = 2
WORDS = 8  # of one litmus; a tile has two lanes
SLOTS = 16  # results of one program
HEAD = "import torch\nimport triton\nimport triton.language as tl\n"


@dataclass
class Seen:
    """What the simulator and the checker showed of one litmus over all schedules."""

    outcomes: set[tuple[int, ...]] = field(default_factory=set)
    racing: bool = False
    other: list[str] = field(default_factory=list)  # findings that are no races


def observe(batch: list[TritonLitmus], schedules: int) -> list[Seen]:
    """Run all litmus programs of a batch, one after the other, under many schedules."""
    text, owner = source(batch)
    found = [Seen() for _ in batch]
    with tempfile.TemporaryDirectory() as folder:
        main = load_main(Path(folder) / "litmus_batch.py", text)
        for number in range(schedules):
            token = f"random:{number}" if number % 2 else f"pct:{number}:3:{20}"
            report = check_once(main, RANKS, token)
            for finding in report.findings:
                assert finding.first is not None, finding
                seen = found[owner[finding.first.line]]
                seen.racing |= finding.kind == "race"
                if finding.kind != "race":
                    seen.other.append(str(finding))
            for i, litmus in enumerate(batch):
                found[i].outcomes.add(_results(litmus, i, report.results))
    return found


def _results(litmus: TritonLitmus, number: int, results: list[Any]) -> tuple[int, ...]:
    return tuple(
        int(results[program.rank][number, p, i])
        for p, program in enumerate(litmus)
        for i, op in enumerate(program.ops)
        if op.kind in RESULTS
    )


def load_main(path: Path, text: str) -> Callable[..., Any]:
    """Write a module there, import it, and return its `main`."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def source(batch: list[TritonLitmus]) -> tuple[str, dict[int, int]]:
    """Write a module with `main(world)`, and say which litmus each line belongs to."""
    lines, owner = HEAD.splitlines(), {}
    programs = max(len(litmus) for litmus in batch)
    for number, litmus in enumerate(batch):
        for rank in range(RANKS):
            for line in _kernel(number, litmus, rank, programs):
                lines.append(line)
                owner[len(lines)] = number
    lines += _main(len(batch), programs)
    return "\n".join(lines) + "\n", owner


def _main(count: int, programs: int) -> list[str]:
    calls = [
        f"    if world.rank == {rank}:\n        kernel_{number}_{rank}[({programs},)](m, out)\n"
        for number in range(count)
        for rank in range(RANKS)
    ]
    barriers = [
        call + ("    world.barrier()\n" if i % RANKS == RANKS - 1 else "")
        for i, call in enumerate(calls)
    ]
    return [
        "def main(world):",
        f"    mine = world.zeros(({count * WORDS},), torch.int32)",
        f"    out = torch.full(({count}, {programs}, {SLOTS}), -1, dtype=torch.int32)",
        "    world.barrier()",
        "    m = world.peer(mine, 0)",
        *"".join(barriers).splitlines(),
        "    return out",
    ]


def _kernel(number: int, litmus: TritonLitmus, rank: int, programs: int) -> Iterator[str]:
    yield "@triton.jit"
    yield f"def kernel_{number}_{rank}(m, out):"
    yield f"    m += {number * WORDS}"
    for p, program in enumerate(litmus):
        if program.rank == rank:
            yield f"    if tl.program_id(0) == {p}:"
            slot = (number * programs + p) * SLOTS
            yield from _body(program.ops, slot)


def _body(ops: tuple[TritonOp, ...], slot: int) -> Iterator[str]:
    indent = " " * 8
    for i, op in enumerate(ops):
        if op.kind == "guard":
            yield f"{indent}if r{op.of} == {op.value}:"
            indent += "    "
            continue
        call = _call(op)
        if op.kind in RESULTS:
            yield f"{indent}r{i} = {call}"
            value = f"tl.max(tl.where(tl.arange(0, 2) == 0, r{i}, -1), 0)" if op.tile else f"r{i}"
            yield f"{indent}tl.store(out + SLOT + {i}, {value})".replace("SLOT", str(slot))
        else:
            yield indent + call
    yield f"{indent}pass"


def _call(op: TritonOp) -> str:
    at = f"m + {2 * op.word}" + (" + tl.arange(0, 2)" if op.tile else "")
    if op.kind == "barrier":
        return "tl.debug_barrier()"
    if op.kind == "load":
        return f"tl.load({at})"
    if op.kind == "store":
        return f"tl.store({at}, {op.value})"
    order = f'sem="{op.sem}", scope="{op.scope}"'
    if op.name == "cas":
        return f"tl.atomic_cas({at}, 0, {op.value}, {order})"
    return f"tl.atomic_{op.name}({at}, {op.value}, {order})"
