"""The memory model's table of what keeps loads after an acquire, row by row, in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
from triton.compiler import ASTSource

from sundog.compiled import hoisted

from .after_acquire import STAYS, product

pytestmark = pytest.mark.compat

BLOCK = 64
PLACES = [("sm_80", False), ("sm_90", False), ("sm_90", True), ("gfx942", False), ("gfx950", False)]


def source(after: str, described: bool) -> ASTSource:
    types = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "flags": "*i64", "junk": "*i32"}
    types |= {"epoch": "i64", "steps": "i32"}
    constants: dict[str, Any] = {"AFTER": after, "BLOCK": BLOCK}
    if described:
        types["a_tiles"] = f"tensordesc<fp16[{BLOCK}, {BLOCK}]>"
    else:
        constants["a_tiles"] = None
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: given[name] for name in product.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if "*" in t}
    return ASTSource(product, signature=signature, constexprs=constants, attrs=even)


@pytest.mark.parametrize(("target", "described"), PLACES)
@pytest.mark.parametrize("after", STAYS)
def test_loads_stay_after_the_acquire_or_not(after: str, target: str, described: bool) -> None:
    found = hoisted.find_in(source(after, described), {"num_stages": 3}, target)
    assert (found == []) == STAYS[after]
