"""The seam between the coroutines of the hosts and a GPU, with a device that only pretends.

A pretended kernel ends when those that it waits for have started, and to load one while another
has not ended fails the test: on a GPU that is the hang which `Gang` is there to prevent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sundog.backends._gang import Gang, complete
from sundog.backends._hosts import Meeting
from sundog.errors import Deadlock, NotResident, WaitRecord, WaitTimeout
from sundog.machine.machine import Machine
from sundog.machine.schedule import RandomSchedule
from sundog.target import Footprint, Target

H200 = Target("NVIDIA H200", "sm_90", 132, 32, 65536, 233472, 64, 32, 60 << 20, 141 << 30)


@dataclass
class Kernel:
    name: str
    needs: tuple[str, ...] = ()  # kernels that must have started before this one can end
    programs: int = 1
    footprint: Footprint | None = field(default_factory=lambda: Footprint(32, 0, 4))
    loaded: bool = False
    looks: int = 0  # how often one must look before it has ended
    partners: tuple[int, ...] = ()  # ranks that it may wait for


class Flying:
    def __init__(self, device: Pretended, kernel: Kernel) -> None:
        self.device, self.kernel = device, kernel

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.kernel.looks -= 1
        return self.kernel.looks < 0 and all(
            name in self.device.started for name in self.kernel.needs
        )

    def record(self, stream: int) -> None:
        self.device.log.append(f"record {self.kernel.name}")


class Prepared:
    def __init__(self, device: Pretended, kernel: Kernel) -> None:
        self.device, self.kernel = device, kernel
        self.name, self.programs = kernel.name, kernel.programs
        self.pointers = ()

    @property
    def loaded(self) -> bool:
        return self.kernel.loaded

    def load(self) -> None:
        spinning = [f.kernel.name for f in self.device.flying if not f.query()]
        assert not spinning, f"{self.name} is loaded while {spinning} spin"
        self.device.log.append(f"load {self.name}")
        self.kernel.loaded = True

    def footprint(self) -> Footprint | None:
        return self.kernel.footprint

    def start(self, stream: Any) -> str:
        self.device.log.append(f"start {self.name}")
        self.device.started.append(self.name)
        self.device.flying.append(Flying(self.device, self.kernel))
        return self.name


class Pretended:
    target = H200
    broken = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.started: list[str] = []
        self.flying: list[Flying] = []
        self.shown: list[tuple] = []
        self.machine: Machine

    def is_capturing(self) -> bool:
        return False

    def current_stream(self) -> int:
        return self.machine.host.rank

    def event(self, stream: int) -> Flying:
        """Of the latest kernel of that rank (their names end in the rank), or of nothing."""
        latest = [f for f in self.flying if f.kernel.name.endswith(str(stream))]
        return latest[-1] if latest else Flying(self, Kernel("nothing"))

    def show(self, stream: int) -> None:
        """Note what had started on that stream. A test process may have threads of its own."""
        started = [name for name in self.started if name.endswith(str(stream))]
        self.shown.append((stream, *started))

    def prepare(self, kernel: Kernel, grid: Any, args: tuple, kwargs: dict) -> Prepared:
        return Prepared(self, kernel)

    def partners(self, prepared: Prepared) -> tuple[int, ...]:
        return prepared.kernel.partners


class Bench:
    """Hosts on a pretended GPU."""

    def __init__(self, *hosts: Callable[[Bench], Any], seed: int = 0) -> None:
        self.machine = Machine(RandomSchedule(seed), 1, expire=False)
        self.device = Pretended()
        self.device.machine = self.machine
        self.gang = Gang(self.machine, self.device)
        self.meeting = Meeting(self.machine, tuple(range(len(hosts))))
        for rank, host in enumerate(hosts):
            self.machine.add_host(rank, lambda host=host: host(self), [])
        self.machine.run()

    def launch(self, kernel: Kernel) -> Any:
        return self.gang.launch(kernel, (1,), (), {})

    def synchronize(self) -> None:
        self.gang.synchronize([])

    def check(self) -> Bench:
        if self.machine.failure is not None:
            raise self.machine.failure
        return self


@pytest.mark.parametrize("seed", range(5))
def test_everything_is_loaded_before_anything_starts(seed):
    names = ("a0", "b1", "c2")

    def host(rank: int) -> Callable[[Bench], None]:
        def main(bench: Bench) -> None:
            for _ in range(rank):
                bench.machine.pause()  # others come earlier or later
            assert bench.launch(Kernel(names[rank], needs=names)) == names[rank]
            bench.synchronize()

        return main

    log = Bench(*(host(rank) for rank in range(3)), seed=seed).check().device.log
    assert sorted(log[:3]) == ["load a0", "load b1", "load c2"]
    assert sorted(log[3:]) == ["start a0", "start b1", "start c2"]


def test_a_rank_that_has_ended_or_waits_holds_nobody_back():
    def first(bench: Bench) -> None:
        bench.launch(Kernel("k0"))
        bench.synchronize()
        bench.meeting.exchange(None, "barrier")

    def meets(bench: Bench) -> None:
        bench.meeting.exchange(None, "barrier")

    def ends(bench: Bench) -> None:
        bench.meeting.exchange(None, "barrier")

    assert Bench(first, meets, ends).check().device.started == ["k0"]


@pytest.mark.timeout(10)
def test_a_rank_that_waits_for_its_kernels_is_waited_for():
    """m0 waits for m1, which rank 1 loads and launches when k1 has ended."""

    def first(bench: Bench) -> None:
        bench.launch(Kernel("k0", needs=("k1",)))
        bench.launch(Kernel("m0", needs=("m1",), loaded=True))
        bench.synchronize()

    def second(bench: Bench) -> None:
        bench.launch(Kernel("k1", needs=("k0",), looks=50))
        bench.synchronize()
        bench.launch(Kernel("m1", needs=("m0",)))
        bench.synchronize()

    log = Bench(first, second).check().device.log
    assert log.index("load m1") < log.index("start m0")


@pytest.mark.timeout(10)
def test_nothing_starts_while_a_rank_waits_to_load():
    """k0 runs for longer than the grace; m0 must not start before m1 is loaded."""

    def first(bench: Bench) -> None:
        bench.launch(Kernel("k0", looks=500))
        bench.launch(Kernel("m0", needs=("m1",), loaded=True))

    def second(bench: Bench) -> None:
        bench.launch(Kernel("k1"))
        bench.launch(Kernel("m1", needs=("m0",)))

    log = Bench(first, second).check().device.log
    assert log.index("load m1") < log.index("start m0")


def test_who_synchronizes_lets_the_others_launch():
    """A loaded kernel of rank 0 spins until rank 1, which did something else first, comes."""
    send, receive = Kernel("send1", loaded=True), Kernel("receive0", ("send1",), loaded=True)

    def first(bench: Bench) -> None:
        bench.launch(receive)
        bench.synchronize()

    def second(bench: Bench) -> None:
        bench.launch(Kernel("other1"))
        bench.launch(send)

    assert Bench(first, second).check().device.started[-1] == "send1"


def test_what_cannot_be_resident_is_refused_with_the_numbers():
    heavy = Footprint(registers=255, shared=100_000, warps=8)

    def host(rank: int, programs: int) -> Callable[[Bench], None]:
        return lambda bench: bench.launch(Kernel(f"k{rank}", programs=programs, footprint=heavy))

    bench = Bench(host(0, 66), host(1, 67))
    assert bench.device.started == []
    with pytest.raises(NotResident) as caught:
        bench.check()
    for text in ("133 programs of 2 ranks", "holds 132", "1 on each of 132 SMs", "255 registers",
                 "100,000 bytes", "rank 1: k1, 67 programs", "at most 66 programs"):  # fmt: skip
        assert text in str(caught.value)
    assert len(Bench(host(0, 66), host(1, 66)).check().device.started) == 2


def test_small_programs_count_as_the_largest_beside_them():
    """60 light and 73 heavy: the light ones may land one on each SM and leave no room."""
    light, heavy = Footprint(16, 0, 1), Footprint(255, 200_000, 8)

    def host(name: str, programs: int, footprint: Footprint | None) -> Callable[[Bench], None]:
        return lambda bench: bench.launch(Kernel(name, (), programs, footprint))

    with pytest.raises(NotResident):
        Bench(host("k0", 60, light), host("k1", 73, heavy)).check()
    Bench(host("k0", 60, light), host("k1", 72, heavy)).check()
    Bench(host("k0", 60_000, None), host("k1", 132, heavy)).check()  # waits for nobody


@pytest.mark.parametrize(("looks", "refused"), [(0, False), (1000, True)])
def test_what_still_runs_counts_with_what_starts(looks, refused):
    """65 start beside 67, and 66 may still be running: the first ones were launched before, twice,
    and are not counted again."""
    heavy = Footprint(255, 100_000, 8)

    def host(rank: int, last: int) -> Callable[[Bench], None]:
        before = Kernel(f"a{rank}", (), 66, heavy, loaded=True, looks=looks)
        after = Kernel(f"b{rank}", (), last, heavy, loaded=True)

        def main(bench: Bench) -> None:
            for kernel in (before, before, after):
                bench.launch(kernel)

        return main

    bench = Bench(host(0, 65), host(1, 67))
    assert isinstance(bench.machine.failure, NotResident) == refused
    assert [name in bench.device.started for name in ("a0", "b0")] == [True, not refused]


def test_launches_that_have_ended_are_forgotten():
    kernel = Kernel("k0", loaded=True)

    def host(bench: Bench) -> None:
        for _ in range(500):
            bench.launch(kernel)

    (queue,) = Bench(host).check().gang._queues.values()
    assert len(queue.flights) < 100
    assert sum(queue.kinds.values()) == len(queue.flights)


def test_a_single_rank_waits_for_nobody_if_a_launch_fits():
    """Only the first launch of a kind is looked at, where all ranks' are."""
    waits = []

    def host(bench: Bench) -> None:
        block = bench.machine.block
        bench.machine.block = lambda why: waits.append(why) or block(why)
        few, many = Kernel("k0", loaded=True), Kernel("m0", programs=10**6, loaded=True)
        for _ in range(3):
            assert bench.launch(few) == "k0"
        bench.launch(many)

    bench = Bench(host)
    assert [why.split()[-2] for why in waits] == ["k0", "m0"]
    assert bench.device.started == ["k0"] * 3
    with pytest.raises(NotResident):
        bench.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_launch_that_is_repeated_waits_for_who_loads(seed):
    """That it fits is known; that rank 1 has a kernel to load is not, before rank 1 comes."""

    def first(bench: Bench) -> None:
        flight = bench.gang.flight(Prepared(bench.device, Kernel("k0", loaded=True)), 0)
        for _ in range(2):
            bench.gang.go(flight)

    def second(bench: Bench) -> None:
        bench.launch(Kernel("k1", loaded=True))
        bench.launch(Kernel("n1"))

    log = Bench(first, second, seed=seed).check().device.log
    assert log.index("load n1") < len(log) - 1 - log[::-1].index("start k0")


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_event_stands_for_a_launch_that_is_repeated(ranks):
    """Until another one comes between. It is recorded once, before that one starts."""

    def host(rank: int) -> Callable[[Bench], None]:
        def main(bench: Bench) -> None:
            same = Prepared(bench.device, Kernel(f"k{rank}", loaded=True, looks=10**9))
            flight = bench.gang.flight(same, rank)
            for _ in range(3):
                assert bench.gang.go(flight) == f"k{rank}"
            bench.launch(Kernel(f"m{rank}", loaded=True, looks=10**9))
            bench.gang.go(flight)

        return main

    bench = Bench(*(host(rank) for rank in range(ranks))).check()
    for queue in bench.gang._queues.values():
        k, m = f"k{queue.rank}", f"m{queue.rank}"
        assert [kind.name for _, kind in queue.flights] == [k, m, k]
        assert queue.kinds == {queue.flights[0][1]: 2, queue.flights[1][1]: 1}
        mine = [line for line in bench.device.log if line[-1] == str(queue.rank)]
        assert mine == [*[f"start {k}"] * 3, f"record {k}", f"start {m}", f"start {k}"]


