"""What docs/measured.md says of `sundog bench all_gather_matmul --link pcie`, and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from benchmarks.report import render
from sundog.tools.bench import bench_command

LINK = 50e9
MACHINE = dict.fromkeys(("command", "date", "gpu", "torch", "triton", "commit"), "x")
# Microseconds by M and N: cuBLAS, copies and cuBLAS, then two configs of ours.
TIMES = {
    (128, 64): (300, 1000, 620, 640),
    (128, 96): (540, 1100, 660, 600),
    (128, 128): (800, 1300, 900, 910),
    (512, 64): (1900, 4000, 2250, 2300),
}
NAMES = ("cuBLAS alone", "copy engine, then cuBLAS", "hbm_buffer", "hbm_buffer")


def rows() -> list[dict[str, Any]]:
    """The link takes 500 us for 128 rows and 2000 for 512."""
    made = []
    for (m, n), times in TIMES.items():
        crossing = 500 * m // 128
        for number, (name, time) in enumerate(zip(NAMES, times, strict=True)):
            samples = [[1e3 * t] for t in (time - 1, time, time + 7)]
            made.append(
                {
                    "variant": name,
                    "problem": f"Problem(m={m}, n={n}, dtype=torch.bfloat16)",
                    "config": f"Config({number})" if number > 1 else "",
                    "link_bytes": crossing * 1e-6 * LINK,
                    "limit_ns": 1e3 * max(crossing, times[0]),
                    "wrong": "",
                    "times": {"name": name, "samples_ns": samples},
                }
            )
    return made


def test_the_goal_counts_where_link_and_product_are_nearly_equal(tmp_path: Path) -> None:
    content = {"kind": "op", "op": "all_gather_matmul", "world": 2, "link": "pcie", "rows": rows()}
    content |= {"rates": {"link": LINK, "gemm": 7e14}, "machine": MACHINE}
    (tmp_path / "a.json").write_text(json.dumps(content))
    verdicts = [line for line in render(tmp_path).splitlines() if line.startswith("Closest")]
    assert verdicts == [
        "Closest to equal (link 500 us, product 540 us) is m=128, n=96, dtype=bfloat16: hbm_buffer "
        "takes 600 us, 1.111 times the limit (goal 1.10), and is 1.83 times as fast as gather, "
        "then product (goal 1.5).",
        "Closest to equal (link 2000 us, product 1900 us) is m=512, n=64, dtype=bfloat16: "
        "hbm_buffer takes 2250 us, 1.125 times the limit (goal 1.10), and is 1.78 times as fast as "
        "gather, then product (goal 1.5).",
    ]


def test_a_panel_per_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plt, "close", kept.append)
    bench_command.draw_link(str(tmp_path / "a.png"), rows(), 2)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    left, right = kept[0].axes
    lines = {line.get_label(): line for line in left.lines}
    assert list(lines["limit"].get_xdata()) == [64, 96, 128]
    assert list(lines["limit"].get_ydata()) == pytest.approx([0.5, 0.54, 0.8])
    assert list(lines["hbm_buffer"].get_ydata()) == pytest.approx([0.62, 0.6, 0.9])  # the best
    assert "M=512" in right.get_title()
