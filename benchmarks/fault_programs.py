"""Random programs with one fault each: what `benchmarks.faults` runs.

A program is a sequence of ops with random shapes, dtypes, groups, streams, captures and checks. All
ranks run it, except that one of them, at one step, does what its fault says. Everything follows
from a seed, so a case can be run again.

A fault strikes at an op in which every rank waits for every other. Where nobody waits (the leaf of
a broadcast that stays away), there is nothing to notice.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

TIMEOUT = 2.0  # seconds, of every wait
GRACE = 2.0  # seconds more until every other rank has named the fault
HEAP = 16 << 20
CONTROL = "none"
KINDS = {  # by backend; where ranks share a process, none of them can leave it alone
    "sim": ("raising", "absent", "wrong shape", "wrong op", "wrong order", "heap full",
            "heap differs", "capture misuse"),
    "shm": ("killed", "raising", "exits", "late", "absent", "wrong shape", "wrong op",
            "wrong order", "heap full", "heap differs", "capture misuse"),
}  # fmt: skip
KINDS |= {"virtual": (*KINDS["sim"], "late"), "symm": KINDS["shm"]}
MUTUAL = (
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "device_barrier",
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
)  # fmt: skip
ONE_WAY = ("broadcast", "reduce")
NUMELS = (1024, 4099)
ROWS = (16, 32)  # of A; the products are ROWS x 16 x 16
DTYPES = ("float32", "bfloat16")
_PRODUCT = 16
_CYCLES = 2e9  # a second of a GPU, or a little more than that
Note = Callable[..., None]  # note(event, **fields) survives the death of the rank


@dataclass(frozen=True)
class Step:
    op: str
    large: bool = False  # of two shapes
    dtype: str = "float32"
    in_group: bool = False
    stream: int = 0
    replays: int = 0  # of a graph, after an eager call
    check: str = ""  # what the host does after it: synchronize, item, barrier

    @property
    def is_fused(self) -> bool:
        return "matmul" in self.op


@dataclass(frozen=True)
class Case:
    number: int
    seed: int
    backend: str
    kind: str
    size: int  # ranks
    steps: tuple[Step, ...]
    rank: int = 0  # that has the fault
    step: int = 0  # at which it has it
    members: tuple[int, ...] = ()  # of the group
    ending: str = "with"  # how a script leaves its world: with, close, exit
    store_of_rank_0: bool = False  # else somebody outlives the ranks, as torchrun does
    together: bool = False  # do all ranks meet before the fault?
    choice: float = 0.0  # in [0, 1): the moment of a kill, the way of a misuse
    timeout: float = TIMEOUT


# making them


def make_case(number: int, seed: int, backend: str) -> Case:
    """Make the case with this number of a campaign; kinds take turns."""
    chance = random.Random(f"{seed}/{backend}/{number}")
    kinds = KINDS[backend]
    kind = kinds[number % len(kinds)]
    size = chance.choice((2, 3, 4, 8) if backend == "sim" else (2, 3, 4))
    size = min(size, 3) if backend == "symm" else size
    members = tuple(sorted(chance.sample(range(size), chance.randint(2, size))))
    palette = [_step(chance, backend) for _ in range(chance.randint(2, 4))]
    steps = [chance.choice(palette) for _ in range(chance.randint(3, 8))]
    place = chance.randrange(len(steps))
    steps[place : place + 1] = _struck(chance, backend, kind, steps[place])
    place += kind == "late" and backend == "virtual"  # the second of two equal calls
    if kind in ("absent", "wrong shape", "wrong op"):
        # A later call of the op would be taken for the one that is missing.
        steps[place + 1 :] = [each for each in steps[place + 1 :] if each.op != steps[place].op]
    if steps[place].in_group:  # who is not in the group needs the faulty rank too
        steps.append(Step("all_reduce", check="item"))
    rank = chance.choice(members if steps[place].in_group else range(size))
    case = Case(number, seed, backend, kind, size, tuple(steps), rank, place, members)
    ending = chance.choice(("with", "close", "exit"))
    case = replace(case, ending=ending, store_of_rank_0=chance.random() < 0.25)
    return replace(case, together=chance.random() < 0.5, choice=chance.random())


def control_cases(backend: str) -> list[Case]:
    """Make programs without a fault. Together they compile all kernels of a campaign."""
    cases: list[Case] = []
    for size in (2, 3) if backend == "symm" else (2, 3, 4):
        for op in MUTUAL + ONE_WAY:
            steps = [Step(op, large, dtype) for large in (False, True) for dtype in DTYPES]
            steps += [replace(each, check="item") for each in steps]
            number = -1 - len(cases)
            cases.append(Case(number, 0, backend, CONTROL, size, tuple(steps), timeout=60.0))
    return cases


def _step(chance: random.Random, backend: str) -> Step:
    op = chance.choice(MUTUAL + ONE_WAY)
    return Step(
        op,
        chance.random() < 0.5,
        chance.choice(DTYPES),
        in_group=chance.random() < 0.2,
        stream=int(chance.random() < 0.2),
        replays=chance.choice((0, 0, 0, 1, 3)),
        check=chance.choice(("", "synchronize", "item", "barrier")),
    )


def _struck(chance: random.Random, backend: str, kind: str, step: Step) -> list[Step]:
    """Return the step with the fault; where order is the fault, also the next one.

    A first call on `virtual` loads its kernel, and for that every rank waits until the GPU is idle.
    No rank is late then, so the fault comes at the same call again.
    """
    if step.op in ONE_WAY or (kind == "wrong shape" and step.op == "device_barrier"):
        step = replace(step, op=chance.choice([op for op in MUTUAL if op != "device_barrier"]))
    if kind == "heap differs":
        return [replace(step, check="barrier", in_group=False)]
    if kind == "late" and backend == "virtual":
        return [replace(step, check="", in_group=False, stream=0, replays=0)] * 2
    if kind == "wrong order":
        first = replace(step, check="", in_group=False, stream=0, replays=0)
        other = chance.choice([op for op in MUTUAL if op != first.op])
        return [first, replace(first, op=other, check=step.check)]
    return [step]


# running them


def run_rank(world: Any, case: Case, note: Note) -> None:
    """Run the program on one rank, with the fault if it is this rank's."""
    machine = _Rank(world, case)
    for number, step in enumerate(_steps_of(case, world.rank)):
        if number == case.step and case.kind != CONTROL:
            if case.together:
                world.barrier()
            if world.rank == case.rank:
                note("fault", at=time.monotonic())
                _FAULTS.get(case.kind, _nothing)(world, case)
        if step is not None:
            machine.do(step, number)
    if case.kind == "killed" and world.rank == case.rank:
        time.sleep(1)  # the signal is on its way


