"""What `sundog isa` says of the fused ops: on no target does an access or a register fall short."""

from __future__ import annotations

import pytest

from sundog.ops import load as loading
from sundog.ops import op as ops
from sundog.tools import isa

# tests/tools/isa has the collectives.
FUSED = [op for op in ops.OPS if not hasattr(loading.find(op).cases(2)[0], "numel")]


@pytest.mark.sim_only
@pytest.mark.long
@pytest.mark.parametrize("op", FUSED)
def test_nothing_is_marked(op: str) -> None:
    assert not [kernel.marks for kernel in isa.inspect(op) if kernel.marks]
