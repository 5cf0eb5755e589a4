"""The axes of `sundog bench OP`: problems, algorithms and configs, in all combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ...ops import load
from ...ops.op import BY_REQUEST

__all__ = ["Choice", "parse_axes"]

Choice = tuple[str, dict[str, Any]]  # an algorithm, and fields of its config to change


def parse_axes(
    name: str, modules: Mapping[str, ModuleType], axes: Sequence[str], size: int
) -> tuple[list[Any], list[Choice]]:
    """The problems, and the algorithms and changes to their configs: all combinations of the axes.

    'numel=1024,4096' is of the problem; 'algo=push,pull' names algorithms (without it: all that are
    chosen without being named); others, as 'programs=8,16', are of those configs that have them.
    """
    op = next(iter(modules.values()))
    problems: list[Any] = [op.cases(size)[0]]
    algos = [algo for algo in modules if f"{name}.{algo}" not in BY_REQUEST or len(modules) == 1]
    changes: list[dict[str, Any]] = [{}]
    of_problem = _types(op.Problem)
    of_config = {k: t for module in modules.values() for k, t in _types(module.Config).items()}
    for axis in axes:
        key, _, text = axis.partition("=")
        words = [word for word in text.split(",") if word]
        if not words or key not in {"algo", *of_problem, *of_config}:
            known = ", ".join(("algo", *of_problem, *of_config))
            raise ValueError(f"axis {axis!r}: expected NAME=v1,v2,... with one of {known}")
        if key == "algo":
            algos = words
            unknown = [word for word in words if word not in modules]
            if unknown:
                raise ValueError(f"axis {axis!r}: no {unknown[0]!r} in {', '.join(modules)}")
        elif key in of_problem:
            values = [_value(axis, word, of_problem[key]) for word in words]
            problems = [load.changed(p, {key: v}) for p in problems for v in values]
        else:
            values = [_value(axis, word, of_config[key]) for word in words]
            changes = [{**change, key: value} for change in changes for value in values]
    return problems, _choices(modules, algos, changes)


def _choices(
    modules: Mapping[str, ModuleType], algos: Sequence[str], changes: Sequence[dict[str, Any]]
) -> list[Choice]:
    """Each algorithm with those changes that its config has a field for."""
    found: list[Choice] = []
    for algo in algos:
        own = _types(modules[algo].Config)
        for change in changes:
            choice = algo, {key: value for key, value in change.items() if key in own}
            if choice not in found:
                found.append(choice)
    return found


def _types(kind: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(kind)}


def _value(axis: str, word: str, kind: str) -> Any:
    value = load.value(word)
    if kind == "int" and type(value) is not int:
        raise ValueError(f"axis {axis!r}: {word!r} is not a number")
    return value
