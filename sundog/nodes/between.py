"""Transfers between ranks with the same number on different machines, by a group of torch's.

A transfer is started, and waited for later, so that kernels run meanwhile. Tensors travel as bytes,
so every dtype can. With NCCL a transfer is ordered on streams, and the host waits for it only where
it must know that the transfer has ended. With gloo the host always waits; a GPU's tensors go
through host memory. A host that waits looks at the clock meanwhile, and whether another rank has
reported a loss.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SundogError
from ..machine.baton import RunnerThread

_LONGEST_NAP = 1e-3  # seconds
# gloo's all_gather goes round a ring, in two messages a step; its all_to_all sends one to each
# machine. A message costs about 450 bytes beside its data, which count up to this length.
_SMALL = 1 << 16  # bytes
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13


class NetworkFailure(SundogError):
    """A transfer failed, or did not end in time. A roll call finds out which rank caused it."""


@dataclass(frozen=True)
class Transfer:
    """Bytes on their way. `wait` and `wait_on_host` return what arrives."""

    works: list[Any]
    kept: tuple[torch.Tensor, ...]  # memory that is in use until then
    result: Callable[[], torch.Tensor]
    between: Between

    def wait(self) -> torch.Tensor:
        """Let what is launched from here on find the bytes; with NCCL the host goes on at once."""
        self.between.wait(self.works)
        return self.result()

    def wait_on_host(self) -> torch.Tensor:
        """Hold up the host until the bytes are here, whatever carries them."""
        self.between.wait(self.works, on_host=True)
        return self.result()


def backend_for(group: Any, device: torch.device) -> str:
    """Name what carries this device's tensors in a group, also one made with no backend's name.

    torch calls that group's backend "undefined"; its config says "cpu:gloo,cuda:nccl".
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pairs).get(device.type, "none")


def _reason(error: RuntimeError) -> str:
    """Return gloo's message, without its source file and its advice."""
    text = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0])
    return text.partition(". This is typically")[0]


class _WaitedFor:
    """A send or receive of gloo's, which reports its completion only to those who wait for it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: RuntimeError | None = None
        self._thread = RunnerThread(target=self._wait, daemon=True)  # reads no tensor
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class Between:
    """This rank's part in the group of its counterparts. Tensors are in the order of machines."""

    def __init__(
        self, group: Any, device: torch.device, limit: float, settle: Callable[[], None],
        is_lost: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Bound a transfer by `limit` seconds. `settle` waits for what this rank launched."""
        self.group = group
        self.node: int = group.rank()
        self.count: int = group.size()
        self.backend: str = dist.get_backend(group)
        self.is_ordered = self.backend == "nccl"  # on streams, so a graph can hold it
        self._limit, self._settle, self._is_lost = limit, settle, is_lost
        self._travels_on = device if self.is_ordered else torch.device("cpu")
        self._under_way: list[Any] = []  # works on streams that nobody has seen end

    # what is sent

    def all_to_all(self, parts: torch.Tensor) -> Transfer:
        """Send part n of the first dimension to machine n. Return what each machine sent here."""
        sent = self._bytes(parts)
        got = torch.empty_like(sent)
        works = [self._started(dist.all_to_all_single, got, sent, async_op=True)]
        return self._transfer(works, parts, sent, got, parts.shape)

    def all_to_all_uneven(
        self, x: torch.Tensor, in_splits: list[int], out_splits: list[int]
    ) -> Transfer:
        """Exchange parts as torch's all_to_all_single does with splits, which count elements."""
        sent, item = self._bytes(x), x.element_size()
        got = torch.empty(sum(out_splits) * item, dtype=torch.uint8, device=sent.device)
        received, given = ([item * n for n in splits] for splits in (out_splits, in_splits))
        works = [self._started(dist.all_to_all_single, got, sent, received, given, async_op=True)]
        return self._transfer(works, x, sent, got, (sum(out_splits),))

    def all_gather(self, x: torch.Tensor) -> Transfer:
        """Return every machine's tensor, one after the other."""
        sent, call = self._bytes(x), _all_gather
        got = sent.new_empty(self.count * sent.numel())
        if not self.is_ordered and sent.numel() <= _SMALL:
            sent, call = sent.repeat(self.count), dist.all_to_all_single
        works = [self._started(call, got, sent, async_op=True)]
        return self._transfer(works, x, sent, got, (self.count, *x.shape))

    def broadcast(self, x: torch.Tensor, src: int) -> Transfer:
        """Return machine src's tensor."""
        sent = self._bytes(x)
        if src != self.node and sent.data_ptr() == x.data_ptr():
            sent = torch.empty_like(sent)  # x itself is only read
        works = [self._started(dist.broadcast, sent, group_src=src, async_op=True)]
        return self._transfer(works, x, sent, sent, x.shape)

    def send(self, x: torch.Tensor, dst: int) -> Transfer:
        sent = self._bytes(x)
        works = [self._point_to_point(self._started(dist.isend, sent, group_dst=dst))]
        return self._transfer(works, x, sent, sent, x.shape)

    def receive(self, like: torch.Tensor, src: int) -> Transfer:
        """Return what machine src sends, of the shape and dtype of `like`."""
        got = torch.empty(
            like.numel() * like.element_size(), dtype=torch.uint8, device=self._travels_on
        )
        works = [self._point_to_point(self._started(dist.irecv, got, group_src=src))]
        return self._transfer(works, like, got, got, like.shape)

    def _started(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start a transfer. A group with a broken connection refuses it at once."""
        try:
            return call(*args, group=self.group, **kwargs)
        except RuntimeError as error:
            raise NetworkFailure(_reason(error)) from None

    def _point_to_point(self, work: Any) -> Any:
        return work if self.is_ordered else _WaitedFor(work)

    def _bytes(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ordered:
            self._settle()  # gloo reads memory without waiting for what still writes it
        # One element counts as contiguous with any stride, and then has no view as bytes.
        flat = x.detach().contiguous().as_strided((x.numel(),), (1,))
        return flat.view(torch.uint8).to(self._travels_on)

    def _transfer(
        self, works: list[Any], like: torch.Tensor, sent: torch.Tensor, got: torch.Tensor,
        shape: tuple[int, ...],
    ) -> Transfer:  # fmt: skip
        dtype, device = like.dtype, like.device
        if self.is_ordered and not self._is_capturing():
            self._under_way = [work for work in self._under_way if not work.is_completed()] + works
        return Transfer(works, (sent, got), lambda: got.view(dtype).view(shape).to(device), self)

    def _is_capturing(self) -> bool:
        """Return whether a graph takes what is launched now, whose end nobody can ask for."""
        return self._travels_on.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # waiting

    def wait(self, works: list[Any], on_host: bool = False) -> None:
        """Wait until all have ended. Raise NetworkFailure if one failed or a rank was lost."""
        holds_up = on_host or not self.is_ordered
        deadline, nap = time.monotonic() + self._limit, 1e-5
        for work in works:
            while holds_up and not work.is_completed():
                if self._is_lost():
                    raise NetworkFailure("another rank was lost")
                if time.monotonic() > deadline:
                    raise NetworkFailure(f"a transfer did not end within {self._limit:g} s")
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
            try:
                work.wait()  # of NCCL: orders streams; raises if it failed
            except RuntimeError as error:
                raise NetworkFailure(_reason(error)) from None

    def wait_for_all(self) -> None:
        """Hold up the host until every transfer has ended, those of graphs excepted.

        Who waits for a stream instead waits for ever if a machine has vanished.
        """
        for work in self._under_way:  # each has the limit for itself: kernels ran between them
            self.wait([work], on_host=True)
        self._under_way = []
