"""What all collectives' calls have in common: staging, plans made once, words about why."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sundog
from sundog import testing
from sundog.collectives._copy import Config
from sundog.errors import OutOfHeap, RankMismatch
from sundog.fused import all_gather_matmul_barrier
from sundog.ops.load import algorithms

from .moving import SMALL, joined, part, same

Run = Callable[..., list]


def tensor(world: sundog.World, shape: Any, symmetric: bool) -> torch.Tensor:
    if symmetric:
        return world.empty(shape, torch.int16)
    return torch.empty(shape, dtype=torch.int16, device=world.device)


def staged(world: sundog.World) -> set[str]:
    """The names of what calls have put on the heap to go through."""
    names = {block.name for block in world._heap.live.values()}
    return names & {"staging.in", "staging.out"}


@pytest.mark.parametrize("algo", ["push", "pull"])
def test_tensors_of_any_kind(run: Run, algo: str) -> None:
    """On the heap or not, out given or not: the same answer; copied only where peers must reach."""
    needed = {"push": "out", "pull": "x"}[algo]
    buffer = {"push": "staging.out", "pull": "staging.in"}[algo]

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for on_heap, out_on_heap in itertools.product((True, False), (True, False, None)):
            with world.scope():
                x = tensor(world, (11, 3), on_heap).copy_(
                    part(world.rank, 33, torch.int16).view(11, 3)
                )
                out = None if out_on_heap is None else tensor(world, (66,), out_on_heap)
                before = staged(world)
                result = world.all_gather(x, out, algo=algo, config=SMALL)
                assert result is out or (out is None and result.shape == (22, 3))
                assert out is not None or not world.is_symmetric(result)
                found.append(result.cpu().clone())
                lies_there = {"x": on_heap, "out": bool(out_on_heap)}[needed]
                assert staged(world) >= before
                assert lies_there or buffer in staged(world)
        assert staged(world) == {buffer}
        return found

    want = joined([part(rank, 33, torch.int16) for rank in range(2)])
    for result in run(main, 2):
        assert len(result) == 6
        assert all(same(out, want) for out in result)


def test_symmetric_tensors_are_not_copied(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x, out = tensor(world, (10,), True), tensor(world, (20,), True)
        for algo in ("push", "pull"):
            world.all_gather(x.fill_(world.rank), out, algo=algo)
        assert staged(world) == set()

    run(main, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16])
def test_results_of_dtypes_that_pickle_does_not_bring_back(run: Run, dtype: torch.dtype) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        return world.exchange(part(world.rank, 6, dtype).view(2, 3))

    for result in run(main, 2):
        assert [each.shape for each in result] == [(2, 3)] * 2
        assert all(same(each, part(rank, 6, dtype)) for rank, each in enumerate(result))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 5)])
def test_shapes(run: Run, shape: tuple[int, ...]) -> None:
    def main(world: sundog.World) -> tuple[Any, Any]:
        x = torch.full(shape, world.rank + 1, device=world.device)
        out = world.all_gather(x)
        return tuple(out.shape), out.flatten().tolist()

    count = torch.Size(shape).numel()
    want = (2 * shape[0], *shape[1:]) if shape else (2,)
    assert run(main, 2) == [(want, [1] * count + [2] * count)] * 2


def test_a_call_like_one_before_only_launches(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = part(world.rank, 50, torch.int16).to(world.device)
        with world.scope():
            world.all_gather(x)  # the plan outlives the scope
        before = world._heap.num_calls
        world.exchange = None  # type: ignore[method-assign, assignment]
        want = world.all_gather(part(7 + world.rank, 50, torch.int16).to(world.device))
        assert world._heap.num_calls == before
        del world.exchange
        assert same(want, joined([part(7 + rank, 50, torch.int16) for rank in range(2)]))

    run(main, 2)


def test_a_plan_that_does_not_fit_leaves_nothing_on_the_heap(run: Run) -> None:
    """A copy of x fits, the partial too: what is asked for last does not."""

    def main(world: sundog.World) -> None:
        a, b = (torch.ones(128, 128, device=world.device) for _ in range(2))
        before = set(world._heap.live)
        for op in (world.matmul_all_reduce, world.all_gather_matmul):
            with pytest.raises(OutOfHeap):
                op(a, torch.cat([b, b]) if op == world.all_gather_matmul else b, algo="barrier")
            assert set(world._heap.live) == before
        many = all_gather_matmul_barrier.Config(16, 16, 16, programs=world.num_sms + 1)
        with pytest.raises(ValueError, match=f"ask for at most {world.num_sms}"):
            world.all_gather_matmul(a[:, :8], b[:16], algo="barrier", config=many)
        assert set(world._heap.live) == before
        world.barrier()
        assert world.all_reduce(a[0]).tolist() == [2.0] * 128

    run(main, 2, heap_size=144 << 10)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(5)},
        {"x": torch.zeros(4).half()},
        {"algo": "pull"},
        {"config": Config(512)},
        {"async_op": True},
    ],
    ids=str,
)
def test_another_call_gets_another_plan(run: Run, change: dict[str, Any]) -> None:
    def main(world: sundog.World) -> int:
        given: dict[str, Any] = {"x": torch.zeros(4), "algo": "push"}
        for each in ({}, {}, change, change):
            called = given | each
            called["x"] = called["x"].to(world.device)
            result = world.all_gather(**called)
            if "async_op" in each:
                result.wait()
        return len([call for call in world._plans if call.op == "all_gather"])

    assert run(main, 2) == [2, 2]


@pytest.mark.sim_only
def test_staged_calls_without_a_wait_between_them_are_clean() -> None:
    """The copy that a call goes through is free again when its kernel has ended."""

    def main(world: sundog.World) -> list[torch.Tensor]:
        xs = [part(10 * n + world.rank, 40, torch.int32) for n in range(3)]
        return [world.all_gather(x, algo=a, config=SMALL) for x in xs for a in ("push", "pull")]

    report = testing.check(main, 2, schedules=4)
    for result in report.results:
        for place, out in enumerate(result):
            n = place // 2
            assert same(out, joined([part(10 * n + rank, 40, torch.int32) for rank in range(2)]))


def test_ranks_that_stage_differently_are_named(run: Run) -> None:
    def main(world: sundog.World) -> None:
        out = tensor(world, (20,), True)
        out = out if world.rank else torch.empty_like(out)
        text = r"(?s)rank 0: .*out an ordinary tensor.*rank 1: .*out on the heap"
        with pytest.raises(RankMismatch, match=text):
            world.all_gather(torch.zeros(10, dtype=torch.int16, device=world.device), out)

    run(main, 2)


PLACES = {  # what peers reach lies elsewhere on rank 1
    "all_gather: out": lambda w, x, y: w.all_gather(y[:4], x, algo="push"),
    "all_gather: x": lambda w, x, y: w.all_gather(x, algo="pull"),
    "gather: x": lambda w, x, y: w.gather(x),
    "broadcast: out": lambda w, x, y: w.broadcast(y, out=x),
    "all_reduce: x": lambda w, x, y: w.all_reduce(x, out=y, algo="two_shot"),
}


@pytest.mark.parametrize("text", PLACES)
def test_tensors_at_different_places_are_named(run: Run, text: str) -> None:
    """A peer would look for rank 0's place, and find what something else left there."""

    def main(world: sundog.World) -> None:
        slots, y = world.zeros((2, 8)), world.zeros((8,))
        told = rf"(?s){text} does not .* same place.*rank 0: (\S+) bytes.*rank 1: (?!\1)\S+ bytes"
        with pytest.raises(RankMismatch, match=told):
            PLACES[text](world, slots[world.rank], y)
        PLACES[text](world, slots[1], y)

    run(main, 2)


