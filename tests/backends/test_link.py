"""Data and flags in different memories, as behind a link: on the simulator, with split heaps.

The tests of the device functions and the examples run again here, with a `run` whose worlds are so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from device.test_device_memory import *  # noqa: F403
from device.test_device_signal import *  # noqa: F403
from support import link_kernels
from test_examples import test_example_in_process  # noqa: F401

import sundog
from sundog.backends._link import check_host_memory
from sundog.backends.sim import Sim
from sundog.device import memory, signal
from sundog.errors import BadAccess, WaitTimeout
from sundog.ops.load import find
from sundog.ops.op import OPS
from sundog.ops.select import choose, config_for
from sundog.tools._subject import _exercise
from sundog.tools.check.mutation import find_mutants, mutate
from sundog.tools.check.schedules import check

Run = Callable[..., list]
pytestmark = pytest.mark.sim_only


@pytest.fixture
def run() -> Run:
    def call(fn: Callable[[sundog.World], Any], world_size: int, **options: Any) -> list[Any]:
        given = options.pop("sim", Sim())
        split = Sim(given.schedule, given.num_sms, given.expire, split_heaps=True)
        return sundog.run(fn, world_size, "sim", sim=split, **options)

    return call


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_gather(run: Run, size: int) -> None:
    def main(world: sundog.World) -> torch.Tensor:
        x = world.randn((5, 7))
        out = world.all_gather(world.all_gather(x))
        return torch.cat([x, out])

    results = run(main, size)
    expected = torch.cat([result[:5] for result in results] * size)
    assert all(torch.equal(result[5:], expected) for result in results)


@pytest.mark.parametrize("name", list(OPS))
def test_every_op_keeps_data_and_flags_apart(run: Run, name: str) -> None:
    module = find(name)
    run(lambda world: _exercise(world, module, module.cases(2)[0]), 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_0_fetches_while_stand_ins_play_the_others(run: Run, size: int) -> None:
    results = run(lambda world: link_kernels.pull_all(world, 1003, 256, world.rank > 0), size)
    link_kernels.check_pulled(results[0], size, 1003)


def test_data_and_flags_lie_apart(run: Run) -> None:
    def main(world: sundog.World) -> tuple[int, int]:
        x, flags = world.zeros(3), world.signals(3, "flags")
        assert flags.untyped_storage().data_ptr() == world.ctx.untyped_storage().data_ptr()
        assert flags.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        peer = (world.rank + 1) % world.size
        x[1] = world.rank
        flags[2] = 10 * world.rank
        world.barrier()
        return int(world.peer(x, peer)[1]), int(world.peer(flags[1:], peer)[1])

    assert run(main, 3) == [(1, 10), (2, 20), (0, 0)]


@triton.jit
def write_flag_as_data(flags, x, peer, ctx):
    memory.store(flags + 2, 1, peer, ctx)


@triton.jit
def signal_data(flags, x, peer, ctx):
    signal.signal(x + 2, peer, 1, ctx)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (write_flag_as_data, r"flags\[2\] of rank {} is flags, and was taken for data"),
        (signal_data, r"x\[2\] of rank {} is data, and was taken for flags"),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_who_mixes_them_up_is_told(run: Run, kernel: Any, words: str, size: int) -> None:
    rank, peer = random.Random(size).sample(range(size), 2)

    def main(world: sundog.World) -> None:
        flags, x = world.signals(4, "flags"), world.zeros(4, torch.int64, "x")
        world.barrier()
        if world.rank == rank:
            kernel[(1,)](flags, x, peer, world.ctx)

    with pytest.raises(BadAccess, match=words.format(peer)):
        run(main, size)
    sundog.run(main, size, "sim")  # where they lie together nobody sees it


@triton.jit
def arrive(counter, seen, ctx, PROGRAMS: tl.constexpr):
    """A count of arrivals at rank 0, by an atomic of the kernel's own."""
    one = tl.full((), 1, tl.int64)
    tl.debug_barrier()
    tl.atomic_add(signal.translate(counter, 0, ctx), one, sem="release", scope="sys")
    if (tl.load(ctx) == 0) & (tl.program_id(0) == 0):
        signal.wait(counter, 1, PROGRAMS * tl.load(ctx + 1), ctx)
        tl.store(seen, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_flag_is_translated_for_an_atomic_of_ones_own(run: Run, size: int) -> None:
    def main(world: sundog.World) -> tuple[int, int]:
        counter, seen = world.signals(1, "arrivals"), world.zeros(1, torch.int32)
        world.barrier()
        arrive[(2,)](counter, seen, world.ctx, PROGRAMS=2)
        world.barrier()
        return int(counter), int(seen)

    assert run(main, size) == [(2 * size, 1)] + [(0, 0)] * (size - 1)


@triton.jit
def wait_for(flag, epoch, ctx):
    signal.wait(flag, 1, epoch, ctx)


@triton.jit
def exchange(x, out, flags, ctx, LANES: tl.constexpr):
    peer = (tl.load(ctx) + 1) % tl.load(ctx + 1)
    signal.barrier_ranks(flags, 1, ctx, LANES)
    memory.get(out, x, peer, ctx)


def test_a_wait_runs_out_and_a_group_goes_on(run: Run) -> None:
    """The record names the flag, the flags are set back, and a group inside has both memories."""

    def main(world: sundog.World) -> tuple[Any, int]:
        world.empty(100)  # so that offsets differ from those in the group
        with world.scope():
            group = world.group([2, 0])
            record = None
            if group is not None:
                flags = group.signals((1, 2), "group.flags")
                x, out = group.full(1, 100 + world.rank), group.zeros(1)
                group.barrier()
                if group.rank == 0:
                    flags[0, 1] = 3
                    wait_for[(1,)](flags[0, 1:], 7, group.ctx)
                    with pytest.raises(WaitTimeout) as caught:
                        group.synchronize()
                    record = caught.value.record
                group.barrier()
                assert flags.tolist() == [[0, 0]]
                group.barrier()  # nobody signals before everybody has looked
                exchange[(1,)](x, out, flags, group.ctx, LANES=2)
                group.barrier()
                return record, int(out)
        return None, 0

    results = run(main, 3, sim=Sim(expire=True))
    assert [value for _, value in results] == [102, 0, 100]
    record = results[2][0]
    # The peer by its number in the world: rank 1 of the group is rank 0.
    assert (record.flag, record.expected, record.seen, record.peer) == ("group.flags[1]", 7, 3, 0)


def test_link_is_for_one_gpu() -> None:
    with pytest.raises(ValueError, match=r"for backend 'virtual', and for 'sim'.* not 'shm'"):
        sundog.run(lambda world: None, 2, "shm", link="pcie")
    with pytest.raises(ValueError, match="link must be 'pcie', 'host' or '', got 'nvlink'"):
        sundog.run(lambda world: None, 2, "sim", link="nvlink")


@pytest.mark.parametrize("name", link_kernels.PULLING)
def test_rank_0_works_while_stand_ins_play_the_others(name: str) -> None:
    """Rank 0's results are right, no schedule needed another's, and the checker is content."""
    module = find(name)

    def main(world: sundog.World) -> bool:
        _exercise(world, module, module.cases(3)[0])
        return world.passive

    report = check(main, 3, schedules=2, link="pcie")
    assert report.findings == [], report
    assert report.results == [False, True, True]


def test_every_mutant_of_the_stand_in_is_killed() -> None:
    module = find("all_gather.pull")
    problem = module.Problem(100, torch.float32, 2)

    def main(world: sundog.World) -> None:
        """Two calls, then other data at once, then a third."""
        plan = module.plan(world, problem, module.default(problem, 2))
        (x,) = module.inputs(world, problem, world.rank)
        out = world.zeros(200)
        world.barrier()
        for n in range(3):
            plan(x, out)
            x.fill_(n)

    found, report = find_mutants(main, 2, link="pcie")
    assert report.findings == [], report
    found = [mutant for mutant in found if "passive" in mutant.where]
    assert len(found) > 5
    survived = [o for o in mutate(main, 2, found, schedules=10, link="pcie") if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)


def test_calls_of_a_world_work_over_a_link() -> None:
    """All ranks find that `a` lies at the same place, though not as far from its flags."""

    def main(world: sundog.World) -> list[bool]:
        a = world.empty((40, 32), torch.float16).random_(-2, 3)
        b = torch.empty(64, 16, dtype=torch.float16).random_(-2, 3)
        world.barrier()
        want = torch.cat([world.peer(a, rank) for rank in range(2)], 1).double() @ b.double()
        algos = ("barrier", "hbm_buffer", "direct")
        outs = [world.all_gather_matmul(a, b, algo=algo) for algo in algos]
        return [torch.equal(out.double(), want) for out in outs]

    assert sundog.run(main, 2, "sim", link="pcie")[0] == [True] * 3


def test_pinned_memory_is_the_hosts() -> None:
    check_host_memory(7, 1 << 16)
    with pytest.raises(ValueError, match=r"pins 7 heaps of 1,125,899,906,842,624 bytes"):
        check_host_memory(7, 1 << 50)


def test_nobody_is_passive_without_a_link(run: Run) -> None:
    assert run(lambda world: world.passive, 2) == [False, False]


def test_measurements_over_a_link_serve_worlds_with_a_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Entries count by a rank's SMs: behind a link rank 0 has all but one for each peer."""
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))  # nothing of the user's
    module = find("all_gather_matmul.hbm_buffer")
    problem = module.Problem(8192, 9216, 7168, torch.bfloat16, 2)
    there = choose("all_gather_matmul", problem, "nvidia-h200", 132 - 1)
    assert (there.algo, there.config.fetchers, there.config.programs) == ("hbm_buffer", 3, 131)
    without = config_for("all_gather_matmul.hbm_buffer", module, problem, "nvidia-h200", 132)
    assert without == module.default(problem, 132)
    assert without.fetchers > 3