@pytest.mark.parametrize("wait", [Gang.wait_for_all, Gang.synchronize])
def test_who_waits_for_repeats_waits_for_the_last(wait):
    def host(bench: Bench) -> None:
        flight = bench.gang.flight(Prepared(bench.device, Kernel("k0", loaded=True, looks=9)), 0)
        for _ in range(2):
            for _ in range(3):
                bench.gang.go(flight)
            for _ in range(2):
                wait(bench.gang, [])

    log = Bench(host).check().device.log
    assert log == 2 * [*["start k0"] * 3, "record k0"]


def test_launches_on_one_stream_do_not_add_up():
    def host(bench: Bench) -> None:
        for number in range(4):
            bench.launch(Kernel(f"k{number}0", programs=132, footprint=Footprint(255, 200_000, 8)))

    assert len(Bench(host).check().device.started) == 4


@pytest.mark.timeout(10)
def test_nothing_runs_or_starts_during_a_capture():
    """k0 still runs when rank 1 wants to capture; m0 comes meanwhile and must wait."""

    def first(bench: Bench) -> None:
        bench.launch(Kernel("k0", looks=50))
        bench.launch(Kernel("m0", loaded=True))

    def second(bench: Bench) -> None:
        bench.launch(Kernel("k1"))
        bench.gang.wait_for_all("to capture a graph")
        assert all(f.query() for f in bench.device.flying)
        assert "m0" not in bench.device.started
        bench.device.log.append("captured")
        graph = Prepared(bench.device, Kernel("graph1", needs=("m0",), loaded=True))
        assert bench.gang.put(graph, 1) == "graph1"  # together with m0
        bench.synchronize()

    log = Bench(first, second).check().device.log
    assert log.index("captured") < log.index("start m0")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("seed", range(5))
