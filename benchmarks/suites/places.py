"""Where the variables of a program in C are, while it is walked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """An element of a variable in memory."""

    slot: str
    offset: int = 0
    width: int = 4

    def __str__(self) -> str:
        plain = f"{self.slot} + {self.offset}" if self.offset else self.slot
        return plain if self.width == 4 else f"wide({plain})"


@dataclass(eq=False)
class Variable:
    """A name in C: a place in memory, or a pointer or handle, which is followed while walking."""

    place: Place
    value: Any = None  # None: only memory knows
    is_handle: bool = False


@dataclass
class Slots:
    """Where variables are: each element has 8 bytes."""

    sizes: dict[str, int] = field(default_factory=dict)

    def named(self, name: str, size: int = 1) -> str:
        self.sizes.setdefault(name, size)
        return name
