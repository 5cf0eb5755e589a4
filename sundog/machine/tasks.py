"""What runs on the machine: hosts (a rank's Python function) and programs (a kernel's CTAs)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .baton import Runner
from .torch_state import ProcessState


@dataclass(eq=False)
class Launch:
    """A kernel on a stream. Its programs become resident in order, as many as the GPU holds."""

    name: str
    function: Callable
    arguments: dict[str, Any]
    convert: Callable[[dict[str, Any]], dict[str, Any]]  # called once, when the first program runs
    grid: tuple[int, int, int]
    rank: int
    held: list[int]  # ordinary tensors that it may touch
    site: str
    num_warps: int = 4
    warp_size: int = 0  # as the first layout of a Gluon kernel says
    next: int = 0
    running: int = 0
    converted: dict[str, Any] | None = None
    kernel: Any = None  # what a compiler takes: the jit function
    options: dict[str, Any] = field(default_factory=dict)  # num_stages and the like
    version: tuple = ()  # which binary it needs
    known: dict[int, int] = field(default_factory=dict)  # what its host knows, for the checker
    begun: dict[int, int] = field(default_factory=dict)  # what came before it, for the checker

    @property
    def total(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def index(self, number: int) -> tuple[int, int, int]:
        x, rest = number % self.grid[0], number // self.grid[0]
        return x, rest % self.grid[1], rest // self.grid[1]

    def __str__(self) -> str:
        return f"{self.name}{list(self.grid)} launched at {self.site}"


@dataclass(eq=False)
class Event:
    """A point of a stream: complete once everything queued before it has finished."""

    rank: int
    passed: bool = False
    clock: dict[int, int] = field(default_factory=dict)  # what its stream knew then
    recording: Any = None  # the capture that it is part of


@dataclass(eq=False)
class Record:
    """In a queue: completes an event."""

    event: Event
    name: str = "an event"
    known: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Wait:
    """In a queue: lets what follows wait for an event of another stream."""

    event: Event
    name: str = "a wait for another stream"
    known: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Operation:
    """In a queue: a torch operation of a replayed graph."""

    name: str
    run: Callable[[Stream], None]
    known: dict[int, int] = field(default_factory=dict)


Entry = Launch | Operation | Record | Wait


@dataclass(eq=False)
class Stream:
    """Work of one rank, one after the other."""

    rank: int
    number: int = 0
    queue: deque[Entry] = field(default_factory=deque)
    waiters: list[Host] = field(default_factory=list)


@dataclass(eq=False)
class Host:
    rank: int
    runner: Runner
    stream: Stream  # the current stream
    state: ProcessState
    sight: Any  # of its torch operations: see `host_ops`
    attached: bool = False  # the code that called `init`, not one of our threads
    recording: Any = None  # the capture that it is in
    waits_for: str = ""
    site: tuple[str, int, str] = ("", 0, "")  # where it waits: file, line, function
    may_go_on: bool = False  # it waits only while others can run
    mail: Any = None  # what woke it
    on_drained: Callable[[], None] = lambda: None  # called when it may read what kernels wrote
    done: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class Poll:
    """A read that found the same value `count` times in a row."""

    addresses: np.ndarray
    size: int
    seen: bytes
    stack: list[tuple[str, int, str]]  # file, line, function; innermost first
    owes: int | None = None  # the rank that sundog's own wait names
    count: int = 1
    state: int = 0  # the program's state when it was last here, and how often it differed
    moves: int = 0


@dataclass(eq=False)
class Program:
    launch: Launch
    number: int
    index: tuple[int, int, int]
    coroutine: Any = None
    polls: dict[tuple, Poll] = field(default_factory=dict)  # since it last made progress
    met: set[tuple] = field(default_factory=set)  # reads since it last changed anything
    stuck: Poll | None = None  # the poll at which it was parked
    ticket: int = 0  # in the order of parking
    next_poll: tuple | None = None  # what it will poll in its next turn, see `rounds`
    site: tuple = ()  # of the access that it makes now, see `polling.site_of`
    comparison: tuple[str, np.ndarray] | None = None  # what the latest poll was compared with
    awaits_comparison: bool = False
    patience: int = 0  # polls until it is parked again
    expired: bool = False
    mask: np.ndarray | None = None  # the threads in a branch that only some take
    visited: set[Any] = field(default_factory=set)  # what it saw in its loops, see `deadlock`
    late: list[Any] = field(default_factory=list)  # what it began: done at its end or before
    errands: list[Any] = field(default_factory=list)  # of these, what it does not know to be done

    def visit(self, what: Any, most: int) -> None:
        if len(self.visited) == most:
            self.visited.clear()
        self.visited.add(what)

    @property
    def rank(self) -> int:
        return self.launch.rank

    def compared_with(self, sign: str, other: np.ndarray) -> None:
        """Note a comparison, which shows what a poll waits for."""
        if self.awaits_comparison:
            self.comparison = (sign, other)
            self.awaits_comparison = False

    def __str__(self) -> str:
        return f"rank {self.rank} program {self.index} of {self.launch.name}"


Task = Host | Program
