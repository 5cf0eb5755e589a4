"""All-gather + GEMM: every corner of the config, both ways of sharding, worlds of 1 to 4."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import sundog
from sundog import gpu_limits
from sundog.errors import OutOfHeap, RankMismatch
from sundog.fused import _gemm, _workers
from sundog.fused import all_gather_matmul_barrier as barrier
from sundog.fused import all_gather_matmul_direct as direct
from sundog.fused import all_gather_matmul_hbm_buffer as hbm_buffer
from sundog.fused._fetchers import Flags
from sundog.fused.all_gather_matmul import Problem, all_gather_matmul
from sundog.hardware.description import read as read_hardware
from sundog.ops import load
from sundog.ops.select import Entry, choose, entries, user_file, write_entries
from sundog.tools._launches import record
from sundog.tools.predict.simulated import Simulation, call_of, simulated

from . import A_FEW, Run, answers, assembly, compare, compiled, spills

SMALL = hbm_buffer.Config(16, 16, 16, group_m=2, num_warps=4, k_per_flag=2, fetchers=2, programs=4)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def by_k(size: int, m: int = 40, n: int = 16, k: int = 24, dtype: torch.dtype = F16) -> Problem:
    """Three rows of tiles, which are not a multiple of the group; two blocks of K on every rank."""
    return Problem(m, n, k * size, dtype, size, "k")


def by_m(size: int, m: int = 40, n: int = 16, k: int = 40, dtype: torch.dtype = F16) -> Problem:
    return Problem(m * size, n, k, dtype, size, "m")


both_ways = pytest.mark.parametrize("problem_of", [by_k, by_m])

CORNERS = {
    "a flag per block": dict(k_per_flag=1),
    "a flag per row": dict(k_per_flag=0),
    "a flag for more than a row": dict(k_per_flag=99),
    "flags across peers": dict(k_per_flag=4),
    "one fetcher": dict(fetchers=1),
    "all programs fetch": dict(fetchers=4),
    "more fetchers than tiles": dict(fetchers=16, programs=16),
    "one program": dict(fetchers=1, programs=1),
    "more at first": dict(fetchers=1, first_fetchers=4, fetch_stages=2),
    "fewer at first": dict(fetchers=3, first_fetchers=1, fetch_stages=3),
    "more stages than rows": dict(fetch_stages=50, first_fetchers=3),
    "one row a group": dict(group_m=1),
    "all rows a group": dict(group_m=64),
    "m_contiguous": dict(layout="m_contiguous"),
    "pointers": dict(descriptors=False),
    "pointers, m_contiguous": dict(descriptors=False, layout="m_contiguous"),
}


@both_ways
@pytest.mark.parametrize("corner", CORNERS)
def test_every_corner_of_the_config(run: Run, problem_of: type, corner: str) -> None:
    problem = problem_of(3 if problem_of is by_k else 2)
    config = replace(SMALL, **CORNERS[corner])
    assert hbm_buffer.valid(problem, config) is None
    compare(run(answers(hbm_buffer, problem, config), problem.size))


@both_ways
@pytest.mark.parametrize("op", [barrier, hbm_buffer, direct])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_worlds(run: Run, op: ModuleType, problem_of: type, size: int) -> None:
    problem = problem_of(size)
    compare(run(answers(op, problem, op.default(problem, 8)), size))


@both_ways
@pytest.mark.parametrize("op", [barrier, hbm_buffer, direct])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (17, 33, 1), (3, 5, 19), (16, 16, 16), (5, 3, 0)]
)
def test_ragged_sizes(run: Run, op: ModuleType, problem_of: type, m: int, n: int, k: int) -> None:
    problem = problem_of(2, m, n, k, BF16)
    config = SMALL if op is hbm_buffer else op.Config(16, 16, 16, num_warps=4, programs=2)
    compare(run(answers(op, problem, config), 2))


@both_ways
@pytest.mark.parametrize("op", [barrier, hbm_buffer, direct])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_random_numbers_against_float64(
    run: Run, op: ModuleType, problem_of: type, dtype: torch.dtype
) -> None:
    """Bias, silu and a float32 output: what is left is the rounding of adding in float32."""
    problem = replace(problem_of(2, dtype=dtype), has_bias=True, activation="silu", out_dtype=F32)
    results = run(answers(op, problem, op.default(problem, 8), calls=1, exact=False), 2)
    for ((got, want),) in results:
        assert got.dtype == F32
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_direct_adds_as_a_gemm_does(run: Run) -> None:
    """In the same order on every rank: the bits are those of barrier, also where sums round."""
    problem = replace(by_k(3, k=32), out_dtype=F32)
    results = [
        run(answers(op, problem, op.Config(16, 16, 16, programs=2), 1, exact=False), 3)
        for op in (barrier, direct)
    ]
    for ((gathered, _),), ((read, want),) in zip(*results, strict=True):
        assert torch.equal(gathered, read)
        assert not torch.equal(read, want)


@both_ways
@pytest.mark.parametrize("descriptors", [False, True])
def test_direct_beginning_with_the_own_shard(run: Run, problem_of: type, descriptors: bool) -> None:
    options: Any = dict(descriptors=descriptors, num_warps=4, programs=2, own_first=True)
    compare(run(answers(direct, problem_of(3), direct.Config(16, 16, 16, **options)), 3))


@pytest.mark.sim_only
@pytest.mark.parametrize(("shard", "programs"), [("k", 4), ("m", 1)])
def test_direct_spreads_its_reads_over_the_peers(shard: str, programs: int) -> None:
    """In simulated time, over slow links: rank 0 first, one peer serves all others at a time."""
    slow = read_hardware("h200x8").changed({"link.rate": 1e9, "link.pair_rate": 1e9})
    problem = direct.Problem(128, 32, 512, F16, 4, shard)

    def seconds(own_first: bool) -> float:
        options: Any = dict(num_warps=4, programs=programs, own_first=own_first)
        call = call_of(direct, problem, direct.Config(32, 32, 64, **options))
        return simulated(Simulation(call, slow, 4, 1 << 24)).seconds

    assert seconds(True) < 0.8 * seconds(False)


@both_ways
@pytest.mark.parametrize(
    ("members", "apart"), [((1, 3), 2), ((0, 1, 3), None), ((2, 1), None), ((2,), 1)]
)
def test_direct_in_a_group(
    run: Run, problem_of: type, members: tuple[int, ...], apart: int | None
) -> None:
    """By descriptor, where heaps are evenly spaced, in the order of the ranks; else by pointers."""
    problem = problem_of(len(members))
    config = direct.Config(16, 16, 16, group_m=2, num_warps=4, programs=2)

    def main(world: sundog.World) -> list:
        group = world.group(members)
        if group is None:
            return []
        if world.backend in ("sim", "virtual") and len(members) > 1:
            assert world.rank_stride is not None
            assert group.rank_stride == (apart and apart * world.rank_stride)
        return answers(direct, problem, config)(group)

    compare(run(main, 4))


@both_ways
@pytest.mark.parametrize("op", [hbm_buffer, direct])
@pytest.mark.parametrize("descriptors", [False, True])
def test_an_infinity_stays_in_its_column(
    run: Run, op: ModuleType, problem_of: type, descriptors: bool
) -> None:
    """A shard of 24 ends within a tile: its zeros must not meet the next shard's infinity in B."""
    problem = problem_of(2, k=24)
    config = op.Config(16, 16, 16, descriptors=descriptors, programs=16)

    def main(world: sundog.World) -> torch.Tensor:
        plan = op.plan(world, problem, config)
        a, b = op.inputs(world, problem, 1)
        a.fill_(1.0)
        b.fill_(1.0)
        b[24 % problem.k, 5] = float("inf")
        out = torch.empty(problem.m, problem.n, dtype=F16, device=world.device)
        world.barrier()
        return plan(a, b, out).cpu()

    for got in run(main, 2):
        wanted = torch.full_like(got, problem.k)
        wanted[:, 5] = float("inf")
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("algo", ["auto", "barrier", "hbm_buffer", "direct", "copy_engine"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("on_heap", [False, True])
def test_the_call(run: Run, algo: str, layout: str, on_heap: bool) -> None:
    """Any strides, tensors on the heap or not; the second call finds the plan of the first."""
    m, n, k, size = 24, 40, 32, 2

    def main(world: sundog.World) -> torch.Tensor:
        torch.manual_seed(world.rank)
        make = world.empty if on_heap else torch.empty
        a = make((m, k) if layout[0] == "N" else (k, m), dtype=F16).to(world.device)
        b = torch.empty((k * size, n) if layout[1] == "N" else (n, k * size), dtype=F16)
        for x in (a, b):
            x.copy_(torch.randint(-2, 3, x.shape))
        whole = torch.cat(world.exchange((a if layout[0] == "N" else a.T).cpu()), dim=1)
        x, y = a if layout[0] == "N" else a.T, b if layout[1] == "N" else b.T
        bias = torch.arange(n).to(F16)
        wanted = (whole.double() @ y.double() + bias.double()).to(F16)
        y, bias = y.to(world.device), bias.to(world.device)
        world.barrier()
        outs = [all_gather_matmul(world, x, y, bias, algo=algo) for _ in range(2)]
        return torch.stack([*(out.cpu() for out in outs), wanted])

    for first, second, wanted in run(main, size):
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted)


BAD = {
    "two dimensions": lambda w, a, b: (a[0], b, {}),
    "b has shape (31, 8), expected 32 rows": lambda w, a, b: (a, b[:31], {}),
    "b has shape (), expected 32 rows": lambda w, a, b: (a, b[0, 0], {}),
    "b is a list, expected a tensor": lambda w, a, b: (a, [b], {}),
    "bias is on the meta device, without data": lambda w, a, b: (
        a, b, dict(bias=torch.zeros(8, dtype=F16, device="meta")),
    ),
    "shard 'n'": lambda w, a, b: (a, b, dict(shard="n")),
    "b has shape (32, 8), expected 16 rows": lambda w, a, b: (a, b, dict(shard="m")),
    "bias has shape (7,)": lambda w, a, b: (a, b, dict(bias=torch.zeros(7, dtype=F16))),
    "activation 'relu'": lambda w, a, b: (a, b, dict(activation="relu")),
    "a torch.float16, b torch.bfloat16": lambda w, a, b: (a, b.to(BF16), {}),
    "output torch.int32": lambda w, a, b: (a, b, dict(out_dtype=torch.int32)),
    "out is (3, 3) of torch.float32, expected (4, 8)": lambda w, a, b: (
        a, b, dict(out=torch.zeros(3, 3)),
    ),
    "out shares memory with b": lambda w, a, b: (a, b, dict(out=b[:4])),
    "algo 'fast' is not known": lambda w, a, b: (a, b, dict(algo="fast")),
    "config {} is not a Config": lambda w, a, b: (a, b, dict(config={})),
    "tile_m 3 is not a power": lambda w, a, b: (
        a, b, dict(algo="hbm_buffer", config=replace(SMALL, tile_m=3)),
    ),
    "99 programs wait for each other and 16 SMs": lambda w, a, b: (
        a, b, dict(algo="hbm_buffer", config=replace(SMALL, programs=99)),
    ),
}  # fmt: skip


@pytest.mark.sim_only
@pytest.mark.parametrize("message", BAD)
def test_bad_input(run: Run, message: str) -> None:
    def main(world: sundog.World) -> None:
        a, b = torch.zeros(4, 16, dtype=F16), torch.zeros(32, 8, dtype=F16)
        x, y, options = BAD[message](world, a, b)
        all_gather_matmul(world, x, y, **options)

    with pytest.raises(ValueError, match=re.escape(message)):
        run(main, 2)


@pytest.mark.sim_only
@pytest.mark.parametrize("apart", [0, -1])
def test_an_output_may_touch_b_but_not_overlap_it(run: Run, apart: int) -> None:
    def main(world: sundog.World) -> None:
        whole = torch.ones(32 * 8 + 4 * 8, dtype=F16)
        b, out = whole[: 32 * 8].view(32, 8), whole[32 * 8 + apart :][: 4 * 8].view(4, 8)
        all_gather_matmul(world, torch.ones(4, 16, dtype=F16), b, out=out)
        assert out.eq(32).all()

    if apart == 0:
        run(main, 2)
    else:
        with pytest.raises(ValueError, match="out shares memory with b"):
            run(main, 2)


def test_ranks_that_differ_are_named(run: Run) -> None:
    def shapes(world: sundog.World) -> None:
        b = torch.zeros(32, 8 + world.rank, device=world.device)
        all_gather_matmul(world, world.zeros((4, 16)), b)

    with pytest.raises(RankMismatch, match=r"(?s)n=8.*n=9"):
        run(shapes, 2)

    def places(world: sundog.World) -> None:
        a = world.zeros((16, 16))
        x = a if world.rank == 0 else a.T
        all_gather_matmul(world, x, torch.zeros(32, 8, device=world.device))

    with pytest.raises(RankMismatch, match=r"(?s)same place.*strides \(16, 1\).*strides \(1, 16\)"):
        run(places, 2)


@pytest.mark.sim_only
def test_a_staging_buffer_that_does_not_fit(run: Run) -> None:
    problem = Problem(512, 16, 1024 * 2, F16, 2, "k")
    config = replace(SMALL, tile_m=128, tile_k=64)

    def main(world: sundog.World) -> None:
        hbm_buffer.plan(world, problem, config)

    with pytest.raises(OutOfHeap, match=r"all_gather_matmul.staging.*1,048,576") as error:
        run(main, 2, heap_size=1 << 20)
    enough = str(error.value).rpartition("about ")[2].partition(" ")[0]
    run(main, 2, heap_size=int(enough.replace(",", "")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(layout="rows"), "layout 'rows': expected one of k_contiguous, m_contiguous"),
        (dict(k_per_flag=-1), "k_per_flag -1"),
        (dict(fetch_stages=0), "fetch_stages 0"),
        (dict(fetchers=0), "0 fetchers, 0 at first, of 4 programs"),
        (dict(first_fetchers=5), "2 fetchers, 5 at first, of 4 programs"),
        (dict(tile_n=512, tile_k=128), "bytes of shared memory"),
        (dict(tile_m=2048, tile_n=1024, num_stages=1), "2048x1024 has more than the 1,048,576"),
    ],
)
def test_configs_that_are_refused(change: dict, reason: str) -> None:
    assert reason in (hbm_buffer.valid(by_k(2), replace(SMALL, **change)) or "")


