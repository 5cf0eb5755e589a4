"""`sundog.run` with a process per rank: fork, run, collect results and the first real error."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PeerLost, SundogError
from ..world.heap import Heap
from ..world.world import World
from ._codec import decode, encode
from ._hosts import left_early

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE = 5.0  # seconds that ranks get to end by themselves after one of them failed
OpenWorld = Callable[[int, int, Any], World]  # rank, size, store


def run(fn: Callable[[World], Any], world_size: int, open_world: OpenWorld) -> list[Any]:
    """Fork a process per rank (so `fn` may be a closure) and return the results by rank.

    Their store is a file without a name, so nothing of it stays, and it needs no socket. (torch's
    TCPStore asks the name server who is calling, and a slow one stalls the ranks for seconds.)
    """
    file = os.memfd_create("sundog-store")
    context = multiprocessing.get_context("fork")
    children, pipes = [], {}
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (fn, rank, world_size, f"/proc/self/fd/{file}", open_world, theirs)
        children.append(context.Process(target=_child, args=arguments, daemon=True))
        children[-1].start()
        theirs.close()
        pipes[ours] = rank
    answers: dict[int, Any] = {}
    try:
        _collect(pipes, answers)
    finally:
        for rank, child in enumerate(children):
            if rank in answers:
                child.join(_GRACE)
            child.kill()  # if it still runs: the run has failed, and it won't end by itself
            child.join()
        for pipe in pipes:
            pipe.close()
        os.close(file)
    codes = [child.exitcode for child in children]
    for child in children:
        child.close()
    return _results(answers, codes, world_size)


def _child(
    fn: Callable[[World], Any],
    rank: int,
    size: int,
    store: str,
    open_world: OpenWorld,
    pipe: Connection,
) -> None:
    answer: tuple[Any, BaseException | None, str]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # don't outlive the caller
    torch.set_num_threads(1)  # the parent's OpenMP threads do not survive the fork
    gc.freeze()  # nor does its CUDA, so do not collect here what the parent holds
    world = None
    try:
        world = open_world(rank, size, dist.FileStore(store))
        result = fn(world)
        world.close()
        answer = (result, None, "")
    except BaseException as error:
        if world is not None:
            world._backend.fail(error)  # so that the others can report what happened
        answer = (None, _picklable(error), traceback.format_exc())
    # Other than plain data goes by pickle, since the pipe is private to this process and its
    # parent. Not by torch's own reducer, whose shared memory ends with this process.
    try:
        data = encode(answer, "result", allow_pickle=True)
    except Exception as error:
        unsent = SundogError(f"the result of rank {rank} can't be sent to the caller: {error}")
        data = encode((None, unsent, ""), "result", allow_pickle=True)
    pipe.send_bytes(data)
    pipe.close()


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return SundogError(f"{type(error).__name__}: {error}")
    return error


def _collect(pipes: dict[Connection, int], answers: dict[int, Any]) -> None:
    """Collect what the ranks send: None from one that died, nothing from one that does not end."""
    waiting = dict(pipes)
    deadline = None
    while waiting:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        heard = wait(list(waiting), left)
        if not heard and left is not None:
            break
        for pipe in heard:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = decode(
                    pipe.recv_bytes(), f"the result of rank {rank}", allow_pickle=True
                )
            except (EOFError, OSError):
                answers[rank] = None  # it died before its answer, or in the middle of it
            if deadline is None and (answers[rank] is None or answers[rank][1] is not None):
                deadline = time.monotonic() + _GRACE


def _results(answers: dict[int, Any], codes: list[int | None], size: int) -> list[Any]:
    dead = [rank for rank, answer in sorted(answers.items()) if answer is None]
    errors = {r: a for r, a in sorted(answers.items()) if a is not None and a[1] is not None}
    causes = [r for r, answer in errors.items() if not isinstance(answer[1], PeerLost)]
    if dead:
        raise PeerLost(
            f"rank {dead[0]} of {size} died ({_how(codes[dead[0]])}). Other ranks: "
            + "; ".join(f"rank {r}: {answer[1]}" for r, answer in errors.items())
        )
    if errors:
        rank = causes[0] if causes else next(iter(errors))
        _, error, trace = errors[rank]
        if isinstance(error, SystemExit):
            raise left_early(error, rank, size)
        raise error from SundogError(f"raised on rank {rank} of {size}:\n{trace}")
    return [answers[rank][0] for rank in range(size)]


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"exit status {code}"


def opened(backend: Any, attach: Callable[[], None], heap_size: int) -> World:
    """Open the world of a rank that is a process: map its peers' heaps, or leave nothing."""
    try:
        attach()
        world = World(backend, tuple(range(backend.size)), "world", Heap(heap_size, backend.guard))
        world.barrier()
    except BaseException as error:
        backend.fail(error)
        backend.close()
        raise
    return world
