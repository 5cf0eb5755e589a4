"""The parts of a time, each on a machine whose figures are round numbers."""

from __future__ import annotations

import dataclasses

import pytest

from sundog.hardware.description import Chip, Hardware, Link, Network
from sundog.predict.parts import (
    TOGETHER,
    Part,
    Ranks,
    Round,
    Traffic,
    barrier,
    beside,
    copied,
    flags,
    launch,
    product,
    resources,
    together,
    total,
    waves,
    way,
    words,
)

CHIP = Chip(
    num_sms=100, launch_s=1e-6, share_s=2e-6, flag_s=3e-6, load_s=1e-6, read_rate=1e12,
    write_rate=1e12, copy_rate=1.5e12, cache_rate=4e12, cache_bytes=1e7, sm_rate=1e10,
    sm_load_rate=2e10, poll_rate=1e9, matmul_rate=((1e9, 1e14), (1e12, 2e14)), tile_s=0.0,
)  # fmt: skip
NO_LINK = Link("none", 0, 0, 0, 0, 0, 0)
SWITCH = Link("switch", 1e11, 1e11, 2e-6, 5e-6, 0, 0)
SHARED = Hardware("shared", "one GPU", 1, 1, CHIP, NO_LINK)
LINKED = Hardware("linked", "eight GPUs", 1, 8, CHIP, SWITCH)


def seconds(found: list[Part]) -> dict[str, float]:
    return {part.name: part.seconds for part in found}


def test_ranks_share_the_sms_of_one_gpu() -> None:
    assert (Ranks.on(SHARED, 8).num_sms, Ranks.on(LINKED, 8).num_sms) == (12, 100)
    with pytest.raises(ValueError, match="linked has 8 GPUs, and 9 ranks are too many"):
        Ranks.on(LINKED, 9)
    with pytest.raises(ValueError, match="101 ranks on shared, whose GPU has 100 SMs"):
        Ranks.on(SHARED, 101)


def test_kernels_that_share_a_gpu_start_one_after_the_other() -> None:
    assert launch(Ranks.on(SHARED, 4)).seconds == pytest.approx(1e-6 + 3 * 2e-6)
    assert launch(Ranks.on(LINKED, 4)).seconds == pytest.approx(1e-6)


def test_a_barrier_crosses_the_link() -> None:
    assert barrier(Ranks.on(SHARED, 4)).seconds == pytest.approx(3e-6)
    assert barrier(Ranks.on(LINKED, 4), 2.0).seconds == pytest.approx(2 * (3e-6 + 5e-6))
    assert barrier(Ranks.on(LINKED, 1)).seconds == 0.0
    unfenced = barrier(Ranks.on(LINKED, 4), is_released=False).seconds
    assert unfenced == way(LINKED, True, False, is_released=False) < 3e-6 + 5e-6


def test_peers_in_host_memory_start_and_signal_on_the_gpu() -> None:
    """Their kernels only wait there, and their flags are not across the bus."""
    hosted = dataclasses.replace(LINKED, link=dataclasses.replace(SWITCH, kind="host"))
    assert launch(Ranks.on(hosted, 4)).seconds == launch(Ranks.on(SHARED, 4)).seconds
    assert barrier(Ranks.on(hosted, 4)).seconds == barrier(Ranks.on(SHARED, 4)).seconds
    assert copied(Ranks.on(hosted, 4), "loads", Traffic(0, 0), Round(0, 0, is_there=True), 1) == (
        copied(Ranks.on(LINKED, 4), "loads", Traffic(0, 0), Round(0, 0, is_there=True), 1)
    )


def test_a_barrier_takes_longer_with_more_peers() -> None:
    many = LINKED.changed({"gpu.peer_s": 1e-6})
    for size in (2, 3, 8):
        ranks = Ranks.on(many, size)
        assert barrier(ranks).seconds == pytest.approx(3e-6 + 5e-6 + (size - 2) * 1e-6)
        assert flags(ranks, 2.0).seconds == pytest.approx(2 * (3e-6 + 5e-6))
    assert flags(Ranks.on(many, 1), 2.0).seconds == 0.0


