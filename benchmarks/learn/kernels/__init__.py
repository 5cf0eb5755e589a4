"""The kernels of the dataset, one family per file."""

from __future__ import annotations

from ..subject import Subject
from . import (
    attention,
    elementwise,
    gather,
    matmul,
    moves,
    norms,
    pointwise,
    quantise,
    reductions,
    row_losses,
    softmax,
)

_FAMILIES = (
    attention, elementwise, gather, matmul, moves, norms, pointwise, quantise, reductions,
    row_losses, softmax,
)  # fmt: skip
SUBJECTS: dict[str, Subject] = {s.name: s for family in _FAMILIES for s in family.SUBJECTS}
