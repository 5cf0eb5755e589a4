"""Every op of ours can be traced, in every algorithm; tracing changes no result."""

from __future__ import annotations

import numpy as np
import pytest

from sundog.device import trace as points
from sundog.ops.op import OPS
from sundog.tools._options import TraceOptions
from sundog.tools.trace.trace_command import trace_op

pytestmark = pytest.mark.sim_only


@pytest.mark.parametrize("name", OPS)
def test_op_is_traced(name: str) -> None:
    timeline = trace_op(TraceOptions(name, world=3, backend="sim", out=""))
    assert timeline.dropped == 0
    assert (timeline.spans["end"] >= timeline.spans["begin"]).all()
    needs_signal = np.isin(timeline.spans["kind"], (points.WAIT.value, points.BARRIER.value))
    waits = timeline.spans[needs_signal]
    ended = waits["ended_by"] >= 0
    assert ended.any()
    if name != "all_to_all.mail":  # whose slots the call before may have emptied
        assert ended.all()
    single = waits[ended & (waits["peer"] >= 0)]
    assert (single["ended_by"] == single["peer"]).all()
    assert len(timeline.arrows) > 0


@pytest.mark.parametrize("name", ["all_gather.pull", "all_gather_matmul.hbm_buffer"])
def test_over_a_link_rank_0_waits_for_those_that_stand_in(name: str) -> None:
    timeline = trace_op(TraceOptions(name, world=3, backend="sim", link="pcie", out=""))
    waits = timeline.spans[timeline.spans["kind"] == points.WAIT.value]
    assert (waits["ended_by"] >= 0).all()
    assert {(rank, 0) for rank in (1, 2)} <= set(zip(waits["rank"], waits["ended_by"], strict=True))
    # Of those that are awaited together the last one ends the wait, and that may be rank 0 itself.
    signals = timeline.spans[timeline.spans["kind"] == points.SIGNAL.value]
    assert {1, 2} <= set(signals["rank"].tolist())
