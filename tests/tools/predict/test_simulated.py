"""Simulated time: of an op beside its model, of a user's kernel, and what a change does to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from sundog.collectives import (
    all_gather_push,
    all_reduce_atomic,
    all_reduce_low_latency,
    all_reduce_one_shot,
    all_reduce_two_shot,
)
from sundog.device import context, memory
from sundog.fused import all_gather_matmul_direct, all_gather_matmul_hbm_buffer
from sundog.hardware.description import Hardware, read
from sundog.ops import load
from sundog.ops.load import changed
from sundog.predict.expected import time
from sundog.tools._options import PredictOptions
from sundog.tools.predict.predict_command import run
from sundog.tools.predict.simulated import Simulated, Simulation, call_of, simulated
from sundog.world.world import World

H200X8 = read("h200x8")
HEAP = 1 << 26


def simulate_op(module, fields: dict, size: int, hardware: Hardware = H200X8, **how) -> Simulated:
    problem = changed(module.cases(size)[0], fields)
    config = module.default(problem, how.get("num_sms", 16))
    return simulated(Simulation(call_of(module, problem, config), hardware, size, HEAP, **how))


@pytest.mark.parametrize(
    ("name", "module", "numel"),
    [
        ("all_reduce.one_shot", all_reduce_one_shot, 1 << 15),
        ("all_reduce.two_shot", all_reduce_two_shot, 1 << 18),
        ("all_reduce.low_latency", all_reduce_low_latency, 1 << 10),
        ("all_reduce.atomic", all_reduce_atomic, 1 << 13),
        ("all_gather.push", all_gather_push, 1 << 18),
    ],
)
@pytest.mark.parametrize("machine", ["h200x8", "h200-shared"])
def test_it_agrees_with_the_model_of_an_op(name, module, numel, machine) -> None:
    """Two ways to put the same figures together: the op's bytes and rounds, and its kernel."""
    hardware = read(machine)
    problem = changed(module.cases(4)[0], {"numel": numel, "dtype": torch.bfloat16})
    config = module.default(problem, 16)
    found = simulated(Simulation(call_of(module, problem, config), hardware, 4, HEAP, num_sms=16))
    expected = time(name, problem, config, hardware, 16).seconds
    assert found.seconds == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(("shard", "own_first"), [("k", True), ("k", False), ("m", False)])
def test_a_crowd_at_one_link_is_in_the_model_too(shard: str, own_first: bool) -> None:
    """Ranks that all read rank 0's shard first take 1.7 times as long, and only along K."""
    problem = changed(
        all_gather_matmul_direct.cases(4)[0],
        {"m": 256, "n": 256, "k": 2048, "shard": shard, "dtype": torch.bfloat16},
    )
    config = replace(all_gather_matmul_direct.default(problem, 132), own_first=own_first)
    call = call_of(all_gather_matmul_direct, problem, config)
    found = simulated(Simulation(call, H200X8, 4, HEAP)).seconds
    expected = time("all_gather_matmul.direct", problem, config, H200X8)
    assert expected.seconds == pytest.approx(found, rel=0.2)
    assert expected.bound == "link"


def test_a_product_waits_for_flags_and_fetchers_help_then() -> None:
    """Workers alone would need two waves for 128 tiles: the model said 17.7 us, then 16.1."""
    module, op = all_gather_matmul_hbm_buffer, "all_gather_matmul.hbm_buffer"
    for sizes in ((512, 1024, 1024), (1024, 2048, 1024)):
        problem = module.Problem(*sizes, torch.bfloat16, 2)
        config = module.default(problem, 132)
        found = simulated(Simulation(call_of(module, problem, config), H200X8, 2, HEAP)).seconds
        assert time(op, problem, config, H200X8).seconds == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize(
    "op", ["matmul_all_gather.push", "matmul_reduce_scatter.push", "matmul_all_reduce.two_shot"]
)
def test_tiles_are_stored_after_their_products(op: str) -> None:
    """One wave of tiles: nothing is stored while they are multiplied (11.5 of 17.5 us)."""
    module = load.find(op)
    problem = module.Problem(1024, 1024, 512, torch.bfloat16, 2)
    config = module.default(problem, 132)
    found = simulated(Simulation(call_of(module, problem, config), H200X8, 2, HEAP)).seconds
    assert time(op, problem, config, H200X8).seconds == pytest.approx(found, rel=0.1)