def test_no_launch_starts_while_a_group_may_still_load(seed):
    """Ranks 1 and 3 launch what all ranks run; 0 and 2 have two kernels of a group before that."""
    everybody, pair = (0, 1, 2, 3), (0, 2)

    def host(rank: int) -> Callable[[Bench], None]:
        def main(bench: Bench) -> None:
            if rank in pair:
                for name in ("first", "second"):
                    needs = tuple(f"{name}{other}" for other in pair)
                    bench.launch(Kernel(f"{name}{rank}", needs, partners=pair))
            needs = tuple(f"all{other}" for other in everybody)
            bench.launch(Kernel(f"all{rank}", needs, loaded=True, partners=everybody))
            bench.synchronize()

        return main

    Bench(*(host(rank) for rank in everybody), seed=seed).check()


@pytest.mark.parametrize(
    ("partners", "done", "expected"),
    [
        ({0: (0, 1), 1: (0, 1)}, [], {0, 1}),
        ({0: (0, 1)}, [], set()),  # rank 1 has launched nothing
        ({0: (0, 1)}, [1], {0}),
        ({0: (0, 2), 1: (0, 1, 2), 2: (0, 2)}, [], {0, 2}),
        ({0: (0, 1), 1: (1, 2), 2: (2, 3)}, [], set()),  # each waits for the next
        ({0: (), 1: (0, 1)}, [], set()),  # of rank 0 nothing is known
    ],
)
def test_a_launch_is_complete_with_its_partners(partners, done, expected):
    assert complete(partners, done) == expected