@pytest.mark.parametrize("op", [barrier, hbm_buffer, direct])
def test_what_a_tuner_may_try_is_valid(op: ModuleType) -> None:
    problem = Problem(4096, 3584, 8192, BF16, 8, "k")
    configs = [*op.space(problem), op.default(problem, 132)]
    assert len(set(configs)) > 10
    assert all(op.valid(problem, config) is None for config in configs)


@pytest.mark.parametrize("shard", ["k", "m"])
@pytest.mark.parametrize("m", [16, 64, 256, 1024, 4096, 16384])
def test_the_default_has_work_for_all(m: int, shard: str) -> None:
    """Sixteen fetchers on 132 SMs, also with fewer rows of tiles than that."""
    problem = Problem(m, 3584, 8192, BF16, 8, shard)
    config = hbm_buffer.default(problem, 132)
    assert hbm_buffer.valid(problem, config) is None
    assert config.fetchers == 16
    assert config.programs > 120
    rows, blocks = _workers.staged_tiles(problem, config)
    assert rows * -(-blocks // (config.k_per_flag or blocks)) >= 14


def test_auto_goes_by_what_was_measured() -> None:
    """The call's problem names its output's type, an entry's does not; a bias changes nothing."""
    shape = (4096, 3584, 8192, BF16, 8, "k")
    plain = load.plain(Problem(*shape))
    found = [e for e in entries("nvidia-h200") if e.problem == plain and e.num_sms == 16]
    seconds, algo = min((e.seconds, e.op.partition(".")[2]) for e in found)
    choice = choose("all_gather_matmul", Problem(*shape, True, None, BF16), "nvidia-h200", 16)
    assert choice.algo == algo
    assert f"{1e6 * seconds:.1f} us" in choice.why
    assert "no measurements" in choose("all_gather_matmul", Problem(*shape), "nvidia-h200", 99).why


def test_auto_takes_direct_only_where_heaps_are_evenly_spaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes that share a GPU have as few SMs as the ranks of `virtual`, and their entries."""
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))
    problem = Problem(8, 8, 64, BF16, 8, "k")
    given = load.plain(problem), load.plain(direct.default(problem, 16)), 1e-9, "", "", 16
    write_entries(user_file("nvidia-h200"), [Entry("all_gather_matmul.direct", *given)])

    def algo(backend: str, num_sms: int = 16, **options: Any) -> str:
        place = "nvidia-h200", num_sms
        return choose("all_gather_matmul", problem, *place, backend=backend, **options).algo

    assert algo("virtual") == "direct"
    assert algo("virtual", 131) != "direct", "over a link"
    assert algo("symm") != "direct"
    assert algo("symm", config=direct.default(problem, 16)) == "direct", "as asked"


@pytest.mark.compat
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_what_the_compilers_make_of_direct(arch: str) -> None:
    """One loop over all ranks' blocks with tensor cores, on sm_90 by TMA in three stages."""
    problem = Problem(8192, 4096, 4096, BF16, 8, "k")
    with gpu_limits.aim(arch):
        config = direct.default(problem, 16)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    a, b, out, words = _tensors(problem)
    world = SimpleNamespace(
        ctx=words, kernel_mode=0, size=8, rank_stride=1 << 30, peer=lambda x, rank: x
    )
    flags = direct._Flags(words, words, words)
    arguments = direct.arguments(problem, config, a, b, out, None, flags, world)
    made = compiled(direct._direct_kernel, arch, arguments, options)
    text = assembly(made)
    assert spills(made) <= A_FEW
    if arch == "sm_90":
        assert len(re.findall(r"wgmma\.mma_async", text)) == 4
        assert len(re.findall(r"cp\.async\.bulk\.tensor\.3d\S*mbarrier", text)) == 3
        assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\S*mbarrier", text)) == 3
        assert re.search(r"fence\.proxy\.async\.global", text)
    else:
        assert re.search("mfma", text)
        assert re.search(r"(?:buffer|global)_load_dwordx4", text)
        assert not re.search(r"(?:buffer|global)_load_(?:ushort|short)", text)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("arch", "shard", "num_sms"),
    [("sm_90", "k", 16), ("sm_90", "m", 132), ("gfx942", "m", 132), ("gfx950", "k", 132)],
)
def test_what_the_compilers_make_of_the_default(arch: str, shard: str, num_sms: int) -> None:
    """One loop over K with tensor cores, on sm_90 by TMA in three stages; no spills."""
    problem = Problem(8192, 4096, 4096, BF16, 8, shard)
    with gpu_limits.aim(arch):
        config = hbm_buffer.default(problem, num_sms)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    made = compiled(hbm_buffer._hbm_buffer_kernel, arch, _arguments(problem, config), options)
    text = assembly(made)
    assert spills(made) <= A_FEW
    if arch == "sm_90":
        assert (config.tile_m, config.tile_n) == (128, 256)
        assert len(re.findall(r"wgmma\.mma_async", text)) == 4  # own and staged blocks alike
        assert len(re.findall(r"cp\.async\.bulk\.tensor\S*mbarrier", text)) == 6
        assert re.search(r"fence\.proxy\.async\.global", text)
        assert len(re.findall(r"cp\.async\.cg\.\S+ .*0x10", text)) == 8 * 4  # fetchers' loads
        assert not re.findall(r"\b(?:ld|st)\.global\.b16", text)
    else:
        assert re.search("mfma", text)
        assert re.search(r"(?:buffer|global)_load_dwordx4", text)
        assert not re.search(r"(?:buffer|global)_load_(?:ushort|short)", text)