def test_only_the_first_trip_of_a_round_is_alone_on_the_link() -> None:
    """Eight trips of 6 us hardly show beside 100 us of others' data on the same link."""
    tile = Round(0, 0, trips=8.0, is_there=True)
    part = copied(Ranks.on(LINKED, 2), "copy", Traffic(0, 0, read_there=1e7), tile, 1)
    wait = CHIP.load_s + SWITCH.load_s
    both = ((7 * wait) ** TOGETHER + 1e-4**TOGETHER) ** (1 / TOGETHER)
    assert part.seconds == pytest.approx(wait + both)


def test_all_ranks_of_a_gpu_use_its_memory() -> None:
    alone = seconds(resources(Ranks.on(SHARED, 1), Traffic(1e6, 0)))
    four = seconds(resources(Ranks.on(SHARED, 4), Traffic(1e6, 0)))
    assert alone == pytest.approx({"memory": 1e-6})
    assert four == pytest.approx({"memory": 4e-6})


@pytest.mark.parametrize(
    ("read", "written", "expected"),
    [(1e6, 0, 1e-6), (0, 1e6, 1e-6), (1e6, 1e6, 2e6 / 1.5e12), (2e6, 1e6, 2e-6 + 1e-6 / 3)],
)
def test_memory_lies_between_what_was_measured(
    read: float, written: float, expected: float
) -> None:
    """Reads alone, writes alone, as much of both; and what is between them."""
    found = seconds(resources(Ranks.on(SHARED, 1), Traffic(read, written)))
    assert found["memory"] == pytest.approx(expected)


def test_what_is_read_again_comes_out_of_the_cache() -> None:
    found = seconds(resources(Ranks.on(SHARED, 2), Traffic(0, 0, reread=4e6)))
    assert found["cache"] == pytest.approx(2 * 1e-6)


def test_bytes_for_peers_cross_the_link() -> None:
    traffic = Traffic(1e6, 1e6, read_there=1e6, written_there=1e6)
    assert seconds(resources(Ranks.on(LINKED, 2), traffic))["link"] == pytest.approx(2e-5)
    assert "link" not in seconds(resources(Ranks.on(SHARED, 2), traffic))


def test_a_mesh_has_a_wire_for_every_pair() -> None:
    mesh = dataclasses.replace(
        LINKED, link=dataclasses.replace(SWITCH, kind="mesh", pair_rate=1e10)
    )
    traffic = Traffic(0, 0, written_there=7e5)
    eight = seconds(resources(Ranks.on(mesh, 8), traffic))["link"]
    assert eight == pytest.approx(1e-5)  # a seventh over each wire
    two = seconds(resources(Ranks.on(mesh, 2), traffic))["link"]
    assert two == pytest.approx(7e-5)  # one wire is all there is


def test_the_network_carries_what_leaves_the_node() -> None:
    nodes = dataclasses.replace(LINKED, nodes=2, network=Network(1e10, 1e-5))
    ranks = Ranks.on(nodes, 16)
    assert ranks.off_node == pytest.approx(8 / 15)
    found = seconds(resources(ranks, Traffic(0, 0, written_there=15e5)))["link"]
    assert found == pytest.approx(8e5 / 1e10)
    assert barrier(ranks).seconds == pytest.approx(3e-6 + 5e-6 + 1e-5)
    assert Ranks.on(nodes, 8).off_node == 0.0


@pytest.mark.parametrize(("count", "workers", "rounds"), [(10, 4, 3), (8, 4, 2), (0, 4, 1)])
def test_the_last_wave_may_be_small(count: int, workers: int, rounds: int) -> None:
    assert waves(count, workers) == rounds


def test_a_program_waits_for_its_loads() -> None:
    """Three rounds of a load, and of 10 KB at an SM's rates; nothing else is busy."""
    part = copied(Ranks.on(SHARED, 1), "copy", Traffic(0, 0), Round(2e4, 1e4), 3)
    assert part.bound == "programs"
    assert part.seconds == pytest.approx(3 * (1e-6 + 1e-6 + 1e-6))


