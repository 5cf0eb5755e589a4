"""The clock of programs, on a machine whose figures are round numbers."""

from __future__ import annotations

import pytest

from sundog.hardware.description import PairRates
from sundog.predict.clock import Clock, Server, Track
from sundog.predict.parts import TOGETHER, Ranks, way
from tests.predict.test_parts import CHIP, LINKED


def clock(size: int = 2) -> Clock:
    return Clock(Ranks.on(LINKED, size))


def track(rank: int, stages: int = 3) -> Track:
    return Track(rank, 0, "kernel", stages, 0.0, 0.0)


def test_simultaneous_users_share_a_server() -> None:
    server = Server()
    assert server.take(1.0, 2.0) == 3.0
    assert server.take(1.0, 2.0) == 5.0
    assert server.take(4.0, 2.0) == 7.0  # one second was left
    assert server.take(100.0, 2.0) == 102.0  # it was idle


def test_an_earlier_access_waits_for_work_not_for_later_time() -> None:
    server = Server()
    server.take(50.0, 2.0)
    assert server.take(1.0, 2.0) == 5.0


def test_loads_of_one_round_wait_together() -> None:
    one, two = track(0), track(0)
    for made, count in ((one, 1), (two, 2)):
        fresh = clock()
        for number in range(count):
            fresh.load(made, 0, 1e4, (number,))
        fresh.store(made, 0, 0.0)
    own = CHIP.load_s + 1e4 / CHIP.sm_load_rate
    assert one.now == pytest.approx(own, rel=0.02)
    assert two.now == pytest.approx(own + 1e4 / CHIP.sm_load_rate, rel=0.02)


def test_a_link_holds_programs_up_together() -> None:
    fresh, made = clock(), [track(0) for _ in range(50)]
    for each in made:
        fresh.load(each, 1, 1e6, (id(each),))
    for each in made:
        fresh.store(each, 0, 0.0)
    all_of_it = 50 * 1e6 / LINKED.link.pair_rate
    own = CHIP.load_s + LINKED.link.load_s + 1e6 / CHIP.sm_load_rate
    expected = (all_of_it**TOGETHER + own**TOGETHER) ** (1 / TOGETHER)
    assert max(each.now for each in made) == pytest.approx(expected, rel=0.01)
    assert made[-1].sums[3] > 0  # it says that the link was it


def test_a_measured_pair_has_its_own_rate() -> None:
    """Rank 0 reads from rank 1 at a tenth of the rate, and writes there as fast as others."""
    slow = LINKED.link.pair_rate / 10
    pair = PairRates(0, 1, slow, LINKED.link.pair_rate, slow)
    times = []
    for hardware in (LINKED, LINKED.changed({"link.pair_rates": (pair,)})):
        fresh, read, back, written = Clock(Ranks.on(hardware, 2)), track(0), track(1), track(0)
        fresh.load(read, 1, 1e8, ("one",))
        fresh.load(back, 0, 1e8, ("other",))
        for each in (read, back):
            fresh.store(each, each.rank, 0.0)
        fresh.store(written, 1, 1e8)
        times.append((read.now, back.now, written.now))
    usual, measured = times
    assert measured[1:] == usual[1:]
    assert measured[0] == pytest.approx(1e8 / slow, rel=0.1)
    assert measured[0] > 2 * usual[0]


def test_a_tile_that_was_read_before_comes_out_of_the_cache() -> None:
    fresh, first, again = clock(), track(0), track(0)
    for each in (first, again):
        fresh.load(each, 0, 1e8, ("the same",))
        fresh.store(each, 0, 0.0)
    memory = 1e8 / CHIP.read_rate
    own = CHIP.load_s + 1e8 / CHIP.sm_load_rate
    assert first.now == pytest.approx((own**TOGETHER + memory**TOGETHER) ** (1 / TOGETHER))
    assert own < again.now < first.now


def test_a_wait_ends_when_the_flag_has_come_and_knows_its_cause() -> None:
    fresh, source, target = clock(), track(0), track(1)
    source.now = 5e-6
    fresh.atomic(source, [(1, 64)], "XCHG", True, "release")
    fresh.atomic(target, [(1, 64)], "ADD", False, "acquire")
    assert target.now == pytest.approx(5e-6 + CHIP.flag_s + LINKED.link.flag_s)
    [wait] = target.waits
    assert (wait.begin, wait.cause, wait.written) == (0.0, source, 5e-6)


