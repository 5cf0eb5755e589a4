"""`with world.capture() as graph`, then `graph.replay()`: the same on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.collectives import all_gather_push
from sundog.errors import CaptureError, NotOrdered, SundogError, WorldClosed
from sundog.tools.check.schedules import check

N = 37


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def never_before(x):
    tl.store(x, 1.0)


def _sum(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    add[(1,)](x, y, out, N, BLOCK=64)
    return out


def _fresh(x: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    torch.manual_seed(100 * seed + rank)
    return x.copy_(torch.randint(-99, 99, x.shape).to(x.dtype))


def _gathered(size: int, seed: int) -> torch.Tensor:
    return torch.cat([_fresh(torch.empty(N), rank, seed) for rank in range(size)])


def _plan(world: sundog.World) -> Any:
    problem = all_gather_push.Problem(N, torch.float32, world.size)
    config = all_gather_push.default(problem, world.num_sms)
    return all_gather_push.plan(world, problem, config)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_replays_see_new_data(run, size):
    def main(world: sundog.World) -> list[bool]:
        x = world.empty((N,))
        world.all_gather(_fresh(x, world.rank, 0))
        with world.capture() as graph:
            out = world.all_gather(x)
            twice = out * 2
        good = []
        for seed in range(1, 5):
            _fresh(x, world.rank, seed)
            graph.replay()
            want = _gathered(world.size, seed)
            good += [torch.equal(out.cpu(), want), torch.equal(twice.cpu(), 2 * want)]
        return good

    assert run(main, size) == [[True] * 8] * size


def test_nothing_runs_during_the_capture(run):
    def main(world: sundog.World) -> list[float]:
        x, out = torch.ones(N, device=world.device), torch.zeros(N, device=world.device)
        _sum(x, x, out.clone())
        with world.capture() as graph:
            _sum(x, x, out)
            x.add_(1)
        before = out.sum().item() + x.sum().item()
        graph.replay()
        graph.replay()
        return [before, out.sum().item(), x.sum().item()]

    assert run(main, 2) == [[N, 4 * N, 3 * N]] * 2


def test_torch_operations_are_replayed(run):
    """In place, out of place, into a view, by index; one operation reads what another made."""

    def step(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        y = x.clone().mul_(3)
        z = torch.cat([y[1:], y[:1]]) - x
        out.view(-1)[:N] = z[index]
        torch.add(out, 1, out=out)
        return torch.where(out > 0, out, torch.zeros_like(out)).sum(0, keepdim=True).sqrt()

    def main(world: sundog.World) -> bool:
        device = world.device
        x, out = torch.empty(N, device=device), torch.zeros(N + 1, device=device)
        index = torch.arange(N - 1, -1, -1, device=device)
        with world.capture() as graph:
            result = step(x, index, out)
        good = True
        for seed in range(3):
            _fresh(x, world.rank, seed)
            want_out = out.clone()
            want = step(x.clone(), index, want_out)
            graph.replay()
            good &= torch.equal(result.cpu(), want.cpu()) and torch.equal(out.cpu(), want_out.cpu())
        return good

    assert run(main, 1) == [True]


def test_two_graphs_and_eager_calls_interleaved(run):
    def main(world: sundog.World) -> list[bool]:
        plan = _plan(world)
        xs, outs = ([world.empty((k * N,)) for _ in range(3)] for k in (1, world.size))
        plan(xs[0], outs[0])
        graphs = []
        for x, out in zip(xs[:2], outs[:2], strict=True):
            with world.capture() as graph:
                plan(x, out)
            graphs.append(graph)
        good = []
        for seed in range(0, 9, 3):
            for number, x in enumerate(xs):
                _fresh(x, world.rank, seed + number)
            graphs[1].replay()
            plan(xs[2], outs[2])
            graphs[0].replay()
            good += [
                torch.equal(out.cpu(), _gathered(world.size, seed + number))
                for number, out in enumerate(outs)
            ]
        return good

    assert run(main, 2) == [[True] * 9] * 2


def test_branches_on_other_streams(run):
    """x + y on stream 1 beside x + x on stream 0; the sum of both after them."""

    def main(world: sundog.World) -> list[bool]:
        device = world.device
        x, y, a, b, c = (torch.zeros(N, device=device) for _ in range(5))
        _sum(x, y, a)
        with world.capture() as graph:
            fork = world.record_event()
            with world.stream(1):
                world.wait_event(fork)
                _sum(x, y, a)
                joined = world.record_event()
            _sum(x, x, b)
            world.wait_event(joined)
            _sum(a, b, c)
        good = []
        for seed in range(4):
            _fresh(x, world.rank, seed), _fresh(y, world.rank, seed + 9)
            graph.replay()
            good.append(torch.equal(c.cpu(), (3 * x + y).cpu()))
        return good

    assert run(main, 2) == [[True] * 4] * 2


def test_a_graph_may_be_replayed_on_another_stream(run):
    def main(world: sundog.World) -> bool:
        plan, x = _plan(world), world.empty((N,))
        out = world.empty((world.size * N,))
        plan(x.fill_(0), out)
        with world.capture() as graph:
            plan(x, out)
        ready = world.record_event()
        with world.stream(1):
            world.wait_event(ready)
            _fresh(x, world.rank, 5)
            graph.replay()
            return torch.equal(out.cpu(), _gathered(world.size, 5))

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_graph_of_calls_is_in_turn_with_those_on_other_streams(run, is_async):
    """Calls have a plan for each stream. The graph uses that of its capture's, wherever it runs."""

    def main(world: sundog.World) -> bool:
        def begin(out: torch.Tensor) -> Callable[[], Any]:
            made = world.all_reduce(x, out=out, algo="one_shot", async_op=is_async)
            return made.wait if is_async else lambda: made

        x = torch.full((5000,), world.rank + 1.0, device=world.device)
        outs = [torch.zeros_like(x) for _ in range(3)]
        begin(outs[0])()
        with world.capture() as graph:
            begin(outs[0])()
        ready = world.record_event()
        before = begin(outs[1])
        with world.stream(0 if is_async else 1):
            world.wait_event(ready)
            graph.replay()
        after = begin(outs[2])
        before(), after()
        world.synchronize()
        return all(torch.equal(out, torch.full_like(x, 3.0)) for out in outs)

    assert run(main, 2) == [True, True]