def test_an_out_that_shares_memory_with_x(run: Run) -> None:
    def main(world: sundog.World) -> None:
        whole = torch.zeros(30, device=world.device)
        for start, first, apart in ((0, 7, 28), (20, 5, 60), (0, 0, 0)):
            x, out = whole[start : start + 8], whole[first : first + 16]
            with pytest.raises(ValueError, match=f"out shares memory with x, {apart} bytes apart"):
                world.all_gather(x, out)
        assert world.all_gather(whole[:8].fill_(3), whole[8:24]).tolist() == [3.0] * 16
        assert world.all_gather(whole[16:24].fill_(4), whole[:16]).tolist() == [4.0] * 16

    run(main, 2)


@pytest.mark.sim_only
def test_explain_says_why_on_rank_0_only(capfd: pytest.CaptureFixture[str]) -> None:
    def main(world: sundog.World) -> None:
        x = torch.zeros(4)
        for _ in range(2):
            world.all_gather(x, explain=True)
        world.all_gather(x, explain=True, algo="pull", config=SMALL)
        world.all_gather(x)

    sundog.run(main, 2, "sim")
    lines = capfd.readouterr().out.splitlines()
    first = (
        "all_gather: push: no measurements for the simulator; the default (candidates: push, pull"
    )
    assert [line[: len(first)] for line in lines[:2]] == [first] * 2
    assert lines[0].endswith("; out is not on the heap and goes through a copy that is")
    third = f"all_gather: pull, as asked, with {SMALL}; x is not on the heap and goes through"
    assert lines[2].startswith(third)
    assert len(lines) == 3


