"""A job of several processes that share a gloo group, as torchrun starts one."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["job"]


def job(fn: Callable[[int], Any], size: int, backend: str | None = "gloo") -> list[Any]:
    """Run `fn(rank)` in a process per rank and return the results; raise what one of them raised.

    `backend`: of the default group, which each process makes first; None: it makes none.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as file:
        started = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (fn, rank, size, f"{file.name}.store", backend, theirs)
            process = context.Process(target=_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        answers = [_answer(process, pipe) for process, pipe in started]
    failed = [text for _, text in answers if text]
    assert not failed, "\n".join(failed)
    return [result for result, _ in answers]


def _answer(process: Any, pipe: Any) -> tuple[Any, str]:
    try:
        answer: tuple[Any, str] = (
            pickle.loads(pipe.recv_bytes()) if pipe.poll(100) else (None, "no answer in 100 s")
        )
    except EOFError:
        answer = None, "a process died"
    process.join(5)
    process.kill()
    return answer


def _process(
    fn: Callable[[int], Any], rank: int, size: int, path: str, backend: str | None, pipe: Any
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(path, size)
        if backend is not None:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
            )
        # Not by pipe.send: torch's reducer would share memory that ends with this process.
        pipe.send_bytes(pickle.dumps((fn(rank), "")))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, f"rank {rank}:\n{traceback.format_exc()}")))
