"""`python -m benchmarks`: every command exists, and says early what it cannot do."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from sundog.target import has_gpu

ON_GPU = ("host", "capture", "bound", "trace all_gather", "gemm", "large", "sizes", "link-rates")


@pytest.mark.skipif(has_gpu(), reason="about machines without a GPU")
@pytest.mark.parametrize("words", ON_GPU)
def test_what_needs_a_gpu_says_so(words: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert f"benchmarks {words.split()[0]}: torch finds no GPU" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("host --world 1,x", "'1,x': expected numbers from 1"),
        ("bound --world 0", "'0': expected numbers from 1"),
        ("capture --backend sim", "'sim': expected virtual or symm"),
        ("simulator --json /proc/nowhere/f", "/proc/nowhere/f cannot be written"),
        ("mutants gather.push --json /proc/nowhere/f", "/proc/nowhere/f cannot be written"),
        ("report nowhere", "'nowhere' does not exist"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words: str, message: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("\u2502", " ").split())
