"""The process group "sundog": torch.distributed's collectives by sundog's kernels.

    import sundog.torch.process_group
    dist.init_process_group("sundog")            # or "cuda:sundog,cpu:gloo"

It opens a world over the processes of the group: on `symm` if there is a GPU, else on `shm`. Some
calls go to another group of the same processes, and the first of them says so: those for which
sundog has no kernel (a reduction by a bitwise operator, tensors on another device) or no room on
its heap. That group is NCCL for CUDA tensors where each rank has a GPU to itself, else gloo. torch
uses a group written in Python for all devices, so "cuda:sundog,cpu:gloo" is this group, with its
gloo for the CPU. A collective is complete, or ordered on the stream, when it returns, so the Work
of `async_op=True` has nothing to wait for.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import knobs
from ..backends import load
from ..collectives._reduce import DTYPES
from ..errors import OutOfHeap
from ..target import GPU_HEAP, has_gpu

_CPU_HEAP = 64 << 20
_OPERATORS = {
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max", dist.ReduceOp.PRODUCT: "prod", dist.ReduceOp.PREMUL_SUM: "sum",
}  # fmt: skip


# Any: their signatures differ between versions of torch.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist._Work
_number = itertools.count()  # of this process's groups


class Done(_Work):
    """A collective that is complete, or ordered on the current stream."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> Any:
        return self._future


def _done(work: Any, results: list[Tensor]) -> Done:
    """Wait for another group's collective: functional ones were seen to end early with its Work."""
    work.wait()
    return Done(results)


