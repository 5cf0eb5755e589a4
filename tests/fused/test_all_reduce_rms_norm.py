"""All-reduce + residual + RMSNorm: every algorithm against torch in float64; bits by contract."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sundog
from sundog import gpu_limits, testing
from sundog.compiled.recorded import compile_launch
from sundog.fused import _rms_norm_reference
from sundog.fused.all_reduce_rms_norm import Problem, packed_bytes, reference, split
from sundog.ops.load import algorithms, find
from sundog.tools import isa
from sundog.tools._launches import record
from sundog.tools._subject import exercise
from sundog.tools.check.mutation import find_mutants, mutate

Run = Callable[..., list]
OP = "all_reduce_rms_norm"
ALGOS = tuple(algorithms(OP))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def config(algo: str, programs: int, **more: Any) -> Any:
    return find(f"{OP}.{algo}").Config(programs, **more)


def rows(seed: int, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Random, of other magnitudes in each row."""
    made = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    return (made * 3.0 ** (torch.arange(tokens) % 7 - 3).unsqueeze(1)).to(dtype)


def alike(hidden: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and weight, which all ranks have."""
    return rows(77, tokens, hidden, dtype), rows(78, 1, hidden, dtype)[0]


def near(added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Torch's norm of the new residual, in float64."""
    norm = torch.nn.functional.rms_norm
    return norm(added.double(), added.shape[-1:], weight.double(), eps)


CASES = [(1, 1, F32), (5, 37, BF16), (3, 300, F16), (2, 130, F32)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_algorithm_against_float64(run: Run, size: int) -> None:
    cases = CASES if size < 8 else CASES[1:2]

    def main(world: sundog.World) -> list[Any]:
        found = []
        for tokens, hidden, dtype in cases:
            x = world.empty((tokens, hidden), dtype).copy_(rows(world.rank, tokens, hidden, dtype))
            given = [each.to(world.device) for each in alike(hidden, tokens, dtype)]
            total = world.all_reduce(x) + given[0]
            outs = [
                world.all_reduce_rms_norm(x, *given, 1e-5, algo=a, config=config(a, 2))
                for a in ALGOS
            ]
            found.append((total.cpu(), [(n.cpu(), r.cpu()) for n, r in outs]))
        return found

    for result in run(main, size):
        for (tokens, hidden, dtype), (total, outs) in zip(cases, result, strict=True):
            parts = [rows(rank, tokens, hidden, dtype) for rank in range(size)]
            residual, weight = alike(hidden, tokens, dtype)
            exact = torch.stack([p.double() for p in parts]).sum(0) + residual.double()
            torch.testing.assert_close(total.double(), exact, rtol=0.02, atol=0.05)
            want = near(total, weight, 1e-5)
            for algo, (normed, added) in zip(ALGOS, outs, strict=True):
                assert torch.equal(added, total), algo  # the bits of all_reduce, then torch's sum
                bound = 2e-6 if dtype == F32 else 0.6 * torch.finfo(dtype).eps
                error = ((normed.double() - want).abs() / (want.abs() + 1e-3)).max()
                assert error < bound, (algo, float(error))
                assert torch.equal(normed, outs[0][0]), algo


VARIANTS: list[dict[str, Any]] = [
    {"has_bias": True},
    {"gemma": True},
    {"quant": "token"},
    {"quant": "group", "both": True},
    {"quant": "tensor", "is_static": True},
    {"quant": "token", "is_static": True},
    {"quant": "group", "is_static": True, "both": True, "fp8": torch.float8_e4m3fnuz},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_have_the_bits_of_the_reference(
    run: Run, variant: dict[str, Any], backend: str
) -> None:
    if backend in ("virtual", "symm") and "fp8" in variant and torch.version.hip is None:
        pytest.skip("NVIDIA GPUs convert to float8_e4m3fn only, and the call says so")
    problem = dataclasses.replace(Problem(3, 301, BF16, 2, 1e-5), **variant)

    def main(world: sundog.World) -> list[bool]:
        module = find(f"{OP}.one_shot")
        x, residual, weight, *rest = module.inputs(world, problem, 3, exact=False)
        bias = rest.pop(0) if problem.has_bias else None
        asked = {k: v for k, v in variant.items() if k not in ("has_bias", "is_static")}
        asked |= {"bias": bias, "scale": rest[0] if rest else None}
        given = (x, residual, weight, bias, *rest[:1])
        everyone = world.exchange([each.cpu() for each in given if each is not None])
        want = reference(problem, world.rank, *(list(each) for each in zip(*everyone, strict=True)))
        found = []
        for algo in ALGOS:
            out = world.empty(packed_bytes(problem), torch.uint8)
            results = world.all_reduce_rms_norm(
                x, residual, weight, 1e-5, **asked, out=out, algo=algo, config=config(algo, 2)
            )
            assert len(results) == sum(each is not None for each in split(problem, out))
            found.append(torch.equal(out.cpu(), want))
        return found

    assert run(main, 2) == [[True] * len(ALGOS)] * 2


@pytest.mark.compat
@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ALGOS)
def test_variants_compile_for_a_gpu(algo: str) -> None:
    """Every kind of FP8 scale, with more than one part to a row where the algorithm has them."""
    module = find(f"{OP}.{algo}")
    for variant in VARIANTS[2:6]:
        problem = dataclasses.replace(Problem(3, 301, BF16, 2), **variant)

        def main(world: sundog.World, problem: Problem = problem) -> None:
            given = module.inputs(world, problem, 0)
            plan = module.plan(world, problem, module.default(problem, world.num_sms))
            plan(*given, world.empty(packed_bytes(problem), torch.uint8))

        with gpu_limits.aim("sm_90"):
            (launch,) = record(main, 2, 1 << 24)
        assert compile_launch(launch, "sm_90").asm["cubin"], variant


@pytest.mark.long
@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ALGOS)
def test_a_row_of_7168_is_not_spilled_and_no_access_is_narrow(algo: str) -> None:
    """On 8 ranks, whose tiles are all in registers at once."""
    for kernel in isa.inspect(f"{OP}.{algo}", ("sm_90",), problem={"hidden": 7168, "tokens": 4}):
        assert kernel.marks == []
        assert kernel.spills == 0


@pytest.mark.parametrize("quant", ["token", "group"])
def test_fp8_is_near_the_normalised_rows(quant: str) -> None:
    """By what float8_e4m3fn rounds, relative to the scale."""
    value = rows(1, 5, 300, F32)
    quantised, scales = _rms_norm_reference.expected_fp8(value, None, quant, torch.float8_e4m3fn)
    wide = scales.repeat_interleave(128 if quant == "group" else 300, 1)[:, :300]
    error = (quantised.float() * wide - value).abs()
    assert (error <= value.abs() / 16 + wide * 2**-10).all()
    assert quantised.float().abs().amax(1).tolist() == [448.0] * 5


def test_a_row_depends_on_that_row_alone(run: Run) -> None:
    """All rows at once, by every algorithm and grid, and in a graph; and each row on its own."""
    tokens, hidden = 7, 4100  # two parts

    def main(world: sundog.World) -> list[torch.Tensor]:
        x = world.empty((tokens, hidden), BF16).copy_(rows(world.rank, tokens, hidden, BF16))
        residual, weight = (each.to(world.device) for each in alike(hidden, tokens, BF16))
        found = []
        for algo in ALGOS:
            for programs in (1, 3):
                given = {"algo": algo, "config": config(algo, programs)}
                found.append(world.all_reduce_rms_norm(x, residual, weight, **given)[0])
        pieces = [config("low_latency", 1, pieces=n) for n in (2, 4) if n <= world.num_sms]
        for shared in pieces:  # several programs have a row
            part = {"algo": "low_latency", "config": shared}
            found.append(world.all_reduce_rms_norm(x, residual, weight, **part)[0])
        with world.capture() as graph:
            normed, _ = world.all_reduce_rms_norm(x, residual, weight, **given)
        graph.replay()
        found.append(normed.clone())
        graph.free()
        alone = [
            world.all_reduce_rms_norm(x[n : n + 1], residual[n : n + 1], weight, algo=algo)[0]
            for n, algo in zip((0, 2, 4, 6), ALGOS, strict=True)
        ]
        return [*(each.cpu() for each in found), torch.cat(alone).cpu()]

    for *found, alone in run(main, 2):
        for other in found[1:]:
            assert torch.equal(other, found[0])
        assert torch.equal(alone, found[0][[0, 2, 4, 6]])


def test_the_sum_of_squares_has_no_order() -> None:
    """Any order of the columns gives the same factor: integers are added."""
    x = rows(5, 6, 4100, F32)
    order = torch.randperm(4100, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(4100)
    first = _rms_norm_reference.expected(x, ones, 1e-6, False)
    assert torch.equal(
        first[:, order], _rms_norm_reference.expected(x[:, order], ones, 1e-6, False)
    )


def test_rows_of_zeros_infinities_and_no_numbers(run: Run) -> None:
    """As torch: zeros stay, a NaN spoils its row, an infinity leaves zeros beside it."""
    x = torch.ones(5, 40)
    x[0], x[1, 3], x[2, 7], x[3], x[4] = 0, torch.nan, torch.inf, 1e-30, 3e37
    norm = torch.nn.functional.rms_norm(x.double(), (40,), None, 1e-6).float()

    def main(world: sundog.World) -> list[torch.Tensor]:
        mine = (x if world.rank else torch.zeros_like(x)).to(world.device)
        zero, one = torch.zeros_like(mine), torch.ones(40, device=world.device)
        return [world.all_reduce_rms_norm(mine, zero, one, algo=a)[0].cpu() for a in ALGOS]

    for result in run(main, 2):
        for out in result:
            torch.testing.assert_close(out, norm, rtol=1e-5, atol=1e-30, equal_nan=True)
            assert out[1].isnan().all()
            assert out[2].isnan().sum() == 1


def exactly(added: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of rows in float64, whose squares have room for any float32."""
    wide = added.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


# The largest number, how much larger than the others, eps. Where eps counts, rows are below 1e-30.
EXTREME = [(3.4e38, 1, 1e-6), (2e38, 3, 0.0), (6e4, 2900, 1e-6), (1e-25, 9, 0.0),
           (1e-37, 9, 0.0), (1e-30, 1e4, 1e-6), (1e-20, 2, 1e4), (1e-38, 2, 1e-38),
           (1, 2**13.5, 1e-12)]  # fmt: skip


@pytest.mark.parametrize(("most", "times", "eps"), EXTREME)
def test_extreme_rows_are_rounded_and_never_wrong(
    run: Run, most: float, times: float, eps: float
) -> None:
    """Every element is near the one in float64, by what docs/norm.md says."""
    hidden = 400
    x = torch.full((1, hidden), most / times)
    x[0, ::150] = -most

    def main(world: sundog.World) -> list[torch.Tensor]:
        mine = (x if world.rank else torch.zeros_like(x)).to(world.device)
        zero, one = torch.zeros_like(mine), torch.ones(hidden, device=world.device)
        return [world.all_reduce_rms_norm(mine, zero, one, eps, algo=a)[0].cpu() for a in ALGOS]

    eps = torch.tensor(eps).item()
    for out in itertools.chain(*run(main, 2)):
        torch.testing.assert_close(out.double(), exactly(x, eps), rtol=2**-17, atol=2**-149)


@pytest.mark.parametrize("hidden", [129, 8192, 1 << 16])
def test_a_large_number_beside_others_costs_no_row_its_accuracy(hidden: int) -> None:
    """Groups whose squares are far below the largest still count, however many there are."""
    for power in range(1, 20):
        x = torch.full((1, hidden), 1.9 * 2.0**-power)
        x[0, 0] = 1
        out = _rms_norm_reference.expected(x, torch.ones(hidden), 1e-12, False)
        torch.testing.assert_close(out.double(), exactly(x, 1e-12), rtol=2**-17, atol=0)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), 1e39, True, "a"])
def test_an_eps_that_is_none(run: Run, eps: Any) -> None:
    """One that is no number would make a plan with each call, since it is not itself."""

    def main(world: sundog.World) -> None:
        x, row = torch.ones(1, 8, device=world.device), torch.ones(8, device=world.device)
        with pytest.raises(ValueError, match=r"eps .*: expected a number from 0 to 3.4e\+38"):
            world.all_reduce_rms_norm(x, x.clone(), row, eps)

    run(main, 1)


def test_shapes_outputs_and_nothing_to_do(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x, residual = (rows(n, 6, 40, F32).view(2, 3, 40).to(world.device) for n in (world.rank, 9))
        weight = torch.ones(40, device=world.device)
        out = world.empty((2, *x.shape))
        normed, added = world.all_reduce_rms_norm(x, residual, weight, out=out)
        assert normed.shape == added.shape == x.shape
        assert torch.equal(normed, out[0])
        assert torch.equal(added, out[1])
        assert torch.equal(
            normed, world.all_reduce_rms_norm(x, residual, weight, algo="two_shot")[0]
        )
        none = world.all_reduce_rms_norm(x[:0], residual[:0], weight, quant="token")
        assert [tuple(each.shape) for each in none] == [(0, 3, 40), (0, 3, 1), (0, 3, 40)]

    run(main, 2)


def test_strided_inputs_give_the_result_of_contiguous_ones(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of them: columns of a wider tensor, a transposed one, every second element."""

    def main(world: sundog.World) -> None:
        wide = rows(world.rank, 6, 48, F32).to(world.device)
        residual = rows(9, 40, 6, F32).t().to(world.device)
        weight, bias, scale = (rows(n, 1, 80, F32)[0].to(world.device)[::2] for n in (3, 4, 5))
        x, scale = wide[:, 8:].view(2, 3, 40), (scale.abs() + 1)[:12:2]
        residual = residual.unflatten(0, (2, 3))
        given: dict[str, Any] = {"bias": bias, "scale": scale, "quant": "token", "both": True}
        assert not any(t.is_contiguous() for t in (x, residual, weight, bias, scale))
        dense = {k: v.contiguous() if torch.is_tensor(v) else v for k, v in given.items()}
        inputs = x.contiguous(), residual.contiguous(), weight.contiguous()
        wanted = world.all_reduce_rms_norm(*inputs, **dense)
        found = world.all_reduce_rms_norm(x, residual, weight, **given, explain=True)
        for one, other in zip(found, wanted, strict=True):
            assert one.is_contiguous()
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    run(main, 2)
    said = capfd.readouterr().out
    for name in ("x", "residual", "weight", "bias", "scale"):
        assert f"all_reduce_rms_norm: {name} of shape" in said


X, W = torch.zeros(3, 8), torch.zeros(8)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"residual": X[:2]}, r"residual is \(2, 8\) of torch.float32, expected \(3, 8\)"),
    ({"weight": W[:7]}, r"weight is \(7,\) of torch.float32, expected \(8,\)"),
    ({"x": X.double()}, "torch.float64: expected one of bfloat16"),
    ({"quant": "row"}, "quant 'row': expected 'tensor', 'token' or 'group'"),
    ({"quant": "tensor"}, "bits of a row depend on the other rows; pass scale="),
    ({"both": True}, "both outputs go with quant="),
    ({"quant": "token", "scale": W}, "scale has 8 elements of torch.float32, expected 3"),
    ({"quant": "token", "fp8": torch.float8_e5m2}, "float8_e5m2: expected float8_e4m3fn"),
    ({"out": torch.zeros(3)}, "out has 12 bytes .* expected 192 bytes"),
    ({"algo": "ring"}, "there are: auto, one_shot, low_latency, two_shot, two_shot_sliced"),
    ({"algo": "two_shot", "config": config("two_shot", 0)}, "programs 0"),
    ({"weight": None}, "weight is a NoneType, expected a tensor"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input(run: Run, change: dict[str, Any], text: str) -> None:
    def main(world: sundog.World) -> None:
        given = {"x": X, "residual": torch.zeros(3, 8), "weight": W, **change}
        moved = {k: v.to(world.device) if torch.is_tensor(v) else v for k, v in given.items()}
        with pytest.raises(ValueError, match=text):
            world.all_reduce_rms_norm(**moved)

    run(main, 1)


def test_an_out_that_shares_memory(run: Run) -> None:
    def main(world: sundog.World) -> None:
        room = torch.zeros(2, 3, 8, device=world.device)
        with pytest.raises(ValueError, match="out shares memory with residual"):
            world.all_reduce_rms_norm(
                torch.zeros(3, 8, device=world.device), room[0], room[1, 0].clone(), out=room
            )

    run(main, 1)


def test_more_than_one_shot_and_low_latency_take() -> None:
    large = Problem(16384, 7168, BF16, 8)
    for algo in ("one_shot", "low_latency"):
        assert "use two_shot" in str(find(f"{OP}.{algo}").valid(large, config(algo, 16)))
    two_shot = find(f"{OP}.two_shot")
    assert two_shot.valid(large, two_shot.default(large, 16)) is None
    assert "hidden 65537" in str(two_shot.valid(Problem(1, 65537, BF16, 8), config("two_shot", 1)))


def test_pieces_that_low_latency_refuses() -> None:
    """What does not fit says what would. By default there are as many pieces as SMs for them."""
    module = find(f"{OP}.low_latency")
    one, long = Problem(1, 4096, BF16, 8), Problem(1, 65536, BF16, 8)
    assert "each of 128 or more of 512 columns" in module.valid(
        one, config("low_latency", 1, pieces=8)
    )
    assert "use more pieces" in module.valid(long, config("low_latency", 1, pieces=1))
    whole = dataclasses.replace(one, quant="token")
    assert "its whole row; use 1" in module.valid(whole, config("low_latency", 1, pieces=2))
    by_token = dataclasses.replace(long, quant="token")
    for each, pieces in ((by_token, 1), (Problem(1, 65536, torch.float32, 1), 8)):
        told = str(module.valid(each, config("low_latency", 1, pieces=pieces)))
        assert told.endswith("too many words; use one_shot"), told
        one_shot = find(f"{OP}.one_shot")
        assert one_shot.valid(each, one_shot.default(each, 16)) is None
    chosen = {n: module.default(dataclasses.replace(one, tokens=n), 16).pieces for n in (1, 8, 16)}
    assert chosen == {1: 4, 8: 2, 16: 1}
    assert module.default(whole, 16).pieces == 1
    assert module.valid(long, module.default(long, 16)) is None


def test_outputs_are_aligned() -> None:
    """Whatever the sizes are: loads and stores of 16 bytes need it."""
    problem = Problem(3, 301, BF16, 2, quant="group", both=True)
    out = torch.empty(packed_bytes(problem) + 256, dtype=torch.uint8)
    begin = -out.data_ptr() % 256
    to = split(problem, out[begin : begin + packed_bytes(problem)])
    assert [each.data_ptr() % 16 for each in to] == [0] * 4
    assert [each.shape[1] for each in to] == [301, 301, 301, 3]


@pytest.mark.sim_only
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("algo", ALGOS)
def test_the_checker_finds_nothing_and_kills_every_mutant(algo: str, size: int) -> None:
    """Two calls back to back, then another plan. Mutants of our files; device/ has its own.

    The words of low_latency are atomics on AMD alone, and only those have orders to weaken.
    """
    module = find(f"{OP}.{algo}")
    is_short = algo != "low_latency"
    several = 260 + 130 * (size == 3)  # columns: every rank owns some
    problem = Problem(3, 20 if algo in ("one_shot", "two_shot") else several, BF16, size)
    small = type(module)("small", "one case")
    small.__dict__.update(module.__dict__ | {"cases": lambda size: [problem]})
    given = (2,) if is_short else (1, "atomic")

    def default(problem: Problem, num_sms: int) -> Any:
        """Two pieces of a part of 256 columns, if both programs fit."""
        return module.Config(*given, *(() if is_short else (min(num_sms, 2),)))

    small.default = default
    function = exercise(small, size)
    places = "rms_norm", "_words.py", "set_words"
    with gpu_limits.aim("gfx942"):
        found, report = find_mutants(function, size)
        assert report.findings == [], report
        mine = [m for m in found if any(p in f"{m.where} {m.function.__name__}" for p in places)]
        assert len(mine) >= (6 if algo == "low_latency" else 2), [m.diff for m in mine]
        survived = [o for o in mutate(function, size, mine, schedules=10) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)


@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ALGOS)
def test_many_calls_in_a_row(algo: str) -> None:
    """Nothing between them: a half, or a box, that is used again too early would be a race."""

    def main(world: sundog.World) -> list[float]:
        zero, one = torch.zeros(2, 6), torch.ones(6)
        x = [torch.full((2, 6), float(n + world.rank)) for n in range(5)]
        outs = [
            world.all_reduce_rms_norm(each, zero, one, algo=algo, config=config(algo, 1))
            for each in x
        ]
        return [added[1, 2].item() for _, added in outs]

    report = testing.check(main, 3, schedules=3)
    assert report.results == [[3 * n + 3.0 for n in range(5)]] * 3
