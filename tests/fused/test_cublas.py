"""cuBLAS as an algorithm of every fused op: results, who may use it, when `auto` considers it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sundog
from sundog.fused import _cublas
from sundog.ops.load import find
from sundog.ops.select import choose
from sundog.tools._subject import resolve
from sundog.tools.probe.probe_command import all_names

from . import Run, answers, compare

OPS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
every_op = pytest.mark.parametrize("op", OPS)


@pytest.mark.sim_only
@every_op
def test_results(run: Run, op: str) -> None:
    module = find(f"{op}.cublas")
    problem = module.cases(3)[0]
    compare(run(answers(module, problem, module.default(problem, 8)), 3))


@every_op
def test_what_torch_mm_would_round_is_refused(op: str) -> None:
    module = find(f"{op}.cublas")
    plain = module.cases(2)[0]
    config = module.default(plain, 8)
    changes: list[dict[str, Any]] = [
        {"dtype": torch.float32},
        {"has_bias": True},
        {"activation": "silu"},
        {"out_dtype": torch.float32},
    ]
    assert module.valid(plain, config) is None
    for change in changes:
        problem = type(plain)(**{**vars(plain), **change})
        assert module.valid(problem, config), change
        assert not module.space(problem)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    reason = _cublas.refused(SimpleNamespace(owns_gpu=False, size=4), None)  # type: ignore[arg-type]
    assert reason is not None
    assert reason.startswith("4 ranks share a GPU")
    assert "barrier" in reason
    assert _cublas.refused(SimpleNamespace(owns_gpu=True), None) is None  # type: ignore[arg-type]


@every_op
def test_auto_considers_it_where_a_rank_has_its_gpu(op: str) -> None:
    problem = find(op).cases(8)[0]

    def why(owns_gpu: bool, backend: str = "symm") -> str:
        return choose(op, problem, "nvidia-h200", 132, None, backend, {}, owns_gpu).why

    assert "cublas" in why(True)
    assert "cublas" not in why(False)
    assert "cublas" not in why(True, "sim")


def test_tools_leave_it_out_where_ranks_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bench and tune run it if it is named, probe where there is a GPU for each rank."""
    by_request = {each.algo for each in resolve("matmul_all_reduce").algorithms if each.by_request}
    assert by_request == {"cublas"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for size, is_there in ((2, True), (4, False)):
        names = all_names("symm", size)
        assert ("matmul_all_reduce.cublas" in names) is is_there
        assert ("torch.nccl" in names) is is_there
    assert "matmul_all_reduce.cublas" in all_names("sim", 4)


@pytest.mark.sim_only
def test_a_call_by_name(run: Run) -> None:
    def main(world: sundog.World) -> bool:
        a = world.empty((8, 16), torch.float16).fill_(world.rank + 1)
        b = torch.ones(16, 8, dtype=torch.float16, device=world.device)
        out = world.all_gather_matmul(a, b, shard="m", algo="cublas")
        return bool((out.view(world.size, -1)[1] == 32).all())

    assert all(run(main, 2))