def test_polling_again_is_one_wait() -> None:
    fresh, source, target = clock(), track(0), track(1)
    for _ in range(5):
        fresh.atomic(target, [(1, 64)], "ADD", False, "acquire")
    assert target.now == pytest.approx(CHIP.load_s)
    source.now = 5e-6
    fresh.atomic(source, [(1, 64)], "XCHG", True, "release")
    fresh.atomic(target, [(1, 64)], "ADD", False, "acquire")
    assert target.now == pytest.approx(5e-6 + CHIP.flag_s + LINKED.link.flag_s)
    assert [wait.begin for wait in target.waits] == [0.0]


def test_a_relaxed_word_has_no_fence_to_wait_for() -> None:
    fresh, source, target = clock(), track(0), track(1)
    source.now = 5e-6
    fresh.atomic(source, [(1, 64)], "XCHG", True, "relaxed")
    fresh.atomic(target, [(1, 64)], "ADD", False, "relaxed")
    assert target.now == pytest.approx(5e-6 + way(LINKED, True, False, is_released=False))


def test_a_wait_for_all_peers_is_longer_with_more_of_them() -> None:
    many, ends = LINKED.changed({"gpu.peer_s": 1e-6}), []
    for size in (2, 4):
        fresh, target = Clock(Ranks.on(many, size)), track(0)
        words = [(0, 64 + 8 * rank) for rank in range(size)]
        for rank in range(1, size):
            fresh.atomic(track(rank), [words[rank]], "XCHG", True, "release")
        fresh.atomic(target, words, "ADD", False, "acquire")
        ends.append(target.now)
    assert ends[1] - ends[0] == pytest.approx(2e-6)


def test_relaxed_looks_are_in_flight_together() -> None:
    """Three words are one round, an acquire waits before the next, and a second turn is no load."""
    for order, rounds in (("relaxed", 1), ("acquire", 3)):
        fresh, made = clock(), track(1)
        for word in (64, 72, 80):
            fresh.atomic(made, [(1, word)], "ADD", False, order)
        assert made.now == pytest.approx(rounds * CHIP.load_s)
    before = made.now
    fresh.atomic(made, [(1, 80)], "ADD", False, "acquire")
    assert made.now == before


def test_an_atomic_addition_moves_its_elements() -> None:
    """A tile of 16 bits took as long as one of 32: 4 bytes were charged for every element."""
    places, times = [(1, n) for n in range(1 << 16)], []
    for size in (2, 4):
        fresh, made = clock(), track(0)
        fresh.atomic(made, places, "FADD", True, "relaxed", size)
        times.append(made.now)
    assert times[1] == pytest.approx(2 * times[0])


def test_a_ticket_does_not_wait_for_the_one_before() -> None:
    fresh, one, two = clock(), track(0), track(0)
    for each in (one, two):
        fresh.atomic(each, [(0, 64)], "ADD", True, "relaxed")
    assert one.now == two.now == pytest.approx(CHIP.load_s)


def test_a_release_comes_after_the_stores() -> None:
    fresh, made = clock(), track(0)
    fresh.store(made, 1, 1e6)
    made.stored = 1.0
    fresh.atomic(made, [(1, 64)], "XCHG", True, "release")
    assert made.now == 1.0


def test_operands_are_loaded_ahead_if_there_are_stages() -> None:
    times = {}
    for stages in (1, 3):
        fresh, made = clock(), track(0, stages)
        for step in range(20):
            fresh.load(made, 0, 1e4, (step,))
            fresh.product(made, (128, 256, 64), 16)
        times[stages] = made.now
    dots = 20 * 2.0 * 128 * 256 * 64 / (1e14 / CHIP.num_sms)
    assert times[3] == pytest.approx(dots + CHIP.load_s, rel=0.05)
    assert times[1] == pytest.approx(dots + 20 * CHIP.load_s, rel=0.05)
