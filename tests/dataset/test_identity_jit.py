"""The source of jit functions, found without importing triton: through wrappers and globals."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from sundog.dataset import describe_run  # noqa: E402
from sundog.dataset.kernel_source import kernel_source  # noqa: E402

pytestmark = pytest.mark.compat

N = tl.constexpr(4)


@triton.jit
def innermost(x):
    return x * N


@triton.jit
def inner(x):
    return innermost(x) + tl.sum(x, 0)


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def outer(x_ptr, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n)
    tl.store(x_ptr + o, inner(x), mask=o < n)


@triton.jit(noinline=True)
def not_inlined(x):
    return innermost(x)


def test_dependencies_transitively_and_without_decorators() -> None:
    found = kernel_source(outer)
    assert [e["name"] for e in found] == ["outer", "inner", "innermost"]
    assert found[0]["text"].startswith("def outer(x_ptr, n, BLOCK: tl.constexpr):")
    assert found[2]["captures"] == {"N": 4}
    assert found == kernel_source(outer.fn)


def test_a_change_far_below_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe_run(outer, []).kernel_id
    monkeypatch.setitem(globals(), "N", tl.constexpr(5))
    assert describe_run(outer, []).kernel_id != before


def test_jit_options_count() -> None:
    assert kernel_source(not_inlined)[0]["options"] == {"noinline": True}
