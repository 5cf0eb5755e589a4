"""All-to-all, push: store every part straight to its place in the peer's output.

Programs are split by destination, and each rank begins with a different one. It moves every byte
once.
"""

from __future__ import annotations

from ..ops.op import Plan, World, agree
from . import _copy
from ._copy import Config, Span, plan_spans, wrong_programs
from ._copy import default_spans as default
from .all_to_all import Problem, cases, cost, inputs, reference

SYMMETRIC = ("out",)


def valid(problem: Problem, config: Config) -> str | None:
    if problem.splits is not None:
        return "its parts are not equal, so a rank does not know where they go: use mail"
    return wrong_programs(config, problem.size)


def space(problem: Problem) -> list[Config]:
    return [config for config in _copy.configs() if valid(problem, config) is None]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Plan for any contiguous x, which is only read, and a symmetric out."""
    agree(world, "all_to_all.push", problem, config, valid(problem, config))
    nbytes = problem.nbytes
    spans = [Span(p * nbytes, world.rank * nbytes, nbytes, nbytes) for p in range(problem.size)]
    return plan_spans(world, "all_to_all", problem, config, spans)