def test_a_call_keeps_no_autograd_graph(run: Run) -> None:
    """What it goes through would be a part of every graph, and keep what each of them saved."""

    def main(world: sundog.World) -> None:
        weight = torch.ones(4, 4, device=world.device, requires_grad=True)
        out = world.empty((4, 4))
        for _ in range(2):
            x = torch.exp(weight)
            with torch.no_grad():
                world.all_gather(x, algo="pull")
                world.broadcast(x, out=out)
                world.all_gather_matmul(x, x, shard="m", algo="barrier")
        copies = [staged.view() for call in world._plans for staged in call.staged.values()]
        found = [out, *copies]
        assert len(found) == 3
        assert [each.grad_fn for each in found] == [None] * 3

    run(main, 2)


def test_parameters_are_outputs_too(run: Run) -> None:
    """As torch's collectives write them: it is not a step of autograd's, in a copy or not."""

    def main(world: sundog.World) -> list[list[float]]:
        made = world.zeros((2, 2)), world.zeros((2, 2)), *torch.zeros((4, 2, 2)).unbind()
        outs = [torch.nn.Parameter(each.to(world.device)) for each in made]
        on_heap, turned, moved, direct, copied, fused = outs
        x = torch.full((2, 2), world.rank + 1.0, device=world.device)
        with torch.no_grad():
            world.broadcast(x, 1, out=on_heap)
            world.broadcast(x, 1, out=moved)
            world.all_reduce(x, out=direct, algo="one_shot")
            world.all_reduce(x, out=copied, algo="two_shot")
            world.matmul_all_reduce(x, x, out=fused, algo="two_shot")
            world.matmul_all_reduce(x, x, out=turned.T, algo="barrier")
        assert all(out.grad_fn is None for out in outs)
        return [out.unique().tolist() for out in outs]

    assert run(main, 2) == [[[2.0], [10.0], [2.0], [3.0], [3.0], [10.0]]] * 2


def test_a_handle_keeps_what_the_op_reads(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.zeros(4, device=world.device)
        handle = world.all_gather(x, async_op=True)
        assert any(each is x for each in handle.used)
        assert handle.wait() is handle.wait()

    run(main, 2)


def test_looking_for_a_tensor_takes_no_longer_on_a_full_heap(run: Run) -> None:
    """Every call asks whether its tensors are symmetric."""

    def main(world: sundog.World) -> float:
        def seconds(tensor: torch.Tensor) -> float:
            found = []
            for _ in range(5):
                start = time.process_time()
                assert all(world.is_symmetric(tensor) for _ in range(100))
                found.append(time.process_time() - start)
            return min(found)

        few = seconds(world.empty((4,)))
        many = [world.empty((4,)) for _ in range(2000)]
        return seconds(many[-1]) / few

    assert run(main, 1)[0] < 10


class Noted(dict):
    """What was looked for: was it there?"""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def get(self, key: Any, default: Any = None) -> Any:
        self.found.append(key in self)
        return super().get(key, default)


def test_only_a_call_with_the_same_tensors_is_repeated(run: Run) -> None:
    """Checks and plan are those of the first call only if nothing that they depend on changed."""

    def main(world: sundog.World) -> tuple[list[bool], list[list[float]]]:
        world._plans.repeats = recent = Noted()
        x, out = world.empty((2, 2)), world.empty((2, 2))
        values = torch.arange(4.0, device=world.device).view(2, 2) + world.rank
        sums = []

        def add(**given: Any) -> None:
            out.zero_()
            world.barrier()
            world.all_reduce(**{"x": x, "out": out, **given})
            sums.append(out.flatten().tolist())

        x.copy_(values)
        add()
        add()
        with pytest.raises(ValueError, match=r"out of shape .* not contiguous"):
            world.all_reduce(x, out=out.t())
        add(x=x[:1], out=out[:1])
        world.empty((1,))  # what is symmetric may have changed
        add()
        for given in ({"op": "max"}, {"op": "max"}, {"algo": "two_shot"}):
            add(**given)
        add(x=values.clone())  # not on the heap
        world.free(x)
        with world.stream(1):
            add(x=values)
        return recent.found, sums

    total, most = [1.0, 3.0, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0]
    found = [False, True, False, False, False, False, True, False, False, False]
    sums = [total, total, [1.0, 3.0, 0.0, 0.0], total, most, most, total, total, total]
    assert run(main, 2) == [(found, sums)] * 2


def test_a_result_at_the_place_of_an_earlier_one_is_a_repetition(run: Run) -> None:
    """So a loop without out= makes its checks once for each place that the allocator gives it."""

    def main(world: sundog.World) -> None:
        x, plans, places, looked = torch.ones(64, device=world.device), world._plans, set(), []
        find = plans.find
        plans.find = lambda key: looked.append(key) or find(key)  # what a repetition need not do
        for _ in range(20):
            out = world.all_reduce(x)
            assert out.tolist() == [2.0] * 64
            places.add(out.data_ptr())
            del out
        assert len(looked) == len(places)

    run(main, 2)


def test_what_began_in_inference_mode_goes_on_outside(run: Run) -> None:
    """Plans, their memory and symmetric tensors outlive the mode."""

    def main(world: sundog.World) -> None:
        def norm() -> list[Any]:
            rows, row = (torch.ones(sizes, device=world.device) for sizes in ((2, 64), (64,)))
            algos = algorithms("all_reduce_rms_norm")
            return [world.all_reduce_rms_norm(rows, rows, row, algo=algo) for algo in algos]

        def moved(op: str, algo: str) -> Any:
            x = torch.ones(8 * world.size, device=world.device)
            return getattr(world, op)(x, algo=algo, **({"dst": 0} if op == "reduce" else {}))

        names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "reduce")
        pairs = [(op, algo) for op in names for algo in algorithms(op) if algo != "gluon"]
        calls: list[Callable[[], Any]] = [functools.partial(moved, *pair) for pair in pairs]
        for made in (*calls, norm):
            with torch.inference_mode():
                made()
            made()
        with torch.inference_mode():
            mine = world.zeros(4)
            peer = world.peer(mine, 0)
        assert not peer.is_inference()
        mine.add_(1)

    run(main, 2)