def _steps_of(case: Case, rank: int) -> list[Step | None]:
    steps: list[Step | None] = list(case.steps)
    place = case.step
    if rank != case.rank or case.kind == CONTROL:
        return steps
    step = case.steps[place]
    if case.kind == "absent":
        steps[place] = None
    elif case.kind == "wrong shape":
        steps[place] = replace(step, large=not step.large)
    elif case.kind == "wrong op":
        others = [op for op in MUTUAL if op != step.op]
        steps[place] = replace(step, op=others[int(case.choice * len(others))])
    elif case.kind == "wrong order":
        steps[place : place + 2] = steps[place + 1], steps[place]
    return steps


class _Rank:
    """One rank's worlds and tensors. The same step finds the same tensors again."""

    def __init__(self, world: Any, case: Case) -> None:
        self.world, self.case = world, case
        self.group = world.group(case.members, HEAP // 4) if case.members else None
        self.inputs: dict[Step, tuple] = {}
        self.graphs: list[Any] = []

    def do(self, step: Step, number: int) -> None:
        world = self.group if step.in_group else self.world
        if world is None:
            return  # not a member
        key = replace(step, stream=0, replays=0, check="")
        if key not in self.inputs:
            self.inputs[key] = _inputs(world, step)
        given = self.inputs[key]
        scale = float(1 << number % 3)  # other data than last time, so that what is old is wrong
        if given:
            given[0].fill_((world.rank + 1.0) * scale)
        before = world.record_event()
        with world.stream(step.stream) if step.stream else nullcontext():
            world.wait_event(before)
            out = _call(world, step.op, given)
            if step.replays:
                with world.capture() as graph:
                    out = _call(world, step.op, given)
                self.graphs.append(graph)
                for _ in range(step.replays):
                    graph.replay()
            after = world.record_event()
        world.wait_event(after)
        self._look(world, step, out, scale)

    def _look(self, world: Any, step: Step, out: Any, scale: float) -> None:
        if step.check == "synchronize":
            world.synchronize()
        elif step.check == "barrier":
            world.barrier()
        elif step.check == "item" and step.op in MUTUAL and out is not None:
            found, expected = out.float().sum().item(), scale * _total(world, step)
            if not abs(found - expected) <= 0.02 * expected:
                raise AssertionError(f"{step}: the sum is {found}, and {expected} is right")


def _inputs(world: Any, step: Step) -> tuple:
    """Make tensors that hold rank + 1 everywhere."""
    dtype = getattr(torch, step.dtype)

    def full(*shape: int, value: float = world.rank + 1.0) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=world.device)

    if step.op == "device_barrier":
        return ()
    if step.is_fused:
        rows = ROWS[step.large] * (world.size if step.op == "matmul_reduce_scatter" else 1)
        inner = _PRODUCT * (world.size if step.op == "all_gather_matmul" else 1)
        return full(rows, _PRODUCT), full(inner, _PRODUCT, value=1.0)
    parts = world.size if step.op in ("reduce_scatter", "all_to_all") else 1
    return (full(NUMELS[step.large] * parts),)


