"""All-to-all, pull: every part is loaded from the peer that has it.

The reverse of push: only this rank writes its output, which may be an ordinary tensor without a
copy, and the peers read x. Reads wait for the link where writes need not. With n bytes a tensor it
moves 2n at each rank, where push and a copy of its output move 4n.
"""

from __future__ import annotations

from ..ops.op import Plan, World, agree
from ._copy import Config, default, plan_pull, space, wrong_config
from .all_to_all import Problem, cases, cost, inputs, reference

SYMMETRIC = ("x",)


def valid(problem: Problem, config: Config) -> str | None:
    if problem.splits is not None:
        return "its parts are not equal, so a rank does not know where they lie: use mail"
    return wrong_config(config)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x, and any contiguous out."""
    agree(world, "all_to_all.pull", problem, config, valid(problem, config))
    return plan_pull(world, "all_to_all", problem, config, parts=problem.size)
