"""The axes of `sundog bench OP`: problems, algorithms and configs, in all combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...ops import load
from .._subject import Algorithm

__all__ = ["Choice", "parse_axes"]

Choice = tuple[str, dict[str, Any]]  # an algorithm, and fields of its config to change


def parse_axes(
    algorithms: Sequence[Algorithm], axes: Sequence[str], size: int
) -> tuple[list[Any], list[Choice]]:
    """Combine the axes: return all problems, and all algorithms with changes to their configs.

    'numel=1024,4096' is of the problem; 'algo=push,pull' names algorithms (without it: all that run
    without being named); others, as 'programs=8,16', are of those configs that have them.
    """
    modules = {each.algo: each.module for each in algorithms}
    op = algorithms[0].module
    problems: list[Any] = [op.cases(size)[0]]
    algos = [a.algo for a in algorithms if len(algorithms) == 1 or not a.by_request]
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
    return problems, _choices({algo: _types(modules[algo].Config) for algo in algos}, changes)


def _choices(fields: dict[str, dict[str, str]], changes: Sequence[dict[str, Any]]) -> list[Choice]:
    """Pair each algorithm with those changes that its config has a field for."""
    found: list[Choice] = []
    for algo, own in fields.items():
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
