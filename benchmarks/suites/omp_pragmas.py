"""OpenMP in a program in C: who of the two threads does what, and where they wait for each other.

Both threads walk all statements, so that they agree on the words in which they wait. The first
thread runs what one thread may run, and the second its tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .places import Place

if TYPE_CHECKING:
    from .c_programs import Statement
    from .shmem_threads import Walker

THREADS = 2
Pragma = Callable[["Walker", int, list[str], Any], None]


@contextmanager
def _only(walker: Walker, is_active: bool) -> Iterator[None]:
    before, walker.is_active = walker.is_active, is_active
    yield
    walker.is_active = before


def _word(walker: Walker, what: str, line: int) -> Place:
    """Return a word for this visit of a line: both threads come here equally often."""
    walker.visits[what, line] += 1
    return Place(walker.slots.named(f"{what}_{line}_{walker.visits[what, line]}"), 0, 8)


def _parallel(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    begin, end = _word(walker, "begin", line), _word(walker, "end", line)
    is_first = walker.thread == 0
    with _only(walker, True):
        walker.emit(line, f"tell({begin})" if is_first else f"hear({begin}, 1)")
        walker.in_parallel = True
        walker.walk(body)
        walker.in_parallel = False
        walker.emit(line, f"hear({end}, 1)" if is_first else f"tell({end})")


def _barrier(walker: Walker, line: int, words: list[str], body: None) -> None:
    walker.emit(line, f"meet({_word(walker, 'meet', line)}, {THREADS})")


def _for(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    name, end, inside = body.parts
    turn = _word(walker, "turn", line)
    for number in range(walker.value(line, end)):
        with _only(walker, walker.is_active and number % THREADS == walker.thread):
            if "ordered" in words and number:
                walker.emit(line, f"hear({turn}, {number})")
            walker.iterate(name, number, inside)
            if "ordered" in words:
                walker.emit(line, f"tell({turn})")
    _barrier(walker, line, [], None)


def _ordered(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    walker.walk(body)  # the loop waits for its turn


def _master(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    with _only(walker, walker.is_active and walker.thread == 0):
        walker.walk(body)


def _single(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    _master(walker, line, words, body)
    if "nowait" not in words:
        _barrier(walker, line, [], None)


def _sections(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    for number, section in enumerate(body.parts):
        with _only(walker, walker.is_active and number % THREADS == walker.thread):
            walker.walk(section.parts[1])
    _barrier(walker, line, [], None)


def _task(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    begin, walker.task = _word(walker, "task", line), _word(walker, "done", line)
    walker.emit(line, f"tell({begin})")
    with _only(walker, walker.thread == 1):
        walker.emit(line, f"hear({begin}, 1)")
        walker.walk(body)
        walker.emit(line, f"tell({walker.task})")


def _taskwait(walker: Walker, line: int, words: list[str], body: None) -> None:
    walker.emit(line, f"hear({walker.task}, 1)")


def _atomic(walker: Walker, line: int, words: list[str], body: Statement) -> None:
    if words == ["read"]:
        left, right = body.parts
        walker.find(left[1]).value = walker.place(right)
    else:
        place = walker.place(body.parts[0][1])
        walker.emit(body.line, f'tl.atomic_add({place}, 1, sem="relaxed", scope="gpu")')


PRAGMAS: dict[str, Pragma] = {
    "parallel": _parallel, "barrier": _barrier, "for": _for, "ordered": _ordered,
    "master": _master, "single": _single, "sections": _sections, "task": _task,
    "taskwait": _taskwait, "atomic": _atomic,
}  # fmt: skip
