"""meta-pytorch/kraken's own tests: their bodies, run by four ranks; skips for want of GPUs lifted.

Each test is written for processes that torch's test case starts, one per GPU. Here a stand-in for
that class is the rank that runs already. Two tests multiply matrices of a GPU's size: theirs are
cut in the constants of the test's code. One of them compares bits, and gets whole numbers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .case import Case, Repair, Substitution, alone
from .kraken import AFTER, COPIES, FENCE, REDUCE, SCATTER, WAIT, both

PACKAGE = "kraken"
_COMMON = "torch.testing._internal.common_distributed"
_UTILITIES = "torch.testing._internal.common_utils"


class _RankTestCase(unittest.TestCase):
    """torch's MultiProcessTestCase, for a process that is a rank."""

    def _spawn_processes(self) -> None:
        pass

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def file_name(self) -> str:
        return tempfile.mktemp()


def _provide() -> None:
    """Stand for torch's test utilities, which import what is not installed with torch."""
    common, utilities = ModuleType(_COMMON), ModuleType(_UTILITIES)
    vars(common).update(
        MultiProcessTestCase=_RankTestCase, skip_if_lt_x_gpu=lambda count: lambda test: test
    )
    vars(utilities).update(
        instantiate_parametrized_tests=lambda case: case,
        run_tests=unittest.main,
        TestCase=unittest.TestCase,
    )
    sys.modules |= {_COMMON: common, _UTILITIES: utilities}


def body(file: str, case: str, test: str) -> Callable[[], None]:
    """Return a program that runs one test's body."""

    def program() -> None:
        _provide()
        module = alone(f"test/{file}")
        if test in _WHOLE:
            module.torch = _WholeNumbers("torch")  # type: ignore[attr-defined]
        found: Any = getattr(module, case)
        _cut(getattr(found, test), test)
        getattr(found(test), test)()

    return program


_SMALLER: dict[str, dict[Any, Any]] = {
    "test_all_gather_matmul": {4096: 512, 6656: 256, 16384: 128},
    "test_gemm_reduce_scatter_ce_persistent": {(8192, 4096, 14336): (1024, 256, 128)},
}


_WHOLE = ("test_gemm_reduce_scatter_ce_persistent",)


class _WholeNumbers(ModuleType):
    """torch for a test that compares products bit by bit: whole numbers, exact in any order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.randn(*args, **kwargs).round()


def _cut(function: Any, test: str) -> None:
    smaller = _SMALLER.get(test, {})
    constants = tuple(smaller.get(each, each) for each in function.__code__.co_consts)
    function.__code__ = function.__code__.replace(co_consts=constants)


_TESTS = {
    ("test_allgather.py", "TritonAllGatherTest"): ["all_gather_w_progress"],
    ("test_allgather_matmul.py", "TritonAllGatherMatmulTest"): ["all_gather_matmul"],
    ("test_allreduce.py", "TritonAllReduceTest"): ["one_shot", "two_shot"],
    ("test_allreduce_bias.py", "TritonAllReduceBiasTest"): ["one_shot_bias", "two_shot_bias"],
    ("test_allreduce_bias_rms_norm.py", "TritonAllReduceBiasRMSNormTest"): [
        "one_shot_bias_rms_norm",
        "two_shot_bias_rms_norm",
    ],
    ("test_gemm_allreduce.py", "TritonGemmAllReduceTest"): [
        "gemm_all_reduce",
        "gemm_all_reduce_square",
        "rank_specific_values_all_reduce",
    ],
    ("test_gemm_reduce_scatter.py", "TritonGemmReduceScatterTest"): [
        "gemm_reduce_scatter",
        "gemm_reduce_scatter_rank_specific",
        "gemm_reduce_scatter_ce_persistent",
    ],
    ("test_ptx_utils.py", "PTXSymmMemBarrier"): ["symm_mem_barrier"],
    ("test_ptx_utils.py", "PTXGmemBarrier"): ["gmem_barrier_arrive_wait"],
}
_NORM = "kraken/fused/{}_shot_all_reduce_bias_rms_norm.py"
_UNDEFINED = (
    "The row has 5120 elements and the tile 8192. A masked load without `other` leaves the rest "
    "undefined, and the sum of squares adds it up; the simulator fills it with NaN, the compilers "
    "of today with zeros, so the test passes on a GPU, and with zeros it passes here."
)


_RELAXED_PADS = (
    "The test calls the barrier without its flags, so every signal is relaxed, and reads the pad "
    "on the host afterwards: nothing orders the peers' signals before that plain read."
)


def _filled(name: str, *lines: int) -> tuple[Repair, ...]:
    changes = [
        Substitution(_NORM.format(name), line, "mask=mask", "mask=mask, other=0.0")
        for line in lines
    ]
    return (Repair("undefined lanes", _UNDEFINED, tuple(changes)),)


_REPAIRS = {
    "one_shot_bias_rms_norm": _filled("one", 75, 82),
    "two_shot_bias_rms_norm": _filled("two", 114),
    **{f"gemm_all_reduce{more}": both(REDUCE, 81) for more in ("", "_square")},
    "rank_specific_values_all_reduce": both(REDUCE, 81),
    "gemm_reduce_scatter": both(SCATTER, 94),
    "gemm_reduce_scatter_rank_specific": both(SCATTER, 94),
    "gemm_reduce_scatter_ce_persistent": (Repair("no order", COPIES, (AFTER,)),),
    "all_gather_matmul": (Repair("no proxy fence", FENCE, (WAIT,)),),
    "symm_mem_barrier": (
        Repair(
            "plain access to a flag",
            _RELAXED_PADS,
            (
                Substitution(
                    "test/test_ptx_utils.py", 73, "signal_pad = ", "dist.barrier(); signal_pad = "
                ),
            ),
        ),
    ),
}
CASES = [
    Case(f"test_{name}", f"test/{file}", body(file, case, f"test_{name}"), schedules=1,
         repairs=_REPAIRS.get(name, ()),
         note="smaller matrices" if f"test_{name}" in _SMALLER else "")
    for (file, case), names in _TESTS.items()
    for name in names
]  # fmt: skip
