"""Named shapes: problems that the ops take, for the ranks that the name says."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.tools import presets
from sundog.tools.tune.space import jobs

OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_reduce",
    "all_gather",
)


@pytest.mark.parametrize("op", OPS)
def test_every_preset_is_a_list_of_problems(op: str) -> None:
    for name in presets.names():
        texts, ranks = presets.preset(name, op)
        found = [job for text in texts for job in jobs(op, text, ranks)]
        assert {job.size for job in found} == {ranks}
        assert len({job.problem for job in found}) == len(texts) >= len(presets.ROWS)
        first = found[0]
        config = first.module.default(first.problem, 132)
        assert first.module.valid(first.problem, config) is None


def test_the_shapes_of_a_layer() -> None:
    """70B on 8 ranks: 8 queries, a key and a value head, 3,584 columns each of gate and up."""
    texts, ranks = presets.preset("llama3-70b-tp8", "all_gather_matmul.barrier")
    assert ranks == 8
    assert "m=16384,n=1280,k=8192,shard=m,dtype=bfloat16" in texts
    assert "m=16,n=7168,k=8192,shard=m,dtype=bfloat16" in texts
    texts, _ = presets.preset("llama3-70b-tp8", "matmul_all_reduce")
    assert {text.partition(",")[2] for text in texts} == {
        "n=8192,k=1024,dtype=bfloat16",
        "n=8192,k=3584,dtype=bfloat16",
    }
    assert presets.preset("llama3-8b-tp2", "reduce_scatter")[0][0] == "numel=32768,dtype=bfloat16"


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"did you mean llama3-70b-tp8\?"):
        presets.preset("llama-70b-tp8", "all_reduce")
    with pytest.raises(ValueError, match="send is not part"):
        presets.preset("llama3-8b-tp2", "send")


def test_the_commands_take_it() -> None:
    """Both refuse a wrong name before they measure anything, so this needs no GPU."""
    for verb in ("bench", "tune"):
        refused = CliRunner().invoke(app, [verb, "all_reduce", "--preset", "llama4"])
        assert refused.exit_code == 2
        assert "--preset llama4: there are llama3-8b-tp2" in refused.stderr.replace("\n", " ")
