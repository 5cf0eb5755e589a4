"""Traces by the GPU's clock: a signal is sent before it is seen, and the late rank is named."""

from __future__ import annotations

import numpy as np
import pytest
from tools.trace import late_op

from sundog.device import trace as points
from sundog.tools._options import TraceOptions
from sundog.tools.trace.timeline import Timeline, summarise
from sundog.tools.trace.trace_command import trace_op

pytestmark = pytest.mark.gpu("virtual")


def check(timeline: Timeline) -> None:
    """What holds of every trace: spans have two ends, waits were ended, by what came before."""
    assert timeline.unit == "ns"
    assert timeline.dropped == 0
    spans = timeline.spans
    assert (spans["end"] >= spans["begin"]).all()
    waits = spans[np.isin(spans["kind"], (points.WAIT.value, points.BARRIER.value))]
    assert (waits["ended_by"] >= 0).all()
    assert len(timeline.arrows) > 0
    for (_, _, sent), (_, _, seen) in timeline.arrows.tolist():
        assert sent <= seen


def test_late_rank_is_named() -> None:
    timeline = trace_op(TraceOptions("tools.trace.late_op", world=4, backend="virtual", out=""))
    check(timeline)
    right = summarise(timeline)[late_op.LATE_RANK + 1].waited_for
    assert max(right, key=lambda rank: right[rank]) == late_op.LATE_RANK


@pytest.mark.parametrize("op", ["all_gather.push", "all_gather.gluon", "all_reduce.two_shot"])
def test_ops(op: str) -> None:
    check(trace_op(TraceOptions(op, "numel=65536", world=4, backend="virtual", out="")))


def test_ranks_start_together() -> None:
    """After a gate: otherwise the first rank waits for as long as the other hosts launch."""
    timeline = trace_op(
        TraceOptions("all_gather.push", "numel=65536", world=8, backend="virtual", out="")
    )
    begins = [timeline.spans[timeline.spans["rank"] == rank]["begin"].min() for rank in range(8)]
    assert max(begins) < 100_000  # ns; launches without the gate are a hundred us apart each


@pytest.mark.parametrize("shard", ["k", "m"])
def test_fused(shard: str) -> None:
    problem = f"m=512,n=512,k=1024,shard={shard}"
    timeline = trace_op(
        TraceOptions("all_gather_matmul.hbm_buffer", problem, world=4, backend="virtual", out="")
    )
    check(timeline)
    for summary in summarise(timeline):
        assert summary.hidden is not None
