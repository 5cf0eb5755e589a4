"""All-to-all, mail: chunk by chunk through the receivers' mailboxes.

Nothing need be symmetric, and no rank need know what the others send to each other, so it serves
unequal parts. It writes every byte once more than push does, mostly to the cache.
"""

from __future__ import annotations

import torch

from ..ops.op import Plan, World, agree
from . import _copy
from ._copy import Config, wrong_programs
from ._mailbox import Mail, default_mail, messages
from .all_to_all import Problem, cost, inputs, reference

SYMMETRIC = ()


def valid(problem: Problem, config: Config) -> str | None:
    return wrong_programs(config, problem.size)


def space(problem: Problem) -> list[Config]:
    return [config for config in _copy.configs() if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    """Choose by the average part."""
    nbytes = sum(map(sum, problem.matrix)) * problem.dtype.itemsize // problem.size**2
    return default_mail(nbytes, problem.size, num_sms)


def cases(size: int) -> list[Problem]:
    """Return small problems: empty and odd messages, and one that is longer than all slots.

    Only one is long: if all were, each would show its sender how far the others are, and no sender
    would have to wait for an empty slot.
    """
    row = [0, 37, 1, 5, 0, 2, 301, 3]
    splits = [[row[(j - i) % size % len(row)] for j in range(size)] for i in range(size)]
    splits[0][-1] = 5200
    whole = tuple(tuple(each) for each in splits)
    return [Problem(0, torch.int32, size, whole), Problem(3, torch.float64, size)]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate boxes and flags. The plan takes any contiguous x and out."""
    agree(world, "all_to_all.mail", problem, config, valid(problem, config))
    mail = Mail(world, "all_to_all", config)
    sent = problem.matrix[world.rank]
    received = [row[world.rank] for row in problem.matrix]
    told = messages(sent, received, problem.dtype.itemsize)
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        mail.launch(x, out, told)
        return out

    return Plan(world, problem, config, mail.workspaces, launch)