def test_a_link_goes_on_while_programs_multiply() -> None:
    """Eight waves of tiles for all ranks: 137 us; products and stores one after the other, 177."""
    slow = H200X8.changed({"link.rate": 4e10, "link.pair_rate": 4e10})
    module, op = load.find("matmul_all_reduce.one_shot"), "matmul_all_reduce.one_shot"
    problem = module.Problem(512, 1024, 2048, torch.bfloat16, 4)
    tiles = dict(tile_m=64, tile_n=128, tile_k=64, num_stages=4)
    config = replace(module.default(problem, 132), programs=8, **tiles)
    found = simulated(Simulation(call_of(module, problem, config), slow, 4, HEAP)).seconds
    assert time(op, problem, config, slow).seconds == pytest.approx(found, rel=0.2)


def test_auto_avoids_a_gather_that_crosses_again_and_again() -> None:
    """Over links `direct` reads A once per column of tiles, in either order of shards."""
    for own_first in (False, True):
        problem = changed(
            all_gather_matmul_direct.cases(8)[0], {"m": 512, "n": 3584, "k": 8192, "shard": "k"}
        )
        config = replace(all_gather_matmul_direct.default(problem, 132), own_first=own_first)
        direct = time("all_gather_matmul.direct", problem, config, H200X8).seconds
        staged = all_gather_matmul_hbm_buffer.default(problem, 132)
        assert direct > 5 * time("all_gather_matmul.hbm_buffer", problem, staged, H200X8).seconds


def test_a_late_rank_delays_everybody_by_as_much() -> None:
    plain = simulate_op(all_reduce_two_shot, {"numel": 4096}, 4, num_sms=16)
    late = simulate_op(all_reduce_two_shot, {"numel": 4096}, 4, num_sms=16, late={3: 50e-6})
    assert late.seconds - plain.seconds == pytest.approx(50e-6, rel=0.02)
    for rank in range(3):
        assert max(late.waited[rank], key=lambda peer: late.waited[rank][peer]) == 3


def test_half_the_link_rate_takes_twice_the_time() -> None:
    half = {"link.rate": H200X8.link.rate / 2, "link.pair_rate": H200X8.link.pair_rate / 2}
    fast, slow = (
        simulate_op(
            all_gather_push, {"numel": 1 << 20, "dtype": torch.float16}, 2, machine, num_sms=64
        )
        for machine in (H200X8, H200X8.changed(half))
    )
    there = 2 * (1 << 20) / H200X8.link.rate
    assert fast.bounds["link"] > 0.5 * there
    assert slow.seconds - fast.seconds == pytest.approx(there, rel=0.25)


@triton.jit
def _multiply(a, b, out, K: tl.constexpr, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    at = tl.program_id(0) * TILE + place
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, K, TILE):
        left = tl.load(a + at[:, None] * K + k + place[None, :])
        right = tl.load(b + (k + place[:, None]) * TILE + place[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + at[:, None] * TILE + place[None, :], total.to(tl.bfloat16))


def multiply(world: World) -> None:
    """Sixteen tiles, of which each program takes one."""
    a = world.empty((16 * 64, 256), torch.bfloat16)
    b, out = (world.empty((rows, 64), torch.bfloat16) for rows in (256, 16 * 64))
    _multiply[(16,)](a, b, out, 256, 64)


def test_one_sm_fewer_takes_another_wave_of_tiles() -> None:
    seconds = {
        sms: simulated(Simulation(multiply, H200X8, 1, HEAP, sms)).seconds for sms in (8, 15, 16)
    }
    wave = seconds[16] - H200X8.gpu.launch_s
    assert seconds[15] - H200X8.gpu.launch_s == pytest.approx(2 * wave, rel=0.1)
    assert seconds[8] == pytest.approx(seconds[15], rel=0.05)  # both take two


def test_the_path_goes_from_the_start_to_the_end_without_gaps() -> None:
    made = simulate_op(all_reduce_two_shot, {"numel": 4096}, 4, num_sms=16, late={3: 20e-6})
    assert made.path[0].begin == pytest.approx(0.0, abs=21e-6)
    assert made.path[-1].end == pytest.approx(made.seconds)
    for before, after in zip(made.path, made.path[1:], strict=False):
        assert after.begin == pytest.approx(before.end, abs=1e-12)
    assert any(
        step.what == "flag from rank 3 to rank 0" or "rank 3" in step.what for step in made.path
    )
    assert sum(made.bounds.values()) == pytest.approx(made.seconds - made.path[0].begin)


@triton.jit
def _read_all(x, out, ctx, ROTATED: tl.constexpr, BLOCK: tl.constexpr):
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    for step in range(size):
        peer = (step + rank) % size if ROTATED else step
        for block in range(4):
            at = (tl.program_id(0) * 4 + block) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(memory.translate(x + at, peer, ctx)))