def test_hosts_that_wait_for_each_other_in_vain_are_told():
    def first(bench: Bench) -> None:
        bench.meeting.exchange(None, "barrier")

    with pytest.raises(Deadlock, match=r"rank 0: its host waits for ranks? 1 at a barrier"):
        Bench(first, lambda bench: None).check()


def test_an_error_of_the_gpu_reaches_the_caller():
    def host(bench: Bench) -> None:
        bench.launch(Kernel("k0", needs=("never",)))
        bench.device.broken = True
        bench.synchronize()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Bench(host).check()


@pytest.mark.parametrize("followers", [0, 2])  # which ranks started, such as the compiler's
@pytest.mark.parametrize("foreign", [0, 1])
def test_a_thread_that_no_rank_started_sees_what_was_launched(foreign, followers, monkeypatch):
    """Beside such threads the default stream, which they use, waits for the ranks' streams."""
    ranks, machine, caller = 2, 1, 1
    count = ranks + machine + caller + foreign + followers
    monkeypatch.setattr("sundog.backends._gang.threading.active_count", lambda: count)
    monkeypatch.setattr("sundog.backends._gang.followers", set(range(followers)))

    def host(bench: Bench) -> None:
        bench.launch(Kernel(f"k{bench.machine.host.rank}"))
        bench.gang.show()  # as after every call of torch

    shown = Bench(host, host).check().device.shown
    assert sorted(shown) == 2 * foreign * [(0, "k0")] + 2 * foreign * [(1, "k1")]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("second", [Kernel("m1"), Kernel("m1", loaded=True)])
def test_a_rank_whose_wait_expired_does_not_wait_for_a_late_one(second):
    """Rank 0 keeps the GPU busy. Rank 1 wants to load a kernel, or to launch while rank 2 does."""
    late = Kernel("k0", needs=("never",), loaded=True)
    error = WaitTimeout("rank 0 owes the signal", WaitRecord(1, 0, "flags", 1, 0, 0))

    def expired() -> None:
        raise error

    def first(bench: Bench) -> None:
        bench.launch(late)
        bench.synchronize()

    def main(bench: Bench) -> None:
        bench.launch(Kernel("k1", loaded=True))
        bench.machine.host.on_drained = expired
        bench.launch(second)

    def loads(bench: Bench) -> None:
        bench.launch(Kernel("k2", loaded=True))
        bench.launch(Kernel("m2"))

    assert Bench(first, main, loads).machine.failure is error


@pytest.mark.timeout(10)
def test_a_rank_with_an_expired_wait_leaves_an_exchange():
    """Rank 0's kernel ends when rank 1 has left. Then both meet, and see each other's new value."""
    error = WaitTimeout("rank 0 owes the signal", WaitRecord(1, 0, "flags", 1, 0, 0))
    reports = [error]

    def expired() -> None:
        while reports:  # once
            raise reports.pop()

    def first(bench: Bench) -> Any:
        bench.launch(Kernel("k0", needs=("m1",), loaded=True))
        bench.synchronize()
        return bench.meeting.exchange("late", "barrier")

    def second(bench: Bench) -> Any:
        bench.launch(Kernel("k1", loaded=True))
        bench.machine.host.on_drained = expired
        with pytest.raises(WaitTimeout, match="rank 0 owes the signal"):
            bench.meeting.exchange("a plan", "plan")
        bench.launch(Kernel("m1", loaded=True))
        return bench.meeting.exchange("again", "barrier")

    hosts = Bench(first, second).check().machine.hosts
    assert [host.result for host in hosts] == [["late", "again"]] * 2
