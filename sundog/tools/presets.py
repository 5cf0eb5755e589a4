"""Named shapes for `bench` and `tune` (`--preset llama3-70b-tp8`), and suites of them.

A name is a model and its number of tensor-parallel ranks. It stands for the op's problems in one
layer of that model, attention and MLP, at several numbers of rows (tokens). A product whose input
is gathered takes the columns of a rank's weights, one whose result is reduced takes the rows, and a
collective takes the hidden states. Sizes are from the models' published configurations.

`sundog bench suite published` runs the rows of the tables that others have published
(data/public): collectives of half precision from 256 to 2^28 elements, and the products of a model.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

ROWS = (16, 64, 256, 1024, 4096, 16384)
RANKS = (2, 4, 8)


class Model(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128


MODELS = {
    "llama3-8b": Model(4096, 14336, 32, 8),
    "llama3-70b": Model(8192, 28672, 64, 8),
    "llama3-405b": Model(16384, 53248, 128, 8),
    "qwen2.5-32b": Model(5120, 27648, 40, 8),
    "qwen2.5-72b": Model(8192, 29568, 64, 8),
    "gemma2-27b": Model(4608, 36864, 32, 16),
    "mistral-nemo-12b": Model(5120, 14336, 32, 8),
}
_GATHERED = ("all_gather_matmul",)  # a layer's first product
_REDUCED = ("matmul_reduce_scatter", "matmul_all_reduce")  # and its second
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")  # a rank has a part


class SuitePart(NamedTuple):
    """One op of a suite: its axes, or a preset."""

    op: str
    axes: tuple[str, ...] = ()
    preset: str = ""


SUITES = ("published",)
_TOTALS = tuple(1 << power for power in range(8, 29))  # elements of a whole message
_PUBLISHED_MODEL = "llama3-70b"


def suite(name: str, size: int) -> list[SuitePart]:
    """Return the parts of a suite for a number of ranks."""
    if name not in SUITES:
        problem = f"suite {name!r} is not known" if name else "the name of the suite is missing"
        raise ValueError(f"{problem}; there are: {', '.join(SUITES)}")
    parts = []
    for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        per_rank = size if op in _SPLIT else 1
        sizes = ",".join(str(total // per_rank) for total in _TOTALS if total >= per_rank)
        parts.append(SuitePart(op, (f"numel={sizes}", "dtype=float16")))
    if size in RANKS:
        ranked = f"{_PUBLISHED_MODEL}-tp{size}"
        parts += [SuitePart(op, preset=ranked) for op in (*_GATHERED, *_REDUCED)]
    return parts


def names() -> list[str]:
    """List all presets."""
    return [f"{model}-tp{ranks}" for model in MODELS for ranks in RANKS]


def preset(name: str, op: str) -> tuple[list[str], int]:
    """Return an op's problems, in the form of `--problem`, and the number of ranks."""
    model_name, _, ranks = name.rpartition("-tp")
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"--preset {name}: there are {', '.join(names())}{hint}")
    op = op.partition(".")[0]
    shapes = _shapes(op, MODELS[model_name], int(ranks))
    if not shapes:
        raise ValueError(f"--preset {name}: {op} is not part of a tensor-parallel layer")
    texts = [",".join(f"{k}={v}" for k, v in shape.items()) for shape in shapes]
    return [f"{text},dtype=bfloat16" for text in texts], int(ranks)


def _shapes(op: str, model: Model, ranks: int) -> list[dict[str, Any]]:
    hidden, inner = model.hidden, model.intermediate // ranks
    queries = model.heads * model.head_dim // ranks
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim // ranks
    if op in _GATHERED:
        columns = dict.fromkeys((qkv, 2 * inner))  # gate and up are one product
        return [dict(m=m, n=n, k=hidden, shard="m") for n in columns for m in ROWS]
    if op in _REDUCED:
        return [dict(m=m, n=hidden, k=k) for k in dict.fromkeys((queries, inner)) for m in ROWS]
    if op in (*_SPLIT, "all_reduce", "broadcast", "reduce"):
        return [dict(numel=m * hidden // (ranks if op in _SPLIT else 1)) for m in ROWS]
    return []