def test_an_op_under_way_is_captured_with_its_wait(run):
    """Ordinary tensors, so that copies to and from the heap are in the graph too."""

    def main(world: sundog.World) -> list[bool]:
        x = torch.zeros(N, device=world.device)
        world.all_gather(x, async_op=True).wait()
        with world.capture() as graph:
            handle = world.all_gather(x, async_op=True)
            twice = x * 2  # beside it
            out = handle.wait()
        good = []
        for seed in range(3):
            _fresh(x, world.rank, seed)
            graph.replay()
            good.append(torch.equal(out.cpu(), _gathered(world.size, seed)))
            good.append(torch.equal(twice.cpu(), 2 * x.cpu()))
        return good

    assert run(main, 2) == [[True] * 6] * 2


FORBIDDEN: dict[str, tuple[Callable[[sundog.World, torch.Tensor], Any], str, str]] = {
    "world.barrier": (lambda w, x: w.barrier(), "host barrier", "world.device_barrier"),
    "world.synchronize": (lambda w, x: w.synchronize(), "host synchronisation", "during a capture"),
    "world.exchange": (lambda w, x: w.exchange(1), "collective on the host", "before"),
    "a name like ours": (lambda w, x: w.exchange(1, "plan of mine"), "collective on the host", ""),
    "world.broadcast_object": (lambda w, x: w.broadcast_object(1), "collective on the host", ""),
    "world.empty": (lambda w, x: w.empty((3,)), "allocation of symmetric memory", "before"),
    "world.zeros": (lambda w, x: w.zeros((3,)), "allocation of symmetric memory", "before"),
    "world.free": (lambda w, x: w.free(x), "allocation of symmetric memory", "outside"),
    "a new plan": (lambda w, x: _plan(w), "plan made during capture", "before"),
    "a cached plan": (lambda w, x: w.all_gather(x[:5]), "plan made during capture", "once before"),
    "world.capture": (lambda w, x: w.capture(), "graph inside a graph", "another"),
    "a new kernel": (lambda w, x: never_before[(1,)](x), "kernel loaded during capture", "once"),
}
READS: dict[str, tuple[Callable[[sundog.World, torch.Tensor], Any], str]] = {
    "item": (lambda w, x: x.sum().item(), "host synchronisation"),
    "bool": (lambda w, x: x[0] > 0 or x[1], "host synchronisation"),
    "equal": (lambda w, x: torch.equal(x, x + 1), "host synchronisation"),
    "nonzero": (lambda w, x: x.nonzero(), "host synchronisation"),
    "mask": (lambda w, x: x[x > 0], "host synchronisation"),
    "tolist": (lambda w, x: x.tolist(), "copy between CPU and device"),
    "cpu": (lambda w, x: x.cpu(), "copy between CPU and device"),
    "to": (lambda w, x: x.to("cpu"), "copy between CPU and device"),
    "tensor": (lambda w, x: torch.tensor([1.0], device=w.device), "copy between CPU and device"),
    "list": (lambda w, x: x[[1, 2]], "copy between CPU and device"),
    "number": (lambda w, x: x.__setitem__(2, 1.0), "copy between CPU and device"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_no_graph_can_hold_is_refused(run, name):
    call, reason, instead = FORBIDDEN[name]
    _refused(run, call, reason, instead)


@pytest.mark.sim_only  # a GPU's runtime says it in other words
@pytest.mark.parametrize("name", READS)
def test_reading_device_memory_is_refused(run, name):
    _refused(run, *READS[name], "")


def _refused(run: Callable, call: Callable, reason: str, instead: str) -> None:
    """With the line, and also if somebody catches it; the world lives on."""

    def main(world: sundog.World) -> tuple[bool, str]:
        x = world.empty((N,)).fill_(1)
        raised = []
        with pytest.raises(CaptureError) as caught, world.capture() as graph:
            _try(lambda: call(world, x), raised)
        assert raised == [caught.value]
        assert caught.value.reason == reason
        assert "tests/world/test_capture.py:" in caught.value.where
        with pytest.raises(SundogError, match="never captured"):
            graph.replay()
        with world.capture() as again:
            x.add_(1)
        world.barrier()
        again.replay()
        return x.cpu().eq(2).all().item(), str(caught.value)

    for good, message in run(main, 2):
        assert good
        assert reason in message
        assert instead in message


def _try(call: Callable[[], Any], raised: list[BaseException]) -> None:
    try:
        call()
    except (CaptureError, RuntimeError) as error:  # or what a GPU's runtime raises
        raised.append(error)


def test_streams_that_are_no_part_of_the_capture_are_refused(run):
    def main(world: sundog.World) -> list[str]:
        x, out = (torch.zeros(N, device=world.device) for _ in range(2))
        _sum(x, x, out)
        outside, raised = world.record_event(), []

        def fork() -> None:
            event = world.record_event()
            with world.stream(1):
                world.wait_event(event)
                _sum(x, x, out)

        with pytest.raises(CaptureError) as loose, world.capture():
            fork()
        with pytest.raises(CaptureError), world.capture(), world.stream(1):
            _try(lambda: _sum(x, x, out), raised)
        with pytest.raises(CaptureError), world.capture():
            _try(lambda: world.wait_event(outside), raised)
        return [str(error) for error in (loose.value, *raised)]

    for loose, elsewhere, outside in run(main, 1):
        assert "stream outside the capture" in elsewhere
        assert "stream" in loose or "captur" in loose
        assert "event" in outside or "captur" in outside


def test_a_graph_holds_its_plans(run):
    def main(world: sundog.World) -> None:
        plan, x = _plan(world), world.empty((N,)).fill_(1)
        out = world.empty((world.size * N,))
        plan(x, out)
        with world.capture() as graph:
            plan(x, out)
            plan(x, out)
        assert graph.plans == [plan]
        with pytest.raises(SundogError, match=r"graph.free\(\) first"):
            plan.free()
        graph.replay()
        graph.free()
        with pytest.raises(SundogError, match="it was freed"):
            graph.replay()
        plan.free()

    run(main, 2)


def test_a_capture_that_failed_holds_no_plans(run):
    def main(world: sundog.World) -> None:
        def fail(error: type[Exception]) -> None:
            with world.capture() as graph:
                graphs.append(graph)
                plan(x, out)
                if error is KeyError:
                    raise error
                with pytest.raises(error):
                    world.barrier()

        graphs: list[Any] = []
        plan, x = _plan(world), world.empty((N,)).fill_(1)
        out = world.empty((world.size * N,))
        plan(x, out)
        for error in (KeyError, CaptureError):  # the second one is raised again at the end
            with pytest.raises(error):
                fail(error)
        plan.free()

    run(main, 2)


def test_a_graph_holds_the_plans_of_groups_too(run):
    def main(world: sundog.World) -> None:
        with world.scope():
            group = world.group([1, 0])
            assert group is not None
            plan, x = _plan(group), group.empty((N,)).fill_(1)
            out = group.empty((group.size * N,))
            plan(x, out)
            with world.capture() as graph:
                plan(x, out)
            with pytest.raises(SundogError, match=r"graph.free\(\) first"):
                plan.free()
            graph.replay()
            world.synchronize()
            graph.free()

    run(main, 2)


def test_a_group_that_a_graph_uses_does_not_end_with_its_scope(run):
    """Not even a part of it: its memory would be the world's, and it would use it all the same."""

    def main(world: sundog.World) -> bool:
        def scoped() -> None:
            with world.scope():
                group = world.group([1, 0])
                assert group is not None
                made.append(group.group([0, 1]))
                plan, x = _plan(made[0]), made[0].empty((N,)).fill_(1)
                out = made[0].empty((world.size * N,))
                plan(x, out)
                with world.capture() as graph:
                    plan(x, out)
                made.extend((graph, x, out))

        made: list[Any] = []
        with pytest.raises(SundogError, match=r"graph.free\(\) first"):
            scoped()
        group, graph, x, out = made
        assert not group.is_symmetric(world.empty((1 << 10,)))
        _fresh(x, group.rank, 3)
        graph.replay()
        return torch.equal(out.cpu(), _gathered(group.size, 3))

    assert run(main, 2) == [True, True]


def test_a_plan_on_two_streams_at_once_is_refused(run):
    def main(world: sundog.World) -> None:
        plan, x = _plan(world), world.empty((N,)).fill_(1)
        out = world.empty((world.size * N,))
        plan(x, out)
        with world.capture() as graph:
            plan(x, out)
        graph.replay()
        behind = world.record_event()
        with world.stream(1):
            for call in (lambda: plan(x, out), graph.replay):
                with pytest.raises(NotOrdered, match="on stream 0, may still be running"):
                    call()
            world.wait_event(behind)
            plan(x, out)
        with pytest.raises(NotOrdered, match="on stream 1, may still be running"):
            graph.replay()
        world.synchronize()
        graph.replay()

    run(main, 2)


def test_a_graph_outside_its_time_is_refused(run):
    def main(world: sundog.World) -> Any:
        x = torch.zeros(N, device=world.device)
        with world.capture() as graph:
            with pytest.raises(SundogError, match="has not ended"):
                graph.replay()
            x.add_(1)
        with pytest.raises(KeyError), world.capture() as broken:
            raise KeyError
        with pytest.raises(SundogError, match="never captured"):
            broken.replay()
        return graph if world.backend == "sim" else None

    graph = run(main, 1)[0]
    if graph is not None:
        with pytest.raises(WorldClosed):
            graph.replay()


def test_a_wrong_operation_raises_where_it_is_captured(run):
    def main(world: sundog.World) -> float:
        x, y = torch.zeros(N, device=world.device), torch.zeros(N + 1, device=world.device)
        with pytest.raises(RuntimeError, match="size"), world.capture():
            x.add_(y)
        with world.capture() as graph:
            x.add_(1)
        graph.replay()
        return x.sum().item()

    assert run(main, 1) == [N]


@pytest.mark.sim_only
def test_random_numbers_differ_from_replay_to_replay():
    def main(world: sundog.World) -> list[list[float]]:
        x = torch.empty(4)
        torch.manual_seed(world.rank)
        with world.capture() as graph:
            x.normal_()
        drawn = []
        for _ in range(3):
            graph.replay()
            drawn.append(x.tolist())
        return drawn

    first, second = sundog.run(main, 2, "sim")
    assert len({tuple(numbers) for numbers in first + second}) == 6


@pytest.mark.sim_only
def test_what_a_capture_made_is_poison_until_the_replay():
    def main(world: sundog.World) -> list[bool]:
        x = torch.ones(N)
        with world.capture() as graph:
            y = x + 1
        before = y.isnan().all().item()
        graph.replay()
        return [before, y.eq(2).all().item()]

    assert sundog.run(main, 1, "sim") == [[True, True]]


def _replays(wait: bool, kernel: bool) -> Callable[[sundog.World], None]:
    """A graph on stream 1, of a kernel or a torch operation, whose result is read on stream 0."""

    def main(world: sundog.World) -> None:
        x, out = torch.ones(N), torch.zeros(N)
        _sum(x, x, out)
        with world.capture() as graph:
            _sum(x, x, out) if kernel else out.mul_(2)
        with world.stream(1):
            graph.replay()
            done = world.record_event()
        if wait:
            world.wait_event(done)
        _sum(out, out, torch.zeros(N))
        world.synchronize()

    return main


@pytest.mark.sim_only
@pytest.mark.parametrize("kernel", [True, False])
def test_replays_are_in_sight_of_the_checker(kernel):
    assert check(_replays(True, kernel), world_size=2, schedules=6).findings == []
    report = check(_replays(False, kernel), world_size=2, schedules=6)
    assert {finding.kind for finding in report.findings} == {"race"}
