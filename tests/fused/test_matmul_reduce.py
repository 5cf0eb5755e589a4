"""GEMM + reduce-scatter and GEMM + all-reduce: worlds of 1 to 4, ragged tiles, the same bits."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import sundog
from sundog import gpu_limits
from sundog.device import tiles
from sundog.errors import RankMismatch
from sundog.fused import _gemm, _matmul_reduce, matmul_reduce_scatter
from sundog.fused import matmul_all_reduce_barrier as reduce_barrier
from sundog.fused import matmul_all_reduce_one_shot as one_shot
from sundog.fused import matmul_all_reduce_two_shot as two_shot
from sundog.fused import matmul_reduce_scatter_barrier as scatter_barrier
from sundog.fused._matmul_reduce import Config, Problem
from sundog.fused.matmul_all_reduce import matmul_all_reduce
from sundog.tools._subject import expected

from . import A_FEW, Run, answers, assembly, compare, compiled, spills

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SMALL = Config(16, 16, 16, group_m=2, num_warps=4, programs=3)
OPS = [matmul_reduce_scatter, one_shot, two_shot]
every_op = pytest.mark.parametrize("op", OPS, ids=["reduce_scatter", "one_shot", "two_shot"])


@every_op
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_worlds(run: Run, op: ModuleType, size: int) -> None:
    problem = Problem(24 * size, 8, 24, F16, size, has_bias=True)
    compare(run(answers(op, problem, SMALL), size))


CORNERS = {
    "one program": dict(programs=1),
    "more programs than tiles": dict(programs=16),
    "pointers": dict(descriptors=False),
    "one row a group": dict(group_m=1),
    "wide tiles": dict(tile_m=32, tile_n=64, tile_k=32),
}


@every_op
@pytest.mark.parametrize("corner", CORNERS)
def test_every_corner_of_the_config(run: Run, op: ModuleType, corner: str) -> None:
    compare(run(answers(op, Problem(40, 24, 24, F16, 2), replace(SMALL, **CORNERS[corner])), 2))


@every_op
@pytest.mark.parametrize(
    ("m", "n", "k"), [(2, 1, 1), (34, 33, 1), (6, 5, 19), (6, 5, 0), (0, 5, 3)]
)
def test_ragged_sizes(run: Run, op: ModuleType, m: int, n: int, k: int) -> None:
    compare(run(answers(op, Problem(m, n, k, BF16, 2), SMALL), 2))


@every_op
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_random_numbers_against_float64(run: Run, op: ModuleType, dtype: torch.dtype) -> None:
    """The partials travel in the input's type, so a partial may round the other way: once each."""
    problem = Problem(40, 24, 40, dtype, 2, True, "silu", F32)
    results = run(answers(op, problem, SMALL, calls=1, exact=False), 2)
    for ((got, want),) in results:
        assert torch.allclose(got, want, rtol=0, atol=64 * torch.finfo(dtype).eps)


def test_all_give_the_same_bits(run: Run) -> None:
    """As GEMM, then all_reduce: partials in rank order in float32, whatever the algorithm."""
    problem = Problem(40, 24, 40, F16, 3)

    def main(world: sundog.World) -> torch.Tensor:
        a, b = one_shot.inputs(world, problem, 1, exact=False)
        partial = _gemm.matmul(a, b, world.empty((40, 24), F16), None, None, SMALL, 2)
        unfused = world.all_reduce(partial)
        fused = [
            matmul_all_reduce(world, a, b, algo=each, config=SMALL)
            for each in ("one_shot", "two_shot", "barrier")
        ]
        return torch.stack([unfused.cpu(), *(each.cpu() for each in fused)])

    results = run(main, 3)
    assert all(torch.equal(each, results[0][0]) for result in results for each in result)


@pytest.mark.parametrize("op", [scatter_barrier, reduce_barrier])
def test_unfused(run: Run, op: ModuleType) -> None:
    """Into an output that is contiguous, and one that is not; and what it must leave to others."""
    problem = Problem(40, 24, 24, F16, 2)
    compare(run(answers(op, problem, SMALL), 2))

    def strided(world: sundog.World) -> list[tuple[torch.Tensor, torch.Tensor]]:
        given = op.inputs(world, problem, 1)
        wanted = expected(world, op, problem, given)
        out = world.empty(wanted.T.shape, F16, "out").T
        plan = op.plan(world, problem, SMALL)
        return [(plan(*given, out).cpu(), wanted)]

    compare(run(strided, 2))
    for change in (dict(has_bias=True), dict(activation="silu"), dict(out_dtype=F32)):
        assert "would come after a sum" in op.valid(replace(problem, **change), SMALL)


