"""The fit finds figures again from times that a model made of them."""

from __future__ import annotations

import pytest

from sundog.tools.calibrate_command import errors, fit

SIZES = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]


def times(figures: dict[str, float]) -> list[float]:
    return [figures["latency"] + size / figures["rate"] for size in SIZES]


def test_figures_are_found_again() -> None:
    true = {"latency": 4e-6, "rate": 3e11}
    found = fit({"latency": 1e-5, "rate": 1e10}, times, times(true))
    assert found == pytest.approx(true, rel=1e-4)


def test_a_figure_without_effect_stays() -> None:
    true = {"latency": 4e-6, "rate": 3e11, "unused": 7.0}
    found = fit({"latency": 1e-5, "rate": 1e10, "unused": 7.0}, times, times(true))
    assert found["unused"] == pytest.approx(7.0)


def test_small_times_count_as_much_as_large_ones() -> None:
    """Of a latency that is 20 % off, a fit of absolute times would not notice anything."""
    wanted = times({"latency": 4e-6, "rate": 3e11})
    found = fit({"latency": 4.8e-6, "rate": 3e11}, times, wanted)
    assert max(abs(each) for each in errors(times(found), wanted)) < 1e-3
