"""All-gather, pull: load every rank's tensor, store it here.

The reverse of push: a barrier says that the peers' tensors are there, a second one that all ranks
have read mine. Only this rank touches the output, which may be any tensor. Reads wait for the link
where writes need not, so pull wins only where the output is an ordinary tensor and staging it for
push would cost more.
"""

from __future__ import annotations

from ..ops.op import Plan, World, agree
from ._copy import Config, default, plan_pull, space, valid
from .all_gather import Problem, cases, cost, inputs, reference

SYMMETRIC = ("x",)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x, and any contiguous out."""
    agree(world, "all_gather.pull", problem, config, valid(problem, config))
    return plan_pull(world, "all_gather", problem, config, parts=1)
