"""Many ranks on one GPU. What is not about `virtual` itself runs on every backend."""

from __future__ import annotations

import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import rank_kernels as kernels
import torch
import triton

import sundog
from sundog import World, target
from sundog.backends._rendezvous import KERNELS_WAIT
from sundog.errors import NotResident, WaitTimeout

SIZES = [1, 2, 3, 4, 8]
only_virtual = pytest.mark.gpu("virtual")
on_gpu = pytest.mark.gpu("virtual", "symm")


def gather(world: World, n: int, programs: int, rounds: int, dtype: torch.dtype, seed: int) -> list:
    """Inputs and outputs of `rounds` calls, each after the other without a host's wait."""
    made = torch.Generator().manual_seed(seed * 10 + world.rank)
    x = [torch.randint(-100, 100, (n,), generator=made).to(dtype) for _ in range(rounds)]
    mine = [world.empty((n,), dtype).copy_(each) for each in x]
    out = [world.empty((world.size * n,), dtype) for _ in range(rounds)]
    flags = world.signals((programs, world.size), "gather.flags")
    epochs = world.signals((programs,), "gather.epochs")
    world.barrier()
    for source, result in zip(mine, out, strict=True):
        kernels.all_gather[(programs,)](
            source, result, flags, epochs, world.ctx, n,
            SIZE=world.size, LANES=triton.next_power_of_2(world.size), BLOCK=256,
        )  # fmt: skip
    world.barrier()
    return [(a, b.cpu()) for a, b in zip(x, out, strict=True)]


