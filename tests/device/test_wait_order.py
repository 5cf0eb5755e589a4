"""In compiled code, no tile is loaded before the wait that stands before it in the source."""

from __future__ import annotations

import functools
import linecache
from typing import Any

import pytest
from . import wait_kernels
from triton.compiler import ASTSource

from sundog.dataset.triton.compile import lower_source
from sundog.tools.isa import hoisted
from sundog.tools.isa.assembly import Place

pytestmark = pytest.mark.compat

TARGETS = ("sm_90", "gfx942", "gfx950")
STAGES = (1, 2, 3, 4)
BLOCK = 64


def hoisted_loads(
    target: str, wait: str, stages: int, described: bool = False
) -> list[hoisted.Hoisted]:
    ttgir = lower_source(
        source_of(wait, described), {"num_stages": stages}, arch=target, stage="ttgir"
    )
    return hoisted.find(written(target, wait, described), ttgir, constant={"ctx"})


@functools.cache
def written(target: str, wait: str, described: bool) -> str:
    """The TTIR, which is the same for every number of stages."""
    return str(lower_source(source_of(wait, described), {}, arch=target, stage="ttir"))


@functools.cache
def source_of(wait: str, described: bool) -> ASTSource:
    types = {"a": "*fp16", "b": "*fp16", "wrong": "*i32", "junk": "*i32", "epoch": "i64"}
    types |= {"steps": "i32", "late": "i32"}
    types |= dict.fromkeys(("flags", "done", "counter", "ctx"), "*i64")
    constants: dict[str, Any] = {"WAIT": wait, "FENCED": False, "BLOCK": BLOCK}
    if described:
        types["a_tiles"] = f"tensordesc<fp16[{BLOCK}, {BLOCK}]>"
    else:
        constants["a_tiles"] = None
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    kernel = wait_kernels.arriving_product
    signature = {name: given[name] for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if "*" in t}
    return ASTSource(kernel, signature=signature, constexprs=constants, attrs=even)


def source_line(place: Place) -> str:
    """The line of the innermost function."""
    return linecache.getline(wait_kernels.__file__, place[0][1]).strip()


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("wait", wait_kernels.WAITS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_tile_is_loaded_before_its_wait(target: str, wait: str, stages: int) -> None:
    assert hoisted_loads(target, wait, stages) == []


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("wait", wait_kernels.WAITS)
def test_no_tile_is_loaded_by_descriptor_before_its_wait(wait: str, stages: int) -> None:
    assert hoisted_loads("sm_90", wait, stages, described=True) == []


@pytest.mark.parametrize(
    ("target", "described"), [("sm_80", False), ("sm_90", True), *((t, False) for t in TARGETS)]
)
def test_without_the_barrier_tiles_are_loaded_before_their_wait(
    target: str, described: bool
) -> None:
    """So the tests above can fail: Triton does pipeline this loop."""
    for stages in (2, 3, 4):
        found = hoisted_loads(target, wait_kernels.BARE, stages, described)
        assert [source_line(each.load)[:4] for each in found] == ["x = ", "y = "]
        assert {source_line(each.acquire)[:7] for each in found} == {"seen = "}
    assert hoisted_loads(target, wait_kernels.BARE, 1, described) == []
