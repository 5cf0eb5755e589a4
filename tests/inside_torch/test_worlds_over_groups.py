"""sundog.init(group=...) and sundog.init(mesh=...): worlds over parts of a job, several at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.jobs import job
from torch.distributed.device_mesh import init_device_mesh

import sundog
from sundog.backends._groups import PerGroupStore
from sundog.errors import SundogError, WorldClosed

pytestmark = pytest.mark.sim_only  # names its backend itself, so once is enough
SMALL = {"backend": "shm", "heap_size": 1 << 20, "timeout": 20}


def test_two_dimensions_of_a_mesh_and_the_whole_job() -> None:
    """Three worlds at once in each process, interleaved with gloo."""

    def main(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = sundog.init(**SMALL)
        dp, tp = (
            sundog.init(mesh=mesh, dim="dp", **SMALL),
            sundog.init(mesh=mesh, dim="tp", **SMALL),
        )
        found = []
        for step in range(3):
            x = torch.tensor([float(rank + step)])
            found.append([world.all_reduce(x).item() for world in (tp, whole, dp)])
            dist.all_reduce(x)
            found[-1].append(x.item())
        y = torch.tensor([float(rank)], requires_grad=True)
        (tp.all_reduce(y) * dp.all_reduce(y)).sum().backward()
        assert len({world.name for world in (whole, dp, tp)}) == 3
        for world in (dp, whole, tp):
            world.close()
        return (dp.rank, tp.rank), found, y.grad.item()

    for rank, (place, found, grad) in enumerate(job(main, 4)):
        row, column = divmod(rank, 2)
        assert place == (row, column)
        across, along = 4 * row + 1, 2 * column + 2  # ranks of tp's and of dp's group, summed
        for step, sums in enumerate(found):
            assert sums == [across + 2 * step, 6 + 4 * step, along + 2 * step, 6 + 4 * step]
        products = {r: (4 * (r // 2) + 1, 2 * (r % 2) + 2) for r in range(4)}
        expected = sum(products[r][1] for r in range(4) if r // 2 == row)
        expected += sum(products[r][0] for r in range(4) if r % 2 == column)
        assert grad == expected


def test_members_of_a_subset_may_have_opened_other_worlds() -> None:
    """What once hung: worlds were numbered per process, so their keys in the store differed."""

    def main(rank: int) -> Any:
        pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (2, 0))}
        found = {}
        for pair, group in [*pairs.items(), *pairs.items()]:
            if rank in pair:
                with sundog.init(group=group, **SMALL) as world:
                    found[pair] = world.all_gather(torch.tensor([rank])).tolist()
        return found

    for rank, found in enumerate(job(main, 3)):
        assert {pair: sorted(ranks) for pair, ranks in found.items()} == {
            pair: sorted(pair) for pair in ((0, 1), (1, 2), (2, 0)) if rank in pair
        }


def test_bad_groups_are_named() -> None:
    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        first = dist.new_group([0])
        for message, options in {
            r"the mesh has no dimension 'pp'; there are: \('dp', 'tp'\)": {
                "mesh": mesh,
                "dim": "pp",
            },
            r"the mesh has dimensions \('dp', 'tp'\); name one": {"mesh": mesh},
            "give mesh=... too": {"dim": "dp"},
            "group=... or mesh=..., not both": {"group": first, "mesh": mesh},
            "group is a str, expected a ProcessGroup": {"group": "dp"},
        }.items():
            with pytest.raises(ValueError, match=message):
                sundog.init(**SMALL, **options)
        if rank == 1:
            with pytest.raises(ValueError, match="this process is not a member of the group"):
                sundog.init(group=first, **SMALL)
        both = dist.new_group([0, 1])
        world = sundog.init(group=both, **SMALL)
        with pytest.raises(SundogError, match="this process already has World"):
            sundog.init(group=both, **SMALL)
        world.close()
        with pytest.raises(WorldClosed, match="the world was closed"):
            world.all_reduce(torch.ones(1))
        dist.destroy_process_group(both)
        with pytest.raises(ValueError, match="this group is gone"):
            sundog.init(group=both, **SMALL)

    job(main, 2)


def test_torchs_rendezvous_counts_per_group() -> None:
    """Two processes whose counters differ, as torch's do, meet under the same keys."""
    inner = dist.HashStore()
    one, other = PerGroupStore(inner), PerGroupStore(inner)
    for step in range(3):
        one.set(f"Symmetric/{4 + step}/0", f"a{step}")
        other.set(f"Symmetric/{9 + 2 * step}/1", f"b{step}")
        keys = [f"Symmetric/{4 + step}/{rank}" for rank in range(2)]
        assert one.multi_get(keys) == [f"a{step}".encode(), f"b{step}".encode()]
        one.add(f"Symmetric/{4 + step}", 1)
        assert other.add(f"Symmetric/{9 + 2 * step}", 1) == 2
        assert other.check([f"Symmetric/{9 + 2 * step}/0"])
