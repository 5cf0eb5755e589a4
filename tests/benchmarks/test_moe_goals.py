"""The goals of MoE dispatch and combine: which one counts for which size."""

from __future__ import annotations

import pytest

from benchmarks.moe import BARE, COPY, lines_of


def _line(tokens: int, us: float) -> str:
    """An all-to-all takes 100 us; copies take 1000 us for 512 MiB, read and written."""
    row = {"op": "moe_dispatch", "tokens": tokens, "bytes": 1 << 29, "copied": 3 << 28}
    times = {"moe_dispatch.push": us, BARE: 100.0, COPY: 1000.0}
    (line,) = lines_of({**row, "us": times})
    return line


@pytest.mark.parametrize(
    ("tokens", "us", "text"),
    [
        (128, 129.0, "1.29 x all_to_all (at most 1.3: reached); DeepEP on eight GPUs 35.1"),
        (16, 131.0, "1.31 x all_to_all (at most 1.3: MISSED)"),
        (
            4096,
            1111.0,
            "0.90 of the copy limit (at least 0.85: reached); 1.35 of a copy of all rows",
        ),
        (
            4096,
            1250.0,
            "0.80 of the copy limit (at least 0.85: MISSED); 1.20 of a copy of all rows",
        ),
    ],
)
def test_few_tokens_compare_with_all_to_all_and_many_with_copy(
    tokens: int, us: float, text: str
) -> None:
    assert _line(tokens, us).endswith(text)