def _call(world: Any, op: str, given: tuple) -> Any:
    if op == "reduce":
        return world.reduce(*given, 0)
    return getattr(world, op)(*given)


def _total(world: Any, step: Step) -> float:
    ranks = world.size * (world.size + 1) / 2
    if step.is_fused:
        return ROWS[step.large] * _PRODUCT * _PRODUCT * ranks
    return NUMELS[step.large] * ranks


# faults


def _nothing(world: Any, case: Case) -> None:
    """Do nothing here: the fault is in the step itself."""


def _raise(world: Any, case: Case) -> None:
    raise RuntimeError("injected fault: this rank raises")


def _exit(world: Any, case: Case) -> None:
    sys.exit(3)


def _kill(world: Any, case: Case) -> None:
    """Kill this process now, or in the middle of what comes next."""
    if case.choice < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    moment = 0.1 * (case.choice - 0.5)
    threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _sleep(world: Any, case: Case) -> None:
    """Be late by more than the timeout. Ranks that share a host are late on the GPU."""
    if case.backend == "virtual":
        faulthandler.dump_traceback_later(case.timeout + GRACE - 0.2)  # who is not in time, and why
        torch.cuda._sleep(int(2.5 * case.timeout * _CYCLES))
    else:
        time.sleep(2.5 * case.timeout)


def _fill_heap(world: Any, case: Case) -> None:
    for _ in range(64):
        world.empty((HEAP // 16,), torch.uint8)
    raise AssertionError("four times the heap was allocated from it")


def _allocate(world: Any, case: Case) -> None:
    world.empty((100,))


def _misuse_capture(world: Any, case: Case) -> None:
    x = torch.ones(77, device=world.device)
    misuses: tuple[Callable[[], Any], ...] = (
        world.barrier,
        world.synchronize,
        lambda: world.empty((8,)),
        lambda: world.all_gather(x),
        lambda: x.sum().item(),
        lambda: world.exchange(1),
    )
    with world.capture():
        misuses[int(case.choice * len(misuses))]()
    raise AssertionError("the capture held what no graph can")


_FAULTS: dict[str, Callable[[Any, Case], None]] = {
    "raising": _raise, "exits": _exit, "killed": _kill, "late": _sleep, "heap full": _fill_heap,
    "heap differs": _allocate, "capture misuse": _misuse_capture,
}  # fmt: skip
