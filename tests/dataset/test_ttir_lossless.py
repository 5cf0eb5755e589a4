"""Every edge, attribute, literal and location of a record matters: without it the module differs.

A damaged record either cannot be rebuilt, or Triton refuses the text, or Triton prints something
else. One thing is the exception: a property with its default value, which Triton's parser puts
back; the test checks that it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton_roundtrip import ARCHS, STAGES, lower_case, prints, prints_of_text

from sundog.dataset.triton.compile import lower
from sundog.dataset.triton.triton_module import load_module
from sundog.dataset.triton.ttir import extract_ttir_graph as extract
from sundog.dataset.triton.ttir import rebuild_module_text as rebuild

pytestmark = pytest.mark.compat

Way = tuple[str | int, ...]
SMALL = [("add", "ttir"), ("add", "ttgir"), ("call", "ttir")]


@cache
def _original(name: str, stage: str) -> tuple[str, str, tuple[str, str]]:
    """A small kernel's record as JSON, its rebuilt text, and what Triton prints of the module."""
    module = lower_case(name, "sm_90", stage)
    record = extract(module)
    return json.dumps(record), rebuild(record), prints(module)


def _paths(value: Any, path: Way = ()) -> Iterator[Way]:
    """The way to every field and item below, inner ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from _paths(item, (*path, key))


def _change(record: Any, path: Way, change: Callable[[Any, Any], None]) -> Any:
    holder = record
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return record


def _delete(holder: Any, key: Any) -> None:
    del holder[key]


def _alter(holder: Any, key: Any) -> None:
    old = holder[key]
    holder[key] = not old if isinstance(old, bool) else old + (1 if isinstance(old, int) else "x")


def _still_equal(record: Any, text: str, expected: tuple[str, str]) -> bool:
    try:
        rebuilt = rebuild(record)
        return rebuilt == text or prints_of_text(rebuilt) == expected
    except ValueError:
        return False


def _unseen(
    name: str, stage: str, change: Callable[[Any, Any], None], paths: Iterator[Way]
) -> list[tuple[Way, Any]]:
    """The changes after which the record still makes an equal module."""
    original, text, expected = _original(name, stage)
    tried, unseen = 0, []
    for path in paths:
        record = _change(json.loads(original), path, change)
        tried += 1
        if _still_equal(record, text, expected):
            unseen.append((path, record))
    assert tried > 50
    return unseen


@pytest.mark.parametrize(("name", "stage"), SMALL)
def test_each_edge_matters(name: str, stage: str) -> None:
    links = json.loads(_original(name, stage)[0])["links"]
    paths: Iterator[Way] = (("links", number) for number in range(len(links)))
    assert _unseen(name, stage, _delete, paths) == []


@pytest.mark.parametrize(("name", "stage"), SMALL)
def test_each_field_and_item_matters(name: str, stage: str) -> None:
    """Deletes, one at a time, whatever is in a node or an edge, at any depth."""
    original, text, _ = _original(name, stage)
    record = json.loads(original)
    paths = (
        (part, *path)
        for part in ("nodes", "links")
        for path in _paths(record[part])
        if path[-1] != "key"  # networkx's number of a parallel edge, not the module's
    )
    for path, damaged in _unseen(name, stage, _delete, paths):
        # Only a property at its default: Triton restores it.
        assert path[2] == "properties", path
        restored = extract(load_module(rebuild(damaged)))
        assert restored["nodes"] == record["nodes"], path
        assert rebuild(damaged) != text, path


@pytest.mark.parametrize(("name", "stage"), SMALL)
def test_each_literal_matters(name: str, stage: str) -> None:
    """Changes, one at a time, each number, bool and string: types and locations included."""
    record = json.loads(_original(name, stage)[0])

    def leaves() -> Iterator[Way]:
        for path in _paths({part: record[part] for part in ("nodes", "links")}):
            value = record
            for key in path:
                value = value[key]
            if path[-1] != "key" and isinstance(value, str | int):
                yield path

    assert _unseen(name, stage, _alter, leaves()) == []


def test_swapped_edges_matter() -> None:
    """Operand, block, operation and successor order are in the numbers of the edges."""
    original, text, expected = _original("control_flow", "ttir")
    links = json.loads(original)["links"]
    for field, kind in [
        ("operand", "data"),
        ("position", "contains"),
        ("position", "successor"),
        ("region", "region"),
        ("position", "argument"),
    ]:
        first, second = _two_of_one_node(links, kind, field)
        record = json.loads(original)
        a, b = record["links"][first], record["links"][second]
        a[field], b[field] = b[field], a[field]
        assert not _still_equal(record, text, expected), kind


def _two_of_one_node(links: list[dict[str, Any]], kind: str, field: str) -> tuple[int, int]:
    """Two edges of a kind that end in, or leave, one node and have different numbers."""
    end = "target" if kind == "data" else "source"
    other = "source" if kind == "data" else "target"
    for first, a in enumerate(links):
        for second, b in enumerate(links):
            same = a["edge_kind"] == b["edge_kind"] == kind and a[end] == b[end]
            if same and a[other] != b[other] and a[field] != b[field]:
                return first, second
    raise AssertionError(f"control_flow has no two {kind} edges at one node")


@gluon.jit
def gluon_kernel(x_ptr, out_ptr, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    other: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    x = gl.convert_layout(gl.load(x_ptr + offsets), other)
    gl.store(out_ptr + gl.arange(0, BLOCK, layout=other), x * 2.0)


def test_gluon_kernel_is_rebuilt() -> None:
    x = torch.empty(1024, device="meta")
    module = lower(gluon_kernel, (x, x, 256))
    record = extract(module)
    assert [alias["name"] for alias in record["nodes"][0]["aliases"]] == ["#blocked", "#blocked1"]
    assert prints_of_text(rebuild(record)) == prints(module)
    with pytest.raises(ValueError, match="ask for ttgir"):
        lower(gluon_kernel, (x, x, 256), stage="ttir")


HELION = ["add", "softmax", "matmul"]


@pytest.mark.parametrize("name", HELION)
def test_helion_output_is_rebuilt(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    pytest.importorskip("helion")
    import helion_kernels

    x = torch.ones(128, 128)
    args = (x,) if name == "softmax" else (x, x)
    bound = getattr(helion_kernels, name).bind(args)
    launches = []

    def capture(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    bound.compile_config(bound.config_spec.default_config())(*args, _launcher=capture)
    kernel, launch_args, options = launches[0]
    for arch in ARCHS:
        for stage in STAGES:
            module = lower(kernel, launch_args, options, arch=arch, stage=stage)
            record = extract(module)
            assert prints_of_text(rebuild(record)) == prints(module)
            assert str(tmp_path) not in json.dumps(record)
