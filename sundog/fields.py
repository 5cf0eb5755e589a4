"""Fields of a problem or config as words of a command line: block=4096,dtype=bfloat16."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["parse", "value"]


def value(word: str) -> Any:
    """A number, a torch dtype, a truth value, or the word itself."""
    kind = getattr(torch, word, None)
    if isinstance(kind, torch.dtype):
        return kind
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word)
    except ValueError:
        return word


def parse(text: str) -> dict[str, Any]:
    """'block=4096,dtype=bfloat16' as a dictionary."""
    found = {}
    for word in filter(None, text.split(",")):
        name, equals, rest = word.partition("=")
        if not (name and equals and rest):
            raise ValueError(f"{word!r} in {text!r}: expected name=value,name=value,...")
        found[name] = value(rest)
    return found
