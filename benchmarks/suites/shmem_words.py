"""Write one call of OpenSHMEM as a line of a kernel: see `shmem_calls` for what the line calls."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .places import Place, Variable

if TYPE_CHECKING:
    from .shmem_threads import Walker

WIDTHS = {"int": 4, "float": 4, "": 4, "long": 8, "double": 8, "uint64": 8}
NOTHING = "pass"


def shmem_call(
    walker: Walker, line: int, name: str, values: list[Any], into: Place | None = None
) -> str:
    """Return the line; `into` is what the result is assigned to."""
    found = re.fullmatch(r"shmem_(ctx_)?(?:(int|long|float|double|uint64)_)?(\w+)", name)
    assert found is not None, name
    context = values.pop(0) if found[1] and found[3] not in ("create", "destroy", "quiet") else 0
    width, op = WIDTHS[found[2] or ""], found[3]
    nbi = op.endswith("_nbi")
    if f"{found[1] or ''}{op}" in CALLS:
        return CALLS[f"{found[1] or ''}{op}"](walker, line, values)
    if op.startswith("atomic_"):
        return _atomic(op.removeprefix("atomic_").removesuffix("_nbi"), width, values, into, nbi)
    return _transfer(op.removesuffix("_nbi"), width, values, into, nbi, context)


def _transfer(
    op: str, width: int, values: list[Any], into: Place | None, nbi: bool, context: int
) -> str:
    if op == "put":
        to, source, count, pe = values
        return f"put({to}, {source}, {count * width}, {pe}, {nbi}, {context})"
    if op == "get":
        to, source, count, pe = values
        return f"get({to}, {source}, {count * width}, {pe}, {nbi})"
    if op in ("iput", "iget"):
        to, source, _, _, count, pe = values
        return _transfer(op[1:], width, [to, source, count, pe], into, nbi, context)
    if op == "g":
        return f"get({into}, {values[0]}, {width}, {values[1]}, False)"
    if op == "p":
        to, value, pe = values
        return f"tl.store(sent, {value})\nput({to}, sent, {width}, {pe}, False, {context})"
    if op == "put_signal":
        to, source, count, word, value, how, pe = values
        return f"put_signal({to}, {source}, {count * width}, {word}, {value}, {how}, {pe}, {nbi})"
    raise ValueError(f"shmem_{op}: not a call that is written here")


def _atomic(op: str, width: int, values: list[Any], into: Place | None, nbi: bool) -> str:
    """Write an atomic: into what it is fetched, on which word, what it writes and compares with."""
    target = values.pop(0) if nbi else into
    word, *rest, pe = values
    word = Place(word.slot, word.offset, width)  # as wide as the call says
    value, compare = 1, 0
    if op == "compare_swap":
        compare, value = rest
    elif rest:
        value = rest[0]
    name = "add" if op in ("inc", "fetch_inc", "fetch_add", "add") else op
    return f'atomic("{name}", {target}, {word}, {value}, {compare}, {pe}, {nbi})'


def _make_context(walker: Walker, line: int, values: list[Any]) -> str:
    walker.contexts += 1
    values[-1].value = walker.contexts
    return NOTHING


def _split_team(walker: Walker, line: int, values: list[Any]) -> str:
    _, first, stride, size, *_, team = values
    assert isinstance(team, Variable)
    is_member = walker.process in range(first, first + stride * size, stride)
    team.value = (
        (first, stride, size) if is_member else walker.value(line, ("name", "SHMEM_TEAM_INVALID"))
    )
    return NOTHING


def _meet_team(walker: Walker, line: int, values: list[Any]) -> str:
    first, stride, size = values[0]
    word = Place(walker.slots.named(f"team_{line}"), 0, 8)
    return f"meet_team({word}, 1, {first}, {stride}, {size})"


def _reduce(walker: Walker, line: int, values: list[Any]) -> str:
    _, to, source, _ = values
    parts = Place(walker.slots.named(f"parts_{line}", walker.size), 0, 8)
    return f"reduce({to}, {source}, {parts}, {walker.size})"


def _plain(text: str) -> Any:
    return lambda walker, line, values: text


CALLS = {
    **{name: _plain(NOTHING) for name in ("init", "finalize", "global_exit", "team_destroy")},
    "barrier_all": _plain("barrier_all()"),
    "sync_all": _plain("sync_all()"),
    "sync": _plain("sync_all()"),
    "fence": _plain("fence()"),
    "quiet": _plain("quiet(0)"),
    "ctx_quiet": lambda walker, line, values: f"quiet({values[0]})",
    "ctx_destroy": lambda walker, line, values: f"quiet({values[0]})",
    "ctx_create": _make_context,
    "team_create_ctx": _make_context,
    "team_split_strided": _split_team,
    "team_sync": _meet_team,
    "sum_reduce": _reduce,
    "set_lock": lambda walker, line, values: f"set_lock({values[0]})",
    "clear_lock": lambda walker, line, values: f"clear_lock({values[0]})",
    "wait_until": lambda walker, line, values: "wait_until({}, {}, {})".format(*values),
}
