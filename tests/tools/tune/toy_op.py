"""An op for the tuner's tests: doubles a tensor. Some of its configs misbehave when run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sundog import World
from sundog.errors import WaitRecord, WaitTimeout
from sundog.machine.launcher import Installed
from sundog.ops.op import Cost, Plan, agree

BAD = ("crash", "hang", "wrong", "refused", "raises", "fails", "large")


@dataclass(frozen=True)
class Problem:
    numel: int
    dtype: torch.dtype
    size: int
    bad: bool = False  # whether the space has configs that misbehave


@dataclass(frozen=True)
class Config:
    block: int = 64
    num_warps: int = 4
    mode: str = "fine"


def valid(problem: Problem, config: Config) -> str | None:
    if problem.numel == 0:
        return "numel 0: there is nothing to double"
    return f"block {config.block} is odd" if config.block % 2 else None


def space(problem: Problem) -> list[Config]:
    fine = [Config(block, warps) for block in (32, 64, 128, 256, 512) for warps in (1, 2, 4, 8)]
    return fine + [Config(mode=mode) for mode in BAD] * problem.bad


def default(problem: Problem, num_sms: int) -> Config:
    return Config()


def cost(problem: Problem) -> Cost:
    nbytes = problem.numel * problem.dtype.itemsize
    return Cost(0, nbytes, nbytes, 0)


def cases(size: int) -> list[Problem]:
    return [Problem(100, torch.float32, size)]


def inputs(world: World, problem: Problem, seed: int) -> tuple[torch.Tensor]:
    values = torch.arange(problem.numel) + 1000 * seed + world.rank
    return (world.empty((problem.numel,), problem.dtype, "x").copy_(values),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return 2 * parts[rank]


@triton.jit
def _scale(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, FACTOR * tl.load(x + at, mask=at < n), mask=at < n)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    refused = "this config is refused" if config.mode == "refused" else None
    agree(world, "toy", problem, config, refused)
    nbytes = {"large": 1 << 40, "hungry": 3 << 20}.get(config.mode, 0)
    workspaces = [world.empty((nbytes,), torch.uint8, "toy.workspace")] if nbytes else []

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        really = Installed._stack[-1].launcher is None  # not where launches are only noted
        if really and config.mode == "crash":
            os._exit(7)
        if really and config.mode == "hang":
            time.sleep(100)
        if config.mode == "late" and world.rank == 1:
            raise WaitTimeout("a wait ran out", WaitRecord(1, 0, "flag[0]", 1, 0, peer=0))
        if config.mode == "raises":
            raise KeyError("a bug in this op")
        if really and config.mode == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        _scale[(triton.cdiv(problem.numel, config.block),)](
            x,
            out,
            problem.numel,
            FACTOR=3 if config.mode == "wrong" else 2,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
        return out

    return Plan(world, problem, config, tuple(workspaces), launch)
