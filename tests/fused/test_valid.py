"""Problems that no config takes: `valid` says so, before a tool makes inputs or compiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sundog.ops import load as ops

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("all_gather_matmul", {"k": 9}, "k 9 does not divide by 4 ranks"),
    ("all_gather_matmul", {"shard": "m", "m": 7}, "m 7 does not divide by 4 ranks"),
    ("all_gather_matmul", {"shard": "n"}, "shard 'n': expected 'k' or 'm'"),
    ("matmul_reduce_scatter", {"m": 7}, "m 7 does not divide by 4 ranks"),
    ("matmul_all_reduce", {"dtype": torch.int8}, "torch.int8: expected one of float16"),
    ("matmul_all_reduce.one_shot", {"out_dtype": torch.int8}, "torch.int8: expected"),
    ("matmul_reduce_scatter.push", {"activation": "relu"}, "activation 'relu': expected None or"),
]


@pytest.mark.parametrize(("op", "change", "told"), REFUSED)
def test_every_algorithm_refuses(op: str, change: dict[str, Any], told: str) -> None:
    for module in ops.algorithms(op).values():
        problem = module.cases(4)[0]
        config = module.default(problem, 16)
        assert module.valid(problem, config) is None
        reason = module.valid(dataclasses.replace(problem, **change), config)
        assert told in (reason or "")