@pytest.mark.compat
@pytest.mark.parametrize("shard", ["k", "m"])
def test_a_product_over_nothing_fetches_nothing_and_compiles(shard: str) -> None:
    """Triton 3.6 can't compile fetchers that have no blocks to fetch."""
    problem = Problem(6, 3, 0, BF16, 2, shard, has_bias=True, activation="silu")
    config = hbm_buffer.default(problem, 8)

    def main(world: sundog.World) -> None:
        a = world.empty(problem.shard_shape, BF16)
        b, bias = torch.empty(0, 3, dtype=BF16), torch.empty(3, dtype=BF16)
        plan = hbm_buffer.plan(world, problem, config)
        plan(a, b, bias, torch.empty(6, 3, dtype=BF16))

    (launch,) = record(main, 2, 1 << 20, 8, 1 << 30)
    assert launch.kernel is _gemm._gemm_kernel
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    assert spills(compiled(launch.kernel, "sm_90", launch.args, options)) == 0


def _arguments(problem: Problem, config: hbm_buffer.Config) -> tuple:
    a, b, out, words = _tensors(problem)
    buffer = torch.empty(problem.size - 1, *problem.shard_shape, dtype=BF16)
    flags, world = Flags(*[words] * 5), SimpleNamespace(ctx=words, kernel_mode=0)
    return hbm_buffer.arguments(problem, config, a, buffer, b, out, None, flags, world)


def _tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    shapes = problem.shard_shape, (problem.k, problem.n), (problem.m, problem.n)
    return *(torch.empty(s, dtype=BF16) for s in shapes), torch.empty(64, dtype=torch.int64)