# gloo's names of these.
_GLOO_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def _where_it_fits(method: Callable[..., Any]) -> Callable[..., Any]:
    """Pass calls for other devices, or without room on the heap, to another group.

    Heaps are the same on all ranks, so all ranks find out together. Where a call needs room for the
    first tensor, its size is the same on all ranks.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(group: SundogGroup, *args: Any, **kwargs: Any) -> Any:
        x = next(_tensors(args), None)
        if x is None:
            return method(group, *args, **kwargs)
        is_dense = x.layout is torch.strided
        why = f"tensors on {x.device.type}" if is_dense else "sparse tensors"
        if is_dense and x.device.type == group._device_type:
            why = "what has no room on the heap; SUNDOG_HEAP_SIZE makes it larger"
            if x.nbytes < group._too_large.get(name, x.nbytes + 1):
                try:
                    return method(group, *args, **kwargs)
                except OutOfHeap:
                    group._too_large[name] = x.nbytes
        other = group._fall_back(name, why, x)
        given = [each for each in args if each is not None]  # left-out options
        return _done(other(*given, **kwargs), [x])

    return call


def _tensors(given: Any) -> Iterator[Tensor]:
    for each in given:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


class SundogGroup(_ProcessGroup):
    """One rank of the group. Collectives have the names that c10d calls, in torch 2.11 and 2.13."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        backend, nbytes = ("symm", GPU_HEAP) if has_gpu() else ("shm", _CPU_HEAP)
        nbytes = knobs.heap_size.get() or nbytes
        below = dist.PrefixStore("sundog", store)
        name = f"group {next(_number)}"  # its store is its own, so this is the first world in it
        world = load(backend).open_world(rank, size, below, nbytes, seconds, name)
        self._join(world, rank, size, world.device.type)
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, size, timeout
        )
        self._nccl: Any = None  # made for the first call that needs it
        self._store = store
        self._called = ""

    def _join(self, world: Any, rank: int, size: int, device_type: str) -> None:
        """Become a rank of the group: set what every collective reads."""
        super().__init__(rank, size)
        self._world = world
        self._device_type = device_type
        self._reported: set[str] = set()
        self._too_large: dict[str, int] = {}  # by collective: bytes that had no room

    def getBackendName(self) -> str:
        return "sundog"

    @property
    def world(self) -> Any:
        """The world of this group's ranks."""
        return self._world

    @property
    def pg_name(self) -> str:
        """Its name in c10d, which asks for it once more after it has dropped the group."""
        self._called = dist.distributed_c10d._world.pg_names.get(self, self._called)
        return self._called

    @property
    def group_name(self) -> Any:
        return self.pg_name

    def __repr__(self) -> str:
        return f"SundogGroup(rank={self._world.rank}, size={self._world.size})"

    # reductions

    @_where_it_fits
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = self._operator("allreduce", opts, tensors)
        if op is None:
            return _done(self._other(tensors[0])[0].allreduce(tensors, opts), tensors)
        for x in tensors:
            _put(x, self._world.all_reduce(_scaled(x, opts), op))
        return Done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        each = dist.AllreduceOptions()  # gloo takes no other
        if opts is not None:
            each.reduceOp = opts.reduceOp
        for x in tensors:
            self.allreduce([x], each).wait()
        return Done(tensors)

    @_where_it_fits
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        op = self._operator("reduce", opts, tensors)
        if op is None:
            return _done(self._other(tensors[0])[0].reduce(tensors, opts), tensors)
        for x in tensors:
            result = self._world.reduce(_scaled(x, opts), opts.rootRank, op)
            if result is not None:
                _put(x, result)
        return Done(tensors)

    @_where_it_fits
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        op = self._operator("reduce_scatter", opts, outputs)
        if op is None or any(len({p.shape for p in parts}) > 1 for parts in inputs):
            why = "parts of different sizes, or its operator"
            other = self._fall_back("reduce_scatter", why, outputs[0])
            return _done(other(outputs, inputs, opts), outputs)
        for out, parts in zip(outputs, inputs, strict=True):
            whole = torch.cat([_scaled(part, opts).view(-1) for part in parts])
            _put(out, self._world.reduce_scatter(whole, op))
        return Done(outputs)

    @_where_it_fits
    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        op = self._operator("reduce_scatter_single", opts, [x])
        if op is None:
            return self.reduce_scatter([out], [list(x.chunk(self._world.size))], opts)
        _put(out, self._world.reduce_scatter(_scaled(x, opts).view(-1), op))
        return Done([out])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for out, x in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(out, x, opts)
        return Done(outputs)

    # copies

    @_where_it_fits
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts, x in zip(outputs, inputs, strict=True):
            sizes = [out.numel() for out in parts]
            splits = sizes if len(set(sizes)) > 1 else None
            whole = self._world.all_gather(_flat(x).view(-1), splits=splits).split(sizes)
            for out, part in zip(parts, whole, strict=True):
                _put(out, part)
        return Done([out for parts in outputs for out in parts])

    @_where_it_fits
    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        _put(out, self._world.all_gather(_flat(x).view(-1)))
        return Done([out])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for out, x in zip(outputs, inputs, strict=True):
            self.all_gather_single(out, x, opts)
        return Done(outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    @_where_it_fits
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for x in tensors:
            _put(x, self._world.broadcast(_flat(x), opts.rootRank))
        return Done(tensors)

    @_where_it_fits
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        whole = self._world.gather(_flat(inputs[0]).view(-1), opts.rootRank)
        if whole is not None:
            for out, part in zip(outputs[0], whole.chunk(self._world.size), strict=True):
                _put(out, part)
        return Done([out for parts in outputs for out in parts])

    @_where_it_fits
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        out, x = torch.empty_like(_flat(outputs[0]).view(-1)), None
        if self._world.rank == opts.rootRank:
            x = torch.cat([_flat(part).view(-1) for part in inputs[0]])
        _put(outputs[0], self._world.scatter(x, opts.rootRank, out))
        return Done(outputs)

    @_where_it_fits
    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Any:
        x = _flat(x)
        even = [x.shape[0] // self._world.size] * self._world.size if x.dim() else None
        sent, received = (in_splits or even, out_splits or even)
        if not (in_splits or out_splits):
            sent = received = None
        result = self._world.all_to_all(x, in_splits=sent, out_splits=received)
        _put(out, result)
        return Done([out])

    @_where_it_fits
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        x = torch.cat([_flat(part).view(-1) for part in inputs])
        sent, received = [part.numel() for part in inputs], [out.numel() for out in outputs]
        parts = self._world.all_to_all(x, in_splits=sent, out_splits=received).split(received)
        for out, part in zip(outputs, parts, strict=True):
            _put(out, part)
        return Done(outputs)

    # the rest

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        call = self._fall_back("send", "messages with tags", tensors[0])
        return call(self._reachable(tensors), dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        call = self._fall_back("recv", "messages with tags", tensors[0])
        return self._received(tensors, lambda given: call(given, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        call = self._fall_back("recv_anysource", "messages of any rank", tensors[0])
        return self._received(tensors, lambda given: call(given, tag))

    def _reachable(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy CUDA tensors to host memory for gloo, which can't send them."""
        by_gloo = self._other(tensors[0])[1] == "gloo"
        return [x.cpu() if by_gloo and x.is_cuda else x for x in tensors]

    def _received(self, tensors: list[Tensor], receive: Callable[[list[Tensor]], Any]) -> Any:
        given = self._reachable(tensors)
        work = receive(given)
        if all(one is other for one, other in zip(tensors, given, strict=True)):
            return work
        work.wait()
        for x, each in zip(tensors, given, strict=True):
            _put(x, each)
        return Done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._world.barrier()
        return Done([])

    def shutdown(self) -> None:
        self._world.close()

    # c10d's names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _operator(self, name: str, opts: Any, tensors: list[Tensor]) -> str | None:
        """Return sundog's name for the reduction. If there is none, say so once and return None."""
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        op = next((op for kind, op in _OPERATORS.items() if asked == kind), None)
        bad = [x.dtype for x in tensors if x.dtype not in DTYPES]
        if op is None or bad or (op == "avg" and tensors[0].dtype == torch.bool):
            operator = getattr(asked, "op", asked)
            why = f"{str(operator).rpartition('.')[2]} of {tensors[0].dtype}"
            self._fall_back(name, why, tensors[0])
            return None
        return op

    def _fall_back(self, name: str, why: str, x: Tensor) -> Callable[..., Any]:
        group, called = self._other(x)
        if why not in self._reported:
            self._reported.add(why)
            if self._world.rank == 0:
                print(f"sundog: {name} goes to {called}: no kernel for {why}", file=sys.stderr)
        call: Callable[..., Any] = getattr(group, _GLOO_NAMES.get(name, name))
        return call

    def _other(self, x: Tensor) -> tuple[Any, str]:
        """Return the group for other calls, and its name. NCCL refuses two ranks on one GPU."""
        if not (x.is_cuda and self._world.owns_gpu and dist.is_nccl_available()):
            return self._gloo, "gloo"
        if self._nccl is None:
            kind: Any = dist.ProcessGroupNCCL
            store = dist.PrefixStore("nccl", self._store)
            self._nccl = kind(store, self._world.rank, self._world.size, kind.Options())
        return self._nccl, "nccl"


def _flat(x: Tensor) -> Tensor:
    """Return a contiguous tensor without a graph: c10d's collectives are not differentiable."""
    return x.detach().contiguous()


def _scaled(x: Tensor, opts: Any) -> Tensor:
    """Return what a reduction adds: for PREMUL_SUM, which FSDP2 asks for, x times its factor."""
    if opts is None or opts.reduceOp != dist.ReduceOp.PREMUL_SUM:
        return _flat(x)
    factor = opts.reduceOp.__getstate__()[1]  # the only way to it in Python
    return (_flat(x) * factor).to(x.dtype)


def _put(out: Tensor, result: Tensor) -> None:
    """Copy a result to where c10d wants it, like gloo, unseen by autograd.

    So the target may be a parameter, or a tensor whose views are still in use.
    """
    if out.numel() != result.numel() or out.dtype != result.dtype:
        raise ValueError(
            f"the result has {result.numel()} elements of {result.dtype}, and the tensor for it "
            f"has shape {tuple(out.shape)} and {out.dtype}: pass one that holds it"
        )
    out.data.copy_(result.view(out.shape))


def register() -> None:
    """Register the backend with torch.distributed. Importing this module does it."""
    if not hasattr(dist.Backend, "SUNDOG"):
        dist.Backend.register_backend("sundog", _make, devices=["cpu", "cuda"])


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SundogGroup:
    return SundogGroup(store, rank, size, timeout)


register()
