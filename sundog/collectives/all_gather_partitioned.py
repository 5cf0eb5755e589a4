"""All-gather, partitioned: each program copies my tensor to one peer.

Every rank loads its tensor W times, mostly from the cache. Each program waits for one peer instead
of all, so a late rank holds up only what goes to it.
"""

from __future__ import annotations

from ..ops.op import Plan, World, agree
from ._copy import Config, Span, plan_spans
from ._copy import default_spans as default
from ._copy import space_spans as space
from ._copy import valid_spans as valid
from .all_gather import Problem, cases, cost, inputs, reference

SYMMETRIC = ("out",)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Plan for any contiguous x, which is only read, and a symmetric out."""
    agree(world, "all_gather.partitioned", problem, config, valid(problem, config))
    nbytes = problem.nbytes
    spans = [Span(0, world.rank * nbytes, nbytes, nbytes)] * problem.size
    return plan_spans(world, "all_gather", problem, config, spans)
