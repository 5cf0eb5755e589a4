"""Fields of a problem or config: as words of a command line, block=4096, and in JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

__all__ = ["parse", "plain", "value"]


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


def plain(made: Any) -> dict[str, Any]:
    """A problem or config as JSON has it; a dtype by its name."""
    words = {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
        for k, v in dataclasses.asdict(made).items()
    }
    found: dict[str, Any] = json.loads(json.dumps(words))
    return found
