"""`sundog.run` with a process per rank: fork, run, collect results and the first real error."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerLost, SundogError
from ..world import World
from .wire import pack, unpack

__all__ = ["run"]

OpenWorld = Callable[[int, int, Any], World]  # rank, size, store


def run(fn: Callable[[World], Any], world_size: int, open_world: OpenWorld) -> list[Any]:
    """Fork a process per rank (so `fn` may be a closure) and return the results by rank.

    The store is served by this process, which is no rank: it outlives every one of them.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    children, pipes = [], {}
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (fn, rank, world_size, store.port, open_world, theirs)
        children.append(context.Process(target=_child, args=arguments, daemon=True))
        children[-1].start()
        theirs.close()
        pipes[ours] = rank
    answers = _collect(pipes)
    for child in children:
        child.join()
    return _results(answers, [child.exitcode for child in children])


def _child(
    fn: Callable[[World], Any],
    rank: int,
    size: int,
    port: int,
    open_world: OpenWorld,
    pipe: Connection,
) -> None:
    answer: tuple[Any, BaseException | None, str]
    torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
    try:
        store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
        world = open_world(rank, size, store)
        result = fn(world)
        world.close()
        answer = (result, None, "")
    except BaseException as error:
        answer = (None, _picklable(error), traceback.format_exc())
    # By plain pickle: torch's own reducer hands over shared memory that ends with this process.
    pipe.send_bytes(pack(answer))
    pipe.close()


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return SundogError(f"{type(error).__name__}: {error}")
    return error


def _collect(pipes: dict[Connection, int]) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    waiting = dict(pipes)
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = unpack(pipe.recv_bytes())
            except EOFError:
                answers[rank] = None  # it died without a word
    return answers


def _results(answers: dict[int, Any], codes: list[int | None]) -> list[Any]:
    dead = [rank for rank, answer in sorted(answers.items()) if answer is None]
    errors = {r: a for r, a in sorted(answers.items()) if a is not None and a[1] is not None}
    causes = [r for r, answer in errors.items() if not isinstance(answer[1], PeerLost)]
    if dead:
        raise PeerLost(
            f"rank {dead[0]} of {len(answers)} died ({_how(codes[dead[0]])}). Other ranks: "
            + "; ".join(f"rank {r}: {answer[1]}" for r, answer in errors.items())
        )
    if errors:
        rank = causes[0] if causes else next(iter(errors))
        _, error, trace = errors[rank]
        raise error from SundogError(f"raised on rank {rank} of {len(answers)}:\n{trace}")
    return [answers[rank][0] for rank in range(len(answers))]


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"exit status {code}"
