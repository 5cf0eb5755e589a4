"""torch.distributed for the ranks of a simulated world: groups, and collectives between hosts.

A collective waits for the work on its rank's streams and orders all ranks, as one of NCCL's does on
its stream. Its results are computed by torch in rank order, those of reduce_scatter in the order of
a ring. torch.ops.symm_mem.* and the functional collectives have CPU kernels by these collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from ..errors import CannotInterpret
from ..torch.process_group import SundogGroup
from ..world.backend import Exchange
from . import stream_kernels as kernels
from .patches import current

_ProcessGroup: Any = dist.ProcessGroup


class HostWorld:
    """The collectives that a group needs, by exchanging tensors between hosts."""

    def __init__(self, world: Any, ranks: tuple[int, ...], name: str) -> None:
        self._world, self._ranks, self._name = world, ranks, f"torch/{name}"
        self.rank, self.size = ranks.index(world.rank), len(ranks)

    def exchange(self, value: Any, what: str, kind: Exchange = Exchange.VALUES) -> list[Any]:
        backend = self._world._backend
        return list(backend.exchange(value, what, self._ranks, self._name, kind))

    def barrier(self) -> None:
        self._world.synchronize()
        self.exchange(None, "barrier", Exchange.BARRIER)

    def _everyone(self, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        self._world.synchronize()
        bits = x.contiguous().view(-1).view(torch.uint8).clone()
        shapes = self.exchange(bits, what, Exchange.BARRIER)
        return [each.view(x.dtype) for each in shapes]

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        parts = self._everyone(x, "all_reduce")
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = _combined(total, part.to(wide), op)
        if op == "avg":
            total = total / self.size
        return total.to(x.dtype)

    def reduce(self, x: torch.Tensor, root: int, op: str) -> torch.Tensor | None:
        total = self.all_reduce(x, op)
        return total if self.rank == root else None

    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce in the order of NCCL's ring, which rounds at every hop: the next rank is first."""
        parts = [part.chunk(self.size)[self.rank] for part in self._everyone(x, "reduce_scatter")]
        first, *rest = (parts[(self.rank + n + 1) % self.size] for n in range(self.size))
        total = first
        for part in rest:
            total = _combined(total, part, op)
        return total / self.size if op == "avg" else total

    def all_gather(self, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """Gather the parts; their sizes may differ, and are known without `splits`."""
        return torch.cat(self._everyone(x, "all_gather"))

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        return self._everyone(x, "broadcast")[root]

    def gather(self, x: torch.Tensor, root: int) -> torch.Tensor | None:
        whole = self.all_gather(x)
        return whole if self.rank == root else None

    def scatter(self, x: torch.Tensor | None, root: int, out: torch.Tensor) -> torch.Tensor:
        given = x if x is not None else torch.empty(0, dtype=out.dtype)
        return self._everyone(given, "scatter")[root].chunk(self.size)[self.rank]

    def all_to_all(
        self, x: torch.Tensor, in_splits: list[int] | None, out_splits: list[int] | None
    ) -> torch.Tensor:
        parts = self._everyone(x, "all_to_all")
        row = x[0].numel() if x.dim() and x.shape[0] else 1
        splits = self.exchange(in_splits or [x.shape[0] // self.size] * self.size, "splits")
        found = []
        for part, each in zip(parts, splits, strict=True):
            first = sum(each[: self.rank]) * row
            found.append(part[first : first + each[self.rank] * row])
        return torch.cat(found)


def _combined(a: torch.Tensor, b: torch.Tensor, op: str) -> torch.Tensor:
    if op in ("sum", "avg"):
        return a + b
    if op == "prod":
        return a * b
    return torch.minimum(a, b) if op == "min" else torch.maximum(a, b)


class SimulatedGroup(SundogGroup):
    """A process group of one rank: c10d calls it as it would call NCCL's."""

    def __init__(self, world: Any, ranks: Sequence[int], name: str) -> None:
        members = tuple(ranks)
        _ProcessGroup.__init__(self, members.index(world.rank), len(members))
        self._world: Any = HostWorld(world, members, name)
        self.ranks, self._name = members, name
        self._reported: set[str] = set()
        self._too_large: dict[str, int] = {}  # stays empty: nothing of it is on a heap
        self._device_type = "cpu"  # where every tensor of a rank is, whatever it says

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> Any:
        return self._name

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Exchange values between the hosts; it orders no memory."""
        return self._world.exchange(value, what)

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank={self._world.rank}, size={self._world.size})"

    def _fall_back(self, name: str, why: str, x: Any = None) -> Any:
        raise CannotInterpret(f"torch.distributed.{name} with {why} is not simulated: use a GPU")

    def shutdown(self) -> None:
        pass


class WorldState:
    """What c10d keeps of process groups, for one rank: the fields of its _World."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.pg_default_device: dict[Any, Any] = {}
        self.pg_config_info: list[Any] = []


# torch.ops.symm_mem, while ranks run


def _group(name: str) -> Any:
    return current().group_named(name)


def one_shot_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    result = input.clone()
    operator = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[reduce_op]
    dist.all_reduce(result, operator, group=_group(group_name))
    return result


def one_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    return out.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return input.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def multimem_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return two_shot_all_reduce_(input, reduce_op, group_name)


def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    whole = _gathered(A, gather_dim, group_name)
    return (whole if return_A else None), [whole @ B for B in Bs]


def _gathered(x: Tensor, dim: int, group_name: str) -> Tensor:
    group = _group(group_name)
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    total = one_shot_all_reduce(A @ B, reduce_op, group_name)
    group = _group(group_name)
    return total.chunk(group.size(), scatter_dim)[group.rank()].contiguous()


def get_remote_tensors(x: Tensor, group_name: str) -> list[Tensor]:
    handle: Any = symm_mem.rendezvous(x, _group(group_name))
    return [handle.get_remote_tensor(r, x.shape, x.dtype) for r in range(handle.world_size)]


# torch.distributed._functional_collectives: c10d resolves their groups in C++, by name


def all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return one_shot_all_reduce(input, reduce_op, group_name)


def all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return _gathered(input, 0, group_name)


def reduce_scatter_tensor(
    input: Tensor, reduce_op: str, group_size: int, group_name: str
) -> Tensor:
    total = one_shot_all_reduce(input, reduce_op, group_name)
    return total.chunk(group_size)[_group(group_name).rank()].clone()


def wait_tensor(tensor: Tensor) -> Tensor:
    return tensor


_FUNCTIONAL = (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, wait_tensor)
_KERNELS = (
    one_shot_all_reduce, one_shot_all_reduce_out, two_shot_all_reduce_, multimem_all_reduce_,
    fused_all_gather_matmul, fused_matmul_reduce_scatter, get_remote_tensors,
)  # fmt: skip


def write_value(rank: Any, input: Tensor, offset: int, val: int) -> Tensor:
    """Stand for torch.ops.symm_mem.stream_write_value32_: a signal, and no write of the host's."""
    rank.hold(input)
    with torch._C.DisableTorchFunction():
        address = input.data_ptr() + 4 * offset
    kernels.write_value[(1,)](address, val)
    return input


def register_kernels() -> list[Any]:
    """Register the kernels. Destroying the returned libraries takes them back."""
    libraries = []
    for name, theirs in (("symm_mem", _KERNELS), ("_c10d_functional", _FUNCTIONAL)):
        library: Any = torch.library.Library(name, "IMPL")
        for kernel in theirs:
            library.impl(kernel.__name__, torch.no_grad()(kernel), "CPU", allow_override=True)
        libraries.append(library)
    return libraries