def test_a_peer_that_all_read_at_once_is_slower_by_their_number() -> None:
    """One rank's link serves all that are left; those that skip themselves go ahead.

    Of four ranks three read from rank 0, then two from rank 1, then one: six steps, not three.
    """

    def read(rotated: bool) -> Callable[[World], None]:
        def run(world: World) -> None:
            x, out = world.empty(16 * 4 * 4096), world.empty(16 * 4 * 4096)
            world.barrier()  # all have allocated
            _read_all[(16,)](x, out, world.ctx, rotated, 4096)

        return run

    slow = H200X8.changed({"link.rate": 3e10, "link.pair_rate": 3e10})
    apart, at_once = (
        simulated(Simulation(read(rotated), slow, 4, HEAP)) for rotated in (True, False)
    )
    step = 16 * 4 * 4096 * 4 / slow.link.rate  # every rank's bytes from one peer
    assert apart.bounds["link"] == pytest.approx(3 * step, rel=0.25)
    assert at_once.bounds["link"] == pytest.approx(6 * step, rel=0.25)


def test_the_command_simulates_a_file_and_writes_a_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline, result = tmp_path / "t.json", tmp_path / "r.json"
    example = str(Path(__file__).parents[3] / "examples" / "ring.py")
    options = PredictOptions(
        example, "h200x8", "", world=3, timeline=str(timeline), json=str(result)
    )
    assert run(options) == 0
    told = capsys.readouterr().out
    assert "us expected. Simulated with the data" in told
    assert "What torch computes or copies, such as the product" in told
    assert "critical path" in told
    [row] = json.loads(result.read_text())
    assert [kernel["name"] for kernel in row["kernels"]] == ["ring_kernel"] * 3
    events = json.loads(timeline.read_text())["traceEvents"]
    waits = [event for event in events if event.get("name") == "wait"]
    assert {event["pid"] for event in waits} == {0, 1, 2}
    starts, ends = ([e for e in events if e["ph"] == kind] for kind in "sf")
    assert len(starts) == len(ends) > 0


def test_a_simulated_op_has_its_models_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """Both say what a problem of this size takes: in bfloat16, or in the dtype that it names."""
    options = PredictOptions("all_gather.push", "h200x8", world=2, simulate=True)
    for more, dtype in (("", "bfloat16"), (",dtype=float32", "float32")):
        assert run(replace(options, problem=f"numel=64{more}")) == 0
        assert f"Problem(numel=64, dtype=torch.{dtype}, size=2)" in capsys.readouterr().out


def test_a_timeline_is_of_one_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    """A second one would be written over the first."""
    options = PredictOptions(
        "all_gather.push", "h200x8,h100x8", world=2, simulate=True, timeline="t.json"
    )
    assert run(options) == 2
    assert "a file has one simulation, and these are 2" in capsys.readouterr().err


def test_options_of_a_simulation_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PredictOptions("all_reduce", "h200x8", "numel=1024", timeline="x.json")) == 2
    assert "add --simulate" in capsys.readouterr().err


def test_a_function_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="launched no kernel"):
        simulated(Simulation(lambda world: None, H200X8, 2, HEAP))