def test_numbers_of_tensors_and_of_numpy(run: Run) -> None:
    """Ranks and splits of them are plain numbers to kernels, and to all ranks."""

    def main(world: sundog.World) -> None:
        x = torch.arange(200.0, device=world.device)
        for one in (torch.tensor(1), np.int64(1), np.int8(1)):
            reduced, gathered = world.reduce(x, one), world.gather(x, one)
            assert (reduced is None) == (gathered is None) == (world.rank != 1)
            assert torch.equal(world.broadcast(x * world.rank, one), x)
            assert torch.equal(world.scatter(x, one), x.view(2, -1)[world.rank])
            if world.rank == 0:
                world.send(x, one)
            else:
                assert torch.equal(world.recv(torch.empty_like(x), 1 - one), x)
        splits = [np.int8(100)] * 2  # times 4 bytes, that is no int8
        mine = x.view(2, -1)[world.rank]
        assert torch.equal(world.all_to_all(x, None, splits, splits), torch.cat([mine] * 2))
        assert torch.equal(world.all_gather(x[:100], splits=splits), torch.cat([x[:100]] * 2))
        for none in (torch.ones(2), "0", None, 1.0):
            with pytest.raises(ValueError, match="outside this world of 2 ranks"):
                world.reduce(x, none)

    run(main, 2)


def test_out_may_be_any_view_of_the_input(run: Run) -> None:
    def main(world: sundog.World) -> None:
        for op in (world.all_reduce, world.broadcast):
            x = torch.full((2, 3), float(world.rank + 1), device=world.device)
            op(x, out=x.view(-1))
            assert x.tolist() == [[3.0 if op == world.all_reduce else 1.0] * 3] * 2
            with pytest.raises(ValueError, match=r"6 elements of torch.int32, expected 6 of"):
                op(x, out=x.view(torch.int32))
            with pytest.raises(ValueError, match="shares memory with x, 4 bytes apart"):
                op(x.view(-1)[:5], out=x.view(-1)[1:])

    run(main, 2)


def test_complex_numbers_without_a_dimension(run: Run) -> None:
    """A sum of one number; and an output that a rank passes for nothing may be anything."""

    def main(world: sundog.World) -> None:
        one = torch.tensor(1 + 2j, device=world.device)
        for total in (world.all_reduce(one), world.reduce(one, 0)):
            assert total is None or (total.shape, total.item()) == ((), 2 + 4j)
        out = torch.ones(3, device=world.device) if world.rank else None
        assert (world.reduce(one.view(1), 0, out=out) is None) == bool(world.rank)
        for op in ("sum", "max"):
            with pytest.raises(ValueError, match=f"reduction of torch.complex64 by {op}: complex"):
                world.reduce_scatter(one, op)

    run(main, 2)


def test_a_repeat_is_not_negated_or_differentiated(run: Run) -> None:
    """They lie where the repeated call's tensor does, with its shape and dtype."""

    def main(world: sundog.World) -> None:
        x = torch.ones(64, device=world.device)
        call = functools.partial(torch.ops.sundog.all_reduce, op="sum", algo="auto")
        for _ in range(3):
            out = world.all_reduce(x)
            assert torch.equal(call(x, world=world.name), out)
        with pytest.raises(ValueError, match="negated when it is read"):
            world.all_reduce(torch._neg_view(x), out=out)
        assert call(torch._neg_view(x), world=world.name).tolist() == [-2.0] * 64
        leaf = x.detach().requires_grad_()
        for summed in (world.all_reduce(leaf), call(leaf, world=world.name)):
            assert summed.requires_grad
        with torch.no_grad():
            assert not world.all_reduce(leaf).requires_grad

    run(main, 2)
