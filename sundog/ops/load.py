"""What a command line names: an op or a file of the user's, and fields of a problem as words.

Fields are given as block=4096, and in JSON. How an op's name becomes its module is in op.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import SundogError
from .op import algorithms, find, functions, is_op, load, load_package, sentence

__all__ = [
    "algorithms", "changed", "find", "functions", "is_op", "load", "load_package", "parse", "plain",
    "running", "value",
]  # fmt: skip


@contextmanager
def running(what: str) -> Iterator[None]:
    """A tool runs somebody's op or function: what that raises becomes a sentence with the line."""
    try:
        yield
    except (SundogError, ValueError):
        raise
    except Exception as error:
        raise SundogError(f"{what} failed: {sentence(error)}") from error


_KINDS = {int: "a whole number", bool: "true or false", torch.dtype: "a dtype of torch"}


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


def changed(made: Any, changes: dict[str, Any]) -> Any:
    """A problem or config with other values in some fields; a ValueError where they can't be."""
    known = {field.name: str(field.type) for field in dataclasses.fields(made)}
    for name, new in changes.items():
        if name not in known:
            raise ValueError(f"{type(made).__name__} has no {name!r}: {', '.join(known)}")
        old = getattr(made, name)
        kind = torch.dtype if "dtype" in known[name] else type(new if old is None else old)
        if type(new) is not kind:
            raise ValueError(f"{name}={new}: expected {_KINDS.get(kind, kind.__name__)}")
        if isinstance(new, int) and new < 0:
            raise ValueError(f"{name}={new} is negative")
        if name == "size" and new != old:
            raise ValueError(f"size={new}: there are {old} ranks, as --world says")
    return dataclasses.replace(made, **changes)


def plain(made: Any) -> dict[str, Any]:
    """A problem or config as JSON has it; a dtype by its name."""
    words = {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
        for k, v in dataclasses.asdict(made).items()
    }
    found: dict[str, Any] = json.loads(json.dumps(words))
    return found
