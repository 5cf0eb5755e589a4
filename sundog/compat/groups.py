"""torch.distributed for the ranks of a simulated world: groups, and collectives between hosts.

A collective waits for the work on its rank's streams and orders all ranks, as NCCL's do on a
stream. torch computes its results in rank order, those of reduce_scatter in the order of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CannotInterpret
from ..torch.process_group import SundogGroup
from ..world.backend import Exchange


class HostWorld:
    """The collectives that a group needs, by exchanges of tensors between hosts."""

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
        """Reduce in the order of NCCL's ring: from the next rank on, rounding at every hop."""
        parts = [part.chunk(self.size)[self.rank] for part in self._everyone(x, "reduce_scatter")]
        first, *rest = (parts[(self.rank + n + 1) % self.size] for n in range(self.size))
        total = first
        for part in rest:
            total = _combined(total, part, op)
        return total / self.size if op == "avg" else total

    def all_gather(self, x: torch.Tensor, splits: Sequence[int] | None = None) -> torch.Tensor:
        """Gather the parts, whose sizes may differ and are known without `splits`."""
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
        hosts = HostWorld(world, members, name)
        # Every tensor of a rank is on the CPU, whatever it says.
        self._join(hosts, members.index(world.rank), len(members), "cpu")
        self.ranks, self._name = members, name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> Any:
        return self._name

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Exchange values between the hosts, without ordering memory."""
        return self._world.exchange(value, what)

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank={self._world.rank}, size={self._world.size})"

    def _fall_back(self, name: str, why: str, x: Any = None) -> Any:
        raise CannotInterpret(f"torch.distributed.{name} ({why}) is not simulated: use a GPU")

    def shutdown(self) -> None:
        pass


class WorldState:
    """What c10d records of process groups, for one rank: the fields of its _World."""

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
