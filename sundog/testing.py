"""Use the checker in your tests: as one call, and as a pytest fixture.

    from sundog.testing import check

    def test_my_kernel():
        check(my_rank_function, world_size=4)        # raises AssertionError with the report

Where sundog is installed, pytest finds the fixture `sundog_check`, which is the same function.
Pytest loads this file at every start, so it imports torch only when something is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tools.check.schedules import Report
    from .world.world import World


def check(
    fn: Callable[[World], Any],
    world_size: int,
    schedules: int = 50,
    seed: int = 0,
    num_sms: int = 0,
    link: str = "",
) -> Report:
    """Run `fn` under many schedules; raise AssertionError with the report if anything is wrong.

    With link="pcie" all ranks but the first are passive (docs/gpu.md).
    """
    from .tools.check.schedules import check as find

    report = find(fn, world_size, schedules, seed, num_sms, link=link)
    if report.findings:
        raise AssertionError(str(report))
    return report


try:
    import pytest
except ImportError:  # only the fixture needs it
    pass
else:

    @pytest.fixture(name="sundog_check")
    def _sundog_check() -> Callable[..., Report]:
        return check