def test_loads_of_peers_wait_longer() -> None:
    near = copied(Ranks.on(LINKED, 2), "copy", Traffic(0, 0), Round(0, 0), 4)
    far = copied(Ranks.on(LINKED, 2), "copy", Traffic(0, 0), Round(0, 0, is_there=True), 4)
    assert far.seconds - near.seconds == pytest.approx(4 * 2e-6)


def test_the_first_loads_wait_before_anything_flows() -> None:
    """With one round, latency and transfer come one after the other."""
    traffic = Traffic(0, 0, read_there=1e6)
    part = copied(Ranks.on(LINKED, 2), "copy", traffic, Round(0, 0, is_there=True), 1)
    assert part.seconds == pytest.approx(3e-6 + 1e-5)
    assert part.bound == "link"


def test_words_take_turns_at_the_memory_that_holds_them() -> None:
    """Two ranks send and poll a thousand words each; on its own the second start takes 2 us."""
    found = seconds(words(Ranks.on(SHARED, 2), 1e3))
    assert found["launch"] == CHIP.launch_s
    assert found["words"] == pytest.approx((4e-6**TOGETHER + 2e-6**TOGETHER) ** (1 / TOGETHER))


def test_words_wait_for_no_fence_and_cross_a_link_once() -> None:
    """A link takes 16 us for the 200,000 words that a rank sends; it does not poll across it."""
    fast = dataclasses.replace(LINKED, gpu=dataclasses.replace(CHIP, poll_rate=1e15))
    found = seconds(words(Ranks.on(fast, 4), 2e5, 2))
    assert found["words"] == pytest.approx(16e-6)
    assert found["words' way"] == pytest.approx(CHIP.load_s + 2 * way(LINKED, True, False, False))
    assert way(LINKED, True, False, False) < way(LINKED, True, False) == 3e-6 + 5e-6
    assert seconds(words(Ranks.on(fast, 1), 0))["words' way"] == CHIP.load_s


def test_products_come_in_waves_of_tiles() -> None:
    """200 tiles on 100 programs are two waves; one tile more is a third."""
    short = product(Ranks.on(SHARED, 1), (128 * 100, 256 * 2, 64), (128, 256), 100)
    assert short.bound == "memory"  # K is short
    free = dataclasses.replace(
        SHARED, gpu=dataclasses.replace(CHIP, read_rate=1e20, write_rate=1e20, copy_rate=1e20)
    )
    ranks = Ranks.on(free, 1)
    two = product(ranks, (128 * 100, 256 * 2, 6400), (128, 256), 100)
    three = product(ranks, (128 * 100 + 1, 256 * 2, 6400), (128, 256), 100)
    assert two.bound == "compute"
    assert three.seconds / two.seconds == pytest.approx(1.5, rel=0.01)


def test_a_larger_product_has_another_rate() -> None:
    def rate(k: int) -> float:
        sizes = (12800, 256, k)
        part = product(Ranks.on(SHARED, 1), sizes, (128, 256), 100)
        return 2.0 * 12800 * 256 * k / part.seconds

    assert rate(100_000) > 1.2 * rate(1000)


def test_small_tiles_multiply_slower() -> None:
    large = product(Ranks.on(SHARED, 1), (12800, 256, 4096), (128, 256), 100)
    small = product(Ranks.on(SHARED, 1), (12800, 256, 4096), (64, 64), 100)
    assert small.seconds > large.seconds


def test_together_is_between_the_longest_and_the_sum() -> None:
    parts = [Part("a", "memory", 3.0), Part("b", "link", 4.0)]
    squares, hardly = together("both", parts), beside("both", parts)
    assert 4.0 < hardly.seconds < squares.seconds < 7.0
    assert squares.bound == hardly.bound == "link"
    assert together("none", [Part("a", "memory", 0.0)]).seconds == 0.0


def test_a_total_is_bound_by_what_takes_most() -> None:
    made = total([Part("a", "latency", 2.0), Part("b", "link", 3.0), Part("c", "latency", 2.0)])
    assert (made.seconds, made.bound) == (7.0, "latency")
    assert total([Part("a", "link", 1.0)], late_s=5.0).seconds == 6.0
