"""Worlds over a part of a job: a ProcessGroup, or one dimension of a DeviceMesh.

torch's symmetric memory numbers its rendezvous per process (StoreExchange::seq_id_ in
CUDASymmetricMemoryUtils.hpp is one counter for all groups) and looks its peers' values up by that
number. Processes that are members of different groups count differently, and wait for each other
forever. `PerGroupStore` gives torch a store in which the numbers count per group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from ._rendezvous import join


class Members(NamedTuple):
    """The processes that will be the ranks of a world, seen from one of them."""

    rank: int
    size: int
    store: Any
    group: str  # the name of the group; empty for the default group


Dimension = str | int | tuple[str, ...] | None


def members_of(group: Any, mesh: Any, dim: Dimension, timeout: float) -> Members:
    """Return the members of a group, or of a mesh's dimension, or of the default group."""
    if group is not None and mesh is not None:
        raise ValueError("sundog.init: give group=... or mesh=..., not both")
    if mesh is not None:
        group = _group_of(mesh, dim)
    elif dim is not None:
        raise ValueError(f"sundog.init: dim={dim!r} is a dimension of a mesh; give mesh=... too")
    if group is None or group is dist.group.WORLD:
        return Members(*join(timeout), "")
    _check_group(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    return Members(group.rank(), group.size(), store, str(group.group_name))


def _check_group(group: Any) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "sundog.init: this process is not a member of the group; only its members call "
            "sundog.init(group=...)"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"sundog.init: group is a {type(group).__name__}, expected a ProcessGroup, as "
            "torch.distributed.new_group returns"
        )
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError(
            "sundog.init: this group is gone: torch.distributed.destroy_process_group ended it. "
            "Make a new one with torch.distributed.new_group."
        )


def _group_of(mesh: Any, dim: Dimension) -> Any:
    names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    if isinstance(dim, tuple) and set(dim) <= set(names) and dim:
        return mesh[dim]._flatten().get_group() if len(dim) > 1 else mesh.get_group(dim[0])
    if dim is None and mesh.ndim > 1:
        raise ValueError(f"sundog.init: the mesh has dimensions {names}; name one: dim=...")
    if dim is not None and dim not in (*names, *range(mesh.ndim)):
        raise ValueError(f"sundog.init: the mesh has no dimension {dim!r}; there are: {names}")
    return mesh.get_group(dim)


class PerGroupStore(dist.Store):
    """A group's store, in which the numbers in torch's rendezvous keys start at 0.

    A key is prefix/number/rank, or prefix/number: the n-th number that is seen becomes n.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._counted(key), value)

    def get(self, key: str) -> Any:
        return self._store.get(self._counted(key))

    def add(self, key: str, amount: int) -> int:
        total: int = self._store.add(self._counted(key), amount)
        return total

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._counted(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._counted(key) for key in keys], *timeout)

    def multi_get(self, keys: list[str]) -> Any:
        return [self.get(key) for key in keys]

    def _counted(self, key: str) -> str:
        prefix, _, rest = key.partition("/")
        number, slash, rank = rest.partition("/")
        counted = self._numbers.setdefault(number, len(self._numbers))
        return f"{prefix}/{counted}{slash}{rank}"
