"""All-gather + GEMM in one kernel: fetchers pull the peers' tiles of A, workers multiply them.

It wins over a link; where peers' memory is as near as local memory, `direct` wins. A fetcher copies
`k_per_flag` blocks of a row of tiles (0: the whole row) into the staging buffer and sets a flag
(_fetchers.py). A worker multiplies its rank's part, in place, and what was staged, as far as its
flags are set (_workers.py). A fetcher that has nothing left to fetch becomes a worker.

Own and staged shards that are laid out alike are read by one descriptor of four dimensions, in one
loop over K. Elsewhere (AMD, or A in another order than the staging buffer) they are read by
pointers, in two loops. The result is deterministic, but each rank adds its own part first, so two
ranks with the same B may differ in the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..device import signal, tiles
from ..ops.op import Plan, agree
from ..ops.passive import stand_in
from . import _aligned, _fetchers, _gemm, _workers
from ._call import hint_of, resident
from ._fitting import FEW_SMS, fitting
from .all_gather_matmul import Problem, cases, cost, inputs, reference, unfit

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("a",)
_LONGEST = 1024  # elements of a row that a fetcher copies at once
_IN_FLIGHT = 128 << 10  # bytes that a fetcher may have in flight
LAYOUTS = ("k_contiguous", "m_contiguous")
# Tiles, warps and stages that a tuner tries.
_TRIED = ((64, 128, 4, 5), (128, 128, 4, 4), (128, 256, 8, 3), (128, 256, 8, 4))


@dataclass(frozen=True)
class Config(_gemm.Tiles):
    k_per_flag: int = 0  # blocks of a row that one flag stands for; 0: all
    fetchers: int = 16
    fetch_stages: int = 1  # the first 1/fetch_stages of the tiles ...
    first_fetchers: int = 0  # ... is fetched by this many programs; 0: as many as afterwards
    layout: str = "k_contiguous"  # of the staging buffer
    programs: int = 132

    @property
    def most_fetchers(self) -> int:
        return max(self.fetchers, self.first_fetchers)


def valid(problem: Problem, config: Config) -> str | None:
    if config.layout not in LAYOUTS:
        return f"layout {config.layout!r}: expected one of {', '.join(LAYOUTS)}"
    if config.k_per_flag < 0 or config.fetch_stages < 1 or config.first_fetchers < 0:
        return (
            f"k_per_flag {config.k_per_flag} and first_fetchers {config.first_fetchers} must be at "
            f"least 0, and fetch_stages {config.fetch_stages} at least 1"
        )
    if config.fetchers < 1 or config.most_fetchers > config.programs:
        return (
            f"{config.fetchers} fetchers, {config.first_fetchers} at first, of {config.programs} "
            "programs: at least one, and no more than there are"
        )
    return unfit(problem) or _gemm.valid(config, problem.dtype)


def space(problem: Problem) -> list[Config]:
    ways = [(fetchers, k, 1, 0) for fetchers in (8, 16, 32) for k in (0, 16, 32)]
    ways += [(132, k, 1, 0) for k in (1, 2, 4, 8, 16)]
    ways += [(16, k, 8, 64) for k in (0, 16, 32)]
    made = [
        Config(
            **tile, group_m=group_m, layout=layout,
            k_per_flag=k_per_flag, fetchers=fetchers, fetch_stages=stages, first_fetchers=first,
        )
        for tile in _gemm.tried(*_TRIED)
        for group_m in (4, 8)
        for fetchers, k_per_flag, stages, first in ways
        for layout in LAYOUTS
    ]  # fmt: skip
    return [config for config in made if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    """Let an eighth of a GPU's programs fetch; all of them on a part of a GPU."""
    m, k = problem.shard_shape
    config = Config(**fitting(problem.m, m, problem.n, k, problem.dtype, num_sms))
    rows, blocks = _workers.staged_tiles(problem, config)
    outputs = _workers.outputs(problem, config.tile_m, config.tile_n)
    if num_sms <= FEW_SMS:
        programs = max(1, min(num_sms, max(outputs, rows * blocks)))
        return replace(config, k_per_flag=8, fetchers=programs, programs=programs)
    most = max(1, num_sms // 8)
    # With fewer rows than fetchers, several of them share a row.
    per_flag = 0 if rows >= most else triton.cdiv(rows * blocks, most)
    fetchers = max(1, min(most, rows * blocks))
    programs = min(num_sms, fetchers + outputs)
    return replace(config, k_per_flag=per_flag, fetchers=fetchers, programs=programs)


@triton.jit
def _hbm_buffer_kernel(a, parts, b, out, to, bias, flags, ctx, cfg, shape):
    program = tl.program_id(0)
    epoch = tl.load(flags.epochs + program) + 1
    if program == 0:
        # My part of A is complete: it was written before this kernel on the stream. The peers'
        # fetchers read it only after they have seen this.
        _fetchers.tell_all(flags.ready, epoch, ctx, cfg)
    units = 0
    if program < cfg.most_fetchers:
        units = _fetchers.fetch(a, flags, epoch, ctx, cfg, shape)
    _workers.work(a, parts, b, out, to, bias, flags, epoch, ctx, cfg, shape)
    if units > 0:
        # The peers' fetchers with my number, which fetch as many units, have read my A, so it is
        # free when this kernel has ended.
        done = flags.done + program * cfg.size
        signal.wait_all(done, epoch, ctx, cfg.size, cfg.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the staging buffer. The plan takes a symmetric a, any b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "all_gather_matmul.hbm_buffer", problem, config, refused)
    if problem.k == 0:
        return Plan(world, problem, config, (), _workers.multiply_nothing(problem, config))
    rows, cols = _workers.staged_tiles(problem, config)
    groups = triton.cdiv(cols, _per_flag(problem, config))
    flags = _fetchers.Flags(
        world.signals(problem.size, "all_gather_matmul.ready"),
        world.signals((config.most_fetchers, problem.size), "all_gather_matmul.done"),
        world.signals(rows * groups, "all_gather_matmul.staged"),
        world.signals(1, "all_gather_matmul.tickets"),
        world.signals(config.programs, "all_gather_matmul.epochs"),
    )
    name = "all_gather_matmul.aligned"
    room = _aligned.room_for(world, problem.shard_shape, problem.dtype, config, name)
    shape = (problem.size - 1, *(problem.shard_shape if room is None else room.shape))
    rooms = _aligned.Rooms(world, config, config.programs)
    is_k = config.layout == "k_contiguous"
    storage = world.empty(
        shape if is_k else (shape[0], shape[2], shape[1]),
        problem.dtype,
        "all_gather_matmul.staging",
    )
    buffer = storage if is_k else storage.transpose(1, 2)
    busy = _busy_fetchers(rows, groups, config)
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *given, out = rest
        # Peers fetch from the copy; my kernel, which follows it, signals that it is there.
        a = _aligned.aligned(a, room, config, config.programs)
        [b] = rooms.wide(b)  # on a passive rank too: all launch the same number of kernels
        if world.passive:
            stand_in(world, flags.ready, flags.done[:busy], flags.epochs)
            return out
        bias = given[0] if given else None
        _hbm_buffer_kernel[(config.programs,)](
            *arguments(problem, config, a, buffer, b, out, bias, flags, world),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return out

    spaces = (*flags, storage) if room is None else (*flags, storage, room)
    return Plan(world, problem, config, spaces, launch)


def _busy_fetchers(rows: int, groups: int, config: Config) -> int:
    """Count the programs that have something to fetch: only these signal `done`."""
    first = triton.cdiv(rows, config.fetch_stages) * groups
    at_first = min(config.first_fetchers or config.fetchers, first)
    return max(at_first, min(config.fetchers, rows * groups - first))


def _per_flag(problem: Problem, config: Config) -> int:
    blocks = max(1, _workers.staged_tiles(problem, config)[1])
    return min(config.k_per_flag or blocks, blocks)


def arguments(
    problem: Problem, config: Config, a: torch.Tensor, buffer: torch.Tensor, b: torch.Tensor,
    out: torch.Tensor, bias: torch.Tensor | None, flags: _fetchers.Flags, world: World,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments; `isa` and the tests compile what a plan launches."""
    given, parts, a_kind = _workers.sharded(config, a, buffer)
    y, b_kind, to = _workers.others(problem, config, b, out, beside=False)
    shape = _gemm.shape_of(config, a_kind, b_kind, problem.activation)
    fetch = _gemm.constants(
        _fetchers.Fetch, size=problem.size, by_k=problem.shard == "k",
        per_shard=triton.cdiv(a.shape[1], config.tile_k), cols=problem.shard_shape[1],
        per_flag=_per_flag(problem, config),
        wide=_wide(problem, config, hint_of(a)), fetchers=config.fetchers,
        first_fetchers=config.first_fetchers or config.fetchers,
        most_fetchers=config.most_fetchers, stages=config.fetch_stages, ahead=_ahead(config, a),
        hint=hint_of(a), scope="gpu", trace=world.kernel_mode,
    )  # fmt: skip
    return given, parts, y, tiles.view(out), to, bias, flags, world.ctx, fetch, shape


def _wide(problem: Problem, config: Config, hint: tuple[int, int]) -> int:
    """Count the blocks that a fetcher copies together: of one shard and flag, if contiguous."""
    per_shard = triton.cdiv(problem.shard_shape[1], config.tile_k)
    common = math.gcd(
        per_shard, _per_flag(problem, config), config.tile_m, _LONGEST // config.tile_k
    )
    return 1 if hint[0] > 1 else max(1, common)


def _ahead(config: Config, a: torch.Tensor) -> int:
    """Count the tiles that a fetcher has in flight, in shared memory that a worker uses later."""
    if gpu_limits.here().is_amd:
        return 1
    return max(1, min(8, _IN_FLIGHT // (config.tile_m * config.tile_k * a.itemsize)))