@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_the_calls(run: Run, layout: str) -> None:
    m, n, k, size = 24, 40, 16, 2

    def main(world: sundog.World) -> torch.Tensor:
        torch.manual_seed(world.rank)
        a = torch.randint(-2, 3, (m, k) if layout[0] == "N" else (k, m)).to(F16)
        b = torch.randint(-2, 3, (k, n) if layout[1] == "N" else (n, k)).to(F16)
        x, y = a if layout[0] == "N" else a.T, b if layout[1] == "N" else b.T
        bias = torch.arange(n).to(F16)
        wanted = torch.stack(world.exchange(x.double() @ y.double())).sum(0) + bias.double()
        x, y, bias = (t.to(world.device) for t in (x, y, bias))
        out = world.empty((m, n), F32)
        world.barrier()
        whole = world.matmul_all_reduce(x, y, bias, out_dtype=F32, out=out)
        rows = m // size * world.rank
        part = world.matmul_reduce_scatter(x, y, bias, out_dtype=F32)
        assert torch.equal(part.cpu(), wanted[rows : rows + m // size].float())
        return torch.stack([whole.cpu(), wanted.float()])

    for got, wanted in run(main, size):
        assert torch.equal(got, wanted)


@pytest.mark.sim_only
def test_bad_input(run: Run) -> None:
    def odd(world: sundog.World) -> None:
        world.matmul_reduce_scatter(torch.zeros(5, 4), torch.zeros(4, 4))

    with pytest.raises(ValueError, match=r"5 rows of a do not split into 2 equal slices; pad .* 6"):
        run(odd, 2)

    def rows(world: sundog.World) -> None:
        world.matmul_all_reduce(torch.zeros(4, 4), torch.zeros(5, 4))

    with pytest.raises(ValueError, match=r"b has shape \(5, 4\), expected 4 rows"):
        run(rows, 2)

    def many(world: sundog.World) -> None:
        one_shot.plan(world, Problem(4, 4, 4, F32, 2), replace(SMALL, programs=17))

    with pytest.raises(ValueError, match="17 programs wait for each other and 16 SMs"):
        run(many, 2)

    def differ(world: sundog.World) -> None:
        k = 4 + world.rank
        world.matmul_all_reduce(torch.zeros(4, k), torch.zeros(k, 4))

    with pytest.raises(RankMismatch, match=r"(?s)k=4.*k=5"):
        run(differ, 2)


@pytest.mark.parametrize(
    ("size", "dtype", "tile_n", "ahead"),
    [
        (8, BF16, 256, 3),
        (14, BF16, 256, 3),
        (15, BF16, 256, 1),
        (16, BF16, 128, 3),
        (8, F32, 256, 1),
    ],
)
def test_strips_that_shared_memory_has_no_room_for(
    size: int, dtype: torch.dtype, tile_n: int, ahead: int
) -> None:
    """16 ranks' strips of 256 columns take 262,144 bytes, and an H200 has 232,448 of them."""
    problem, config = Problem(8192, 4096, 1024, dtype, size), Config(64, tile_n, 16, programs=16)
    world = SimpleNamespace(size=size, kernel_mode=0)
    assert _matmul_reduce.constants(world, problem, config, 8192 // size).ahead == ahead


@pytest.mark.compat
@pytest.mark.parametrize(
    ("arch", "op"), [*(("sm_90", op) for op in OPS), ("gfx942", two_shot), ("gfx950", one_shot)]
)
def test_what_the_compilers_make_of_the_default(arch: str, op: ModuleType) -> None:
    problem = Problem(8192, 4096, 1024, BF16, 8)
    rows = 8192 if op is one_shot else 1024
    world = SimpleNamespace(size=problem.size, kernel_mode=0)
    with gpu_limits.aim(arch):
        config = op.default(problem, 132)
        constants = _matmul_reduce.constants(world, problem, config, rows)
    a, b = torch.empty(8192, 1024, dtype=BF16), torch.empty(1024, 4096, dtype=BF16)
    x, y, shape = _matmul_reduce.given(problem, config, a, b)
    words = torch.empty(64, dtype=torch.int64)
    inbox = tiles.View(torch.empty(8192, 4096, dtype=BF16), 1024, 4096, 4096, 1)
    out = tiles.view(torch.empty(8192, 4096, dtype=BF16))
    kind = op._Flags if op is two_shot else _matmul_reduce.InboxFlags
    flags = kind(*[words] * len(kind._fields))
    args = (x, y, out, None, inbox, flags, words, 1024, constants, shape)
    name = {one_shot: "one_shot", two_shot: "two_shot"}.get(op, "reduce_scatter")
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    made = compiled(getattr(op, f"_{name}_kernel"), arch, args, options)
    text = assembly(made)
    assert spills(made) <= A_FEW
    if arch == "sm_90":
        strips = 2 * problem.size * constants.strip * config.tile_n * BF16.itemsize
        assert strips <= made.metadata.shared <= gpu_limits.LIMITS[arch].shared
        assert len(re.findall(r"wgmma\.mma_async", text)) == 4
        assert len(re.findall(r"cp\.async\.bulk\.tensor", text)) == 6
        assert re.search(r"\bst\.global\.v4\.b32", text)
        assert re.search(r"\bcp\.async\.cg\.shared\.global .*, 0x10,", text)  # 16 bytes
        assert not re.findall(r"\b(?:ld|st)\.global\.b16", text)
    else:
        assert re.search("mfma", text)
        assert re.search(r"(?:buffer|global)_load_dwordx4", text)
