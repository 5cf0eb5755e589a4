"""PTX litmus tests written for Alloy, from goens/compound-axiomatic-alloy.

A file names reads, writes and fences, their order in threads, addresses, scopes and the reads-from
that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..memory_model.executions import outcomes
from ..memory_model.litmus import (
    Fence,
    Instruction,
    Jump,
    Litmus,
    Place,
    Read,
    Thread,
    Write,
)
from .verdicts import Case

EXPECTED = {"✓": "allowed", "𐄂": "forbidden"}
SEMS = {"Acquire": "acquire", "Release": "release", "FenceSC": "sc", "FenceAcqRel": "acq_rel",
        "FenceAcq": "acquire", "FenceRel": "release"}  # fmt: skip


def cases(checkout: Path) -> Iterator[Case]:
    """Yield every PTX case of a checkout that says what it expects."""
    for path in sorted((checkout / "generated_litmus" / "PTX").glob("*.als")):
        text = path.read_text()
        mark = re.search(r"// Expected: (.)", text)
        if mark is not None and mark[1] in EXPECTED:
            yield Case("PTX in Alloy", path.name, EXPECTED[mark[1]], partial(_find, text))


def _find(text: str) -> str:
    litmus, seen = _read(text)
    found = any(
        seen.items() <= {k: v for each in ending.registers for k, v in each.items()}.items()
        for ending in outcomes(litmus)
    )
    return "allowed" if found else "forbidden"


def _read(text: str) -> tuple[Litmus, dict[str, int]]:
    """Read a file: the program, and what its reads must see. Each write has its own value."""
    kinds = dict(re.findall(r"(\w+) : ptx/(\w+)", text))
    after = dict(re.findall(r"(\w+)\.po = (\w+)", text))
    starts = re.findall(r"(t\d+)\.start = (\w+)", text)
    address = _addresses(text, kinds)
    depends = dict(re.findall(r"(\w+)\.dep = (\w+)", text))
    writes = {name: i + 1 for i, name in enumerate(n for n in kinds if n.startswith("w"))}
    orders = {thread: list(_chain(start, after)) for thread, start in starts}
    ctas, scopes = _scopes(text, orders)
    threads = [
        Thread(tuple(_code(order, kinds, address, scopes, writes, depends)), Place(ctas[thread], 0))
        for thread, order in orders.items()
    ]
    seen = {read: writes[write] for read, write in re.findall(r"(r\d+) in (w\d+)\.rf", text)}
    seen |= dict.fromkeys(re.findall(r"no (r\d+)\.~rf", text), 0)
    return Litmus(tuple(threads)), seen


def _chain(name: str | None, after: dict[str, str]) -> Iterator[str]:
    while name:
        yield name
        name = after.get(name)


def _addresses(text: str, kinds: dict[str, str]) -> dict[str, str]:
    """Give the accesses that must have one address the same name."""
    found = {name: name for name in kinds}
    for a, b in re.findall(r"(\w+)\.address = (\w+)\.address", text):
        old, new = found[b], found[a]
        found = {name: new if at == old else at for name, at in found.items()}
    return found


def _scopes(text: str, orders: dict[str, list[str]]) -> tuple[dict[str, int], dict[str, str]]:
    """Make CTAs of the sets of threads that scopes name; the others are CTAs of their own."""
    ctas = {thread: i for i, thread in enumerate(orders)}
    scopes = dict.fromkeys(re.findall(r"(\w+)\.scope = System", text), "sys")
    inside: dict[str, set[str]] = {}
    for thread, name in re.findall(r"(t\d+) in (\w+)\.scope\.\*subscope", text):
        inside.setdefault(name, set()).add(thread)
    for name, members in inside.items():
        scopes[name] = "cta"
        first = min(ctas[thread] for thread in members)
        ctas |= dict.fromkeys(members, first)
    for name, members in inside.items():
        some = ctas[min(members)]
        if {thread for thread, cta in ctas.items() if cta == some} != members:
            raise ValueError(f"the scope of {name} is not a CTA of the others")
    return ctas, scopes


def _code(
    order: list[str],
    kinds: dict[str, str],
    address: dict[str, str],
    scopes: dict[str, str],
    writes: dict[str, int],
    depends: dict[str, str],
) -> Iterator[Instruction]:
    """Write one thread; a dependency becomes a jump to the next instruction."""
    length = 0
    for name in order:
        kind, scope = kinds[name], scopes.get(name, "sys")
        if kind.startswith("Fence"):
            yield Fence(SEMS[kind], scope)
        elif name.startswith("w"):
            yield Write(address[name], writes[name], SEMS.get(kind, "relaxed"), scope)
        else:
            yield Read(name, address[name], SEMS.get(kind, "relaxed"), scope)
        length += 1
        if name in depends:
            length += 1
            yield Jump(length, name)