def check_gathered(results: list) -> None:
    for calls in zip(*results, strict=True):
        expected = torch.cat([x for x, _ in calls])
        for _, out in calls:
            assert torch.equal(out, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n", "programs"), [(1, 1), (1000, 1), (5003, 4)])
def test_all_gather(run, size, n, programs):
    check_gathered(run(lambda w: gather(w, n, programs, 3, torch.float32, 1), size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int64])
def test_all_gather_of_any_type(run, dtype):
    check_gathered(run(lambda w: gather(w, 777, 2, 2, dtype, 2), 4))


@pytest.mark.parametrize("size", [1, 4])
def test_programs_of_a_rank_meet(run, size):
    def main(world: World) -> tuple[int, torch.Tensor]:
        values = world.empty((8,), torch.int32)
        counter = world.signals((1,), "meet.counter")
        out = world.empty((8, 8), torch.int32)
        for _ in range(3):
            kernels.gather_programs[(8,)](values, counter, out, world.ctx, PROGRAMS=8)
        world.barrier()
        return world.rank, out.cpu()

    for rank, out in run(main, size):
        assert torch.equal(out, (torch.arange(8) * 3 + rank).int().expand(8, 8))


def test_kernels_that_differ_by_rank_start_together(run):
    def main(world: World) -> bool:
        flags = world.signals((world.size,), "differ.flags")
        world.barrier()
        kernels.specialised[(1,)](flags, world.ctx, world.rank, LANES=4)
        world.barrier()
        return True

    assert run(main, 4) == [True] * 4


def test_a_host_may_read_while_others_have_not_launched(run):
    """Rank 0 reads its result at once; the others launch later, after a wait of their own."""

    def main(world: World) -> list[float]:
        flags = world.signals((world.size,), "read.flags")
        seen = []
        world.barrier()
        for epoch in range(1, 6):
            if world.rank > 0:
                torch.ones(4, device=world.device).sum().item()
                world.synchronize()
            kernels.barrier[(1,)](flags, epoch, world.ctx, LANES=4)
            seen.append(flags[0].item())
        return seen

    for seen in run(main, 3):
        assert all(value >= epoch for epoch, value in enumerate(seen, 1))


def test_a_late_rank_is_waited_for(run, backend):
    rounds = 200_000 if backend in ("virtual", "symm") else 20

    def main(world: World) -> list:
        junk = world.zeros((1,), torch.int32)
        if world.rank == 1:
            kernels.delay[(1,)](junk, rounds)
        return gather(world, 300, 2, 2, torch.float32, 3)

    check_gathered(run(main, 4))


@on_gpu
@pytest.mark.alone
def test_a_wait_runs_out_and_the_world_goes_on(run, backend):
    def main(world: World) -> tuple:
        flags = world.signals((3,), "owed.flags")
        world.barrier()
        begin = time.monotonic()
        error = None
        if world.rank == 0:
            kernels.wait_for[(1,)](flags[2:], 1, 5, world.ctx)
            kernels.wait_for[(1,)](flags, 1, 7, world.ctx)  # queued: ends at once
            try:
                world.synchronize()
            except WaitTimeout as caught:
                error = caught
        seconds = time.monotonic() - begin
        world.barrier()
        return error, seconds, gather(world, 500, 2, 2, torch.float32, 4)

    results = run(main, 2, timeout=0.5)
    error, seconds, _ = results[0]
    assert results[1][0] is None
    record = error.record
    assert (record.rank, record.flag, record.expected, record.seen, record.peer) == (
        0,
        "owed.flags[2]",
        5,
        0,
        1,
    )
    share = KERNELS_WAIT if backend == "symm" else 1.0
    assert 0.8 * share * 0.5 < seconds < 2, "one timeout, not two"
    check_gathered([calls for _, _, calls in results])


@only_virtual
def test_a_rank_that_fails_ends_the_others_at_once():
    def main(world: World) -> None:
        flags = world.signals((2,), "fail.flags")
        world.barrier()
        if world.rank == 1:
            raise KeyError("rank 1 fails")
        kernels.wait_for[(1,)](flags, 1, 1, world.ctx)
        world.synchronize()

    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(KeyError, match="rank 1 fails"):
            sundog.run(main, 2, "virtual", timeout=30)
        assert time.monotonic() - begin < 5
    check_gathered(sundog.run(lambda w: gather(w, 100, 1, 1, torch.float32, 5), 2, "virtual"))


@only_virtual
def test_a_failure_while_a_kernel_spins():
    def main(world: World) -> None:
        flags = world.signals((2,), "spin.flags")
        world.barrier()
        if world.rank == 0:
            kernels.wait_for[(1,)](flags, 1, 1, world.ctx)
        world.exchange(None, "start")  # the kernel of rank 0 is on its way
        if world.rank == 1:
            raise KeyError("after the launch")
        world.synchronize()

    begin = time.monotonic()
    with pytest.raises(KeyError, match="after the launch"):
        sundog.run(main, 2, "virtual", timeout=30)
    assert time.monotonic() - begin < 5


@only_virtual
def test_programs_that_cannot_be_resident_are_refused():
    gpu = target.of(torch.device("cuda"))
    programs = gpu.num_sms * 40 // 2

    def main(world: World) -> None:
        flags = world.signals((programs, 2), "many.flags")
        epochs = world.signals((programs,), "many.epochs")
        x, out = world.zeros((512,)), world.zeros((1024,))
        world.barrier()
        kernels.all_gather[(programs,)](
            x, out, flags, epochs, world.ctx, 512, SIZE=2, LANES=2, BLOCK=256
        )

    with pytest.raises(NotResident, match=rf"{2 * programs} programs of 2 ranks.*registers") as e:
        sundog.run(main, 2, "virtual")
    assert f"on each of {gpu.num_sms} SMs" in str(e.value)


@only_virtual
def test_registers_count_too():
    """As many programs as SMs hold by number, but each keeps a large tile in registers."""
    gpu = target.of(torch.device("cuda"))

    def main(world: World, per_sm: int) -> None:
        programs = gpu.num_sms * per_sm // 2
        flags = world.signals((programs, 2), "heavy.flags")
        out = world.zeros((16384,))
        world.barrier()
        kernels.heavy_wait[(programs,)](flags, out, world.ctx, LANES=2, BLOCK=16384)
        world.barrier()

    with pytest.raises(NotResident):
        sundog.run(lambda world: main(world, 8), 2, "virtual")
    sundog.run(lambda world: main(world, 1), 2, "virtual")


@only_virtual
def test_a_large_grid_that_waits_for_nobody_is_fine():
    def main(world: World) -> int:
        junk = world.zeros((1,), torch.int32)
        kernels.delay[(20_000,)](junk, 1)
        world.barrier()
        return int(junk.item())

    assert sundog.run(main, 2, "virtual") == [20_000, 20_000]


@on_gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_captured_graphs_replay(run, size):
    def main(world: World) -> tuple[list, int]:
        n, lanes = 1000, triton.next_power_of_2(world.size)
        x, out = world.empty((n,)), world.empty((world.size * n,))
        flags = world.signals((2, world.size), "graph.flags")
        epochs = world.signals((2,), "graph.epochs")
        world.barrier()

        def launch() -> None:
            kernels.all_gather[(2,)](
                x, out, flags, epochs, world.ctx, n, SIZE=world.size, LANES=lanes, BLOCK=256
            )

        launch()
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        # A rank of its own process runs on the default stream, which can't be captured.
        stream = torch.cuda.current_stream() if world.backend == "virtual" else None
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                launch()
        results = []
        for round in range(3):
            x.copy_(torch.full((n,), float(10 * round + world.rank)))
            out.fill_(-1)
            world.barrier()
            graph.replay()
            world.barrier()
            results.append((x.cpu(), out.cpu()))
        return results, int(epochs[0].item())

    results = run(main, size)
    check_gathered([calls for calls, _ in results])
    assert [epoch for _, epoch in results] == [31] * size


@on_gpu
@pytest.mark.alone
def test_a_hundred_worlds_leak_nothing(run):
    def main(world: World) -> tuple[int, int]:
        gather(world, 100, 1, 1, torch.float32, 6)
        world.barrier()  # all ranks have this world open, and none the one before
        used = (torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd")))
        world.barrier()
        return used

    used = [run(main, 2, heap_size=1 << 20) for _ in range(100)]
    for (free, files), (free_then, files_then) in zip(used[-1], used[20], strict=True):
        assert free >= free_then  # more, if a process of an earlier run has ended meanwhile
        assert files == files_then


@only_virtual
@pytest.mark.parametrize("size", [2, 4])
def test_simulator_and_gpu_agree_in_one_process(size):
    """The same kernel objects, simulated, run, and simulated again."""

    def main(world: World) -> list:
        return gather(world, 333, 3, 2, torch.bfloat16, 7)

    first = sundog.run(main, size, "sim")
    real = sundog.run(main, size, "virtual")
    again = sundog.run(main, size, "sim")
    for other in (real, again):
        for a, b in zip(first, other, strict=True):
            for (x, y), (u, v) in zip(a, b, strict=True):
                assert torch.equal(x, u)
                assert torch.equal(y, v)


@only_virtual
def test_a_thread_of_a_rank_reads_its_result():
    """The thread begins on the rank's stream; the default stream would not wait for it."""

    def main(world: World) -> list[float]:
        given: queue.Queue = queue.Queue()
        x = torch.full((1 << 20,), world.rank + 1.0, device=world.device)
        world.all_reduce(x)  # its plan is made, and its kernel loaded
        with ThreadPoolExecutor(1) as threads:
            read = threads.submit(lambda: given.get().unique().tolist())
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            given.put(world.all_reduce(x))
            world.synchronize()
            return read.result()

    assert sundog.run(main, 4, "virtual") == [[10.0]] * 4


@only_virtual
def test_a_thread_that_no_rank_started_reads_a_result():
    """It reads on the default stream, which waits for the ranks' streams while there is one."""
    given: queue.Queue = queue.Queue()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(torch.cuda.current_stream).result()  # its thread is there before the ranks

        def main(world: World) -> list[float]:
            x = torch.full((1 << 20,), world.rank + 1.0, device=world.device)
            world.all_reduce(x)  # its plan is made, and its kernel loaded
            world.barrier()
            if world.rank > 0:
                return world.all_reduce(x).unique().tolist()
            read = threads.submit(lambda: given.get().unique().tolist())
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            given.put(world.all_reduce(x) * 2)
            world.synchronize()
            return read.result()

        assert sundog.run(main, 4, "virtual") == [[20.0], [10.0], [10.0], [10.0]]


@only_virtual
def test_the_error_of_a_late_rank_does_not_wait_for_it():
    begins: list[float] = []  # of each rank, once the kernels are compiled

    def main(world: World, late: bool) -> float:
        x = torch.ones(100, device=world.device)
        world.all_reduce(x)
        world.barrier()
        begins.append(time.monotonic())
        if world.rank == 1 and late:
            torch.cuda._sleep(16_000_000_000)  # 8 s
        out = world.all_reduce(x)
        world.synchronize()
        return out[0].item()

    with pytest.raises(WaitTimeout, match="rank 1 owes the signal") as caught:
        sundog.run(lambda world: main(world, True), 2, "virtual", timeout=1)
    assert time.monotonic() - begins[0] < 5
    assert any("the GPU still runs what it launched" in note for note in caught.value.__notes__)
    assert sundog.run(lambda world: main(world, False), 2, "virtual", timeout=1) == [2.0, 2.0]
    assert time.monotonic() - begins[0] > 6, "the next world waited for the late rank"


@only_virtual
def test_a_group_captures_while_the_other_ranks_have_launched():
    """What ranks 1 and 3 launched spun, and the capture of ranks 0 and 2 waited for its end."""

    def main(world: World) -> bool:
        x, y = torch.ones(1024, device=world.device), torch.ones(4099, device=world.device)
        world.all_gather(x)
        group = world.group((0, 2), 4 << 20)
        if group is not None:
            group.all_reduce(y)
            with group.capture() as graph:
                total = group.all_reduce(y)
            for _ in range(3):
                graph.replay()
            group.barrier()
            assert bool((total == 2).all())
        return bool((world.all_gather(x) == 1).all())

    assert sundog.run(main, 4, "virtual", heap_size=16 << 20, timeout=5) == [True] * 4


@only_virtual
def test_an_expired_wait_is_printed_while_torch_loads_a_kernel(capfd):
    """CUDA loads it when the late rank's work has ended; the line comes before."""

    def main(world: World) -> float:
        x = torch.ones(64, device=world.device)
        for _ in range(2):
            world.all_reduce(x)
        world.synchronize()
        if world.rank == 0:
            torch.cuda._sleep(int(6 * 2e9))
        world.all_reduce(x)
        begin = time.monotonic()
        torch.special.bessel_j1(torch.empty(8, device=world.device, dtype=torch.float64))
        return time.monotonic() - begin

    with pytest.raises(WaitTimeout, match="rank 0 owes the signal"):
        sundog.run(main, 2, "virtual", heap_size=16 << 20, timeout=1)
    printed = capfd.readouterr().err
    assert "rank 0 owes it. WaitTimeout is raised when the hosts go on" in printed
