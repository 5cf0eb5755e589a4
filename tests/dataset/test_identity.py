"""Ids: equal for the same kernel anywhere, different for whatever changes code or time."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import pytest

from sundog.dataset import RunInfo, describe_run, identity
from sundog.dataset.identity import config_json, describe_value, sample_id_of
from sundog.dataset.kernel_source import kernel_source

torch = pytest.importorskip("torch")

SCALE = 2
TABLE = {"relu": lambda x: max(x, 0)}


def helper(x: float) -> float:
    return x * SCALE


def kernel(x: float) -> float:
    return helper(x) + 1


def texts(kernel: object) -> str:
    return json.dumps([[e["text"], e["captures"], e["options"]] for e in kernel_source(kernel)])


def matmul(x: object, y: object, epilogue: Callable = lambda acc: acc) -> object:
    return epilogue(x @ y)  # type: ignore[operator]


def run_id(*args: object, **options: object) -> str:
    return describe_run(matmul, args, **options).run_id  # type: ignore[arg-type]


def test_transposed_operand_is_another_run() -> None:
    """Upstream's gap 7: equal shapes and dtypes, other strides, other code, one run_id."""
    x, y = torch.empty(64, 64), torch.empty(64, 64)
    assert run_id(x, y) == run_id(torch.ones(64, 64), y)  # the values of tensors do not count
    assert run_id(x, y) != run_id(x, y.t())


def test_closure_and_value_arguments_are_other_runs() -> None:
    x = torch.empty(8, 8)

    def scaled(factor: float) -> Callable:
        return lambda acc: acc * factor

    runs = [
        run_id(x, x),
        run_id(x, x, lambda acc: acc),
        run_id(x, x, lambda acc: torch.relu(acc)),
        run_id(x, x, scaled(2.0)),
        run_id(x, x, scaled(3.0)),
        run_id(x, x, functools.partial(helper, 3)),
        run_id(x, x, 1),
        run_id(x, x, True),
        run_id(x, x, 1.0),
        run_id(x, x, "1"),
        run_id(x, x, numpy.float64(1)),  # has a shape and a dtype, as a tensor has
        run_id(x, x, numpy.float64(2)),
        run_id(x, x, [x]),
        run_id(x, x, [x.half()]),
        run_id(x, x, {"a": x}),
        run_id(x, x, torch.float16),
        run_id(x, x, torch.bfloat16),
        run_id(x[:, 1:], x[:, 1:]),
        run_id(x.flatten()[:-8].view(7, 8), x),
        run_id(x.flatten()[1:-7].view(7, 8), x),  # alignment only
        run_id(torch.empty(8, 8, device="meta"), x),
    ]
    assert len(set(runs)) == len(runs)
    assert runs[3] == run_id(x, x, scaled(2.0))


def test_world_backend_hardware_and_versions_identify_a_run() -> None:
    info = describe_run(matmul, [torch.empty(2)], settings={"a": 1})
    assert info.run_id == replace(info, settings={"a": 2}).run_id
    others = [
        replace(info, world=2),
        replace(info, backend="sim"),
        replace(info, codegen_settings={"static_shapes": True}),
        replace(info, hardware={**info.hardware, "name": "other"}),  # type: ignore[dict-item]
        replace(info, versions={**info.versions, "triton": "0"}),  # type: ignore[dict-item]
        replace(info, arguments=[]),
    ]
    assert len({other.run_id for other in others} | {info.run_id}) == len(others) + 1
    kernels = {other.kernel_id for other in others}
    assert len(kernels) == 2  # the code-generation settings alone
    clocks = {**info.hardware, "sm_clock_mhz": 1, "driver": "1"}  # type: ignore[dict-item]
    assert replace(info, hardware=clocks).run_id == info.run_id


def test_a_run_is_described_by_all_that_it_is_told() -> None:
    args = {"x": torch.empty(2, 3), "scale": 4}
    told = dict(codegen_settings={"static": True}, settings={"seed": 1}, world=4, backend="shm")
    info = describe_run(matmul, args, kernel_name="mm", **told)  # type: ignore[arg-type]
    assert {name: getattr(info, name) for name in told} == told
    assert info.kernel_name == "mm"
    assert [each["name"] for each in info.arguments or ()] == ["x", "scale"]
    assert info.input_shapes() == [[2, 3]]
    assert (info.hardware, info.versions) == (identity.hardware(), identity.versions())


def test_source_has_what_is_called_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = kernel_source(kernel)
    assert first["text"] == "def kernel(x: float) -> float:\n    return helper(x) + 1\n"
    assert (second["name"], second["captures"]) == ("helper", {"SCALE": 2})
    assert first["path"] == "test_identity.py"
    before = texts(kernel)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3)
    assert texts(kernel) != before


def test_lambdas_on_one_line_differ() -> None:
    pair = (lambda x: x + 1, lambda x: x + 2)
    assert texts(pair[0]) != texts(pair[1])


def test_methods_partials_wrappers_and_tables() -> None:
    def twice(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def inner(x: float) -> float:
            return fn(fn(x))

        return inner

    wrapped = twice(helper)
    uses = {
        "table": lambda x: TABLE["relu"](x),
        "wrapped": lambda x: wrapped(x),
        "class": lambda x: Config(x),
        "module": lambda x: json.dumps(torch.relu(x)),
    }
    names = {key: [e["name"] for e in kernel_source(fn)][1:] for key, fn in uses.items()}
    assert names["table"] == ["<lambda>"]
    inner, innermost = kernel_source(uses["wrapped"])[1:]
    assert inner["text"].startswith("def inner")  # the wrapper, and what it wraps
    assert innermost["text"].startswith("def helper")
    assert names["class"] == ["Config", "helper"]
    assert names["module"] == []  # Python's and torch's own: the versions stand for them


@dataclass
class Config:
    block: int

    def scaled(self) -> float:
        return helper(self.block)


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_another_checkout_gives_the_same_bytes(tmp_path: Path) -> None:
    code = "def helper(x):\n    return x\n\n\ndef kernel(x):\n    return helper(x)\n"
    found = []
    for checkout in ("one", "two/deeper"):
        package = tmp_path / checkout / "pkg"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "k.py").write_text(code)
        found.append(describe_run(load(package / "k.py").kernel, [3]))
    assert found[0] == found[1]
    assert found[0].kernel_source is not None
    assert [e["path"] for e in found[0].kernel_source] == ["pkg/k.py"] * 2
    # Nor does it matter in which file a function stands, be it the kernel or an argument.
    shutil.copy(tmp_path / "one/pkg/k.py", tmp_path / "moved.py")
    functions = [load(tmp_path / name).kernel for name in ("one/pkg/k.py", "moved.py")]
    assert len({describe_run(fn, [fn]).run_id for fn in functions}) == 1
    assert str(tmp_path) not in json.dumps(found[0].kernel_source)


def test_a_function_without_source_is_its_bytecode() -> None:
    def make(text: str) -> object:
        space: dict = {}
        exec(text, space)
        return space["f"]

    one, same, other = (make(f"def f(x):\n return x + {n}") for n in (1, 1, 2))
    ids = [describe_run(f, []).kernel_id for f in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]


def test_what_fails_is_null_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Hostile:
        @property
        def shape(self) -> object:
            raise RuntimeError("no shape")

        dtype = None

    with caplog.at_level(logging.WARNING, "sundog.dataset"):
        info = describe_run(kernel, [Hostile()])
    assert info.arguments is None
    assert info.kernel_source is not None
    assert [r.getMessage() for r in caplog.records] == [
        "could not record the arguments of kernel: RuntimeError: no shape"
    ]
    assert len(info.run_id) == 64
    # A kernel whose source is unknown is still told from another.
    assert RunInfo("a").kernel_id != RunInfo("b").kernel_id


def test_ids_are_the_same_in_another_process(tmp_path: Path) -> None:
    """No address, no dict order, no hash seed in them."""
    code = (
        "from sundog.dataset import describe_run\n"
        "from sundog.dataset.identity import config_json, sample_id_of\n"
        "class C: pass\n"
        "OBJ = C(); S = {'b', 'a', 'c'}\n"
        "def kernel(x): return (OBJ, S, x)\n"
        "info = describe_run(kernel, {'x': C(), 'y': {'q', 'w', 'e'}})\n"
        "print(info.run_id, sample_id_of(info.run_id, config_json({'b': 1, 'a': (2,)})))\n"
    )
    (tmp_path / "k.py").write_text(code)
    outputs = {
        subprocess.check_output(
            [sys.executable, tmp_path / "k.py"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            text=True,
        )
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_sample_ids() -> None:
    assert config_json({"b": 1, "a": (1, 2)}) == config_json({"a": [1, 2], "b": 1})
    assert config_json(Config(3)) == '{"block":3}'
    samples = {sample_id_of(r, config_json(c)) for r in "ab" for c in ({"x": 1}, {"x": True})}
    assert len(samples) == 4
    drawn = {"x": numpy.int64(64), "y": numpy.bool_(True), "z": numpy.float32(0.5)}  # by numpy
    assert config_json(drawn) == '{"x":64,"y":true,"z":0.5}'
    assert config_json(numpy.longdouble("0.5")) == '"0.5"'


def test_describe_value_of_nested_arguments() -> None:
    x = torch.empty(2, 3).t()
    found = describe_value([x, {"k": (1.5, None)}])
    tensor = found["items"][0]
    assert (tensor["shape"], tensor["stride"], tensor["dtype"]) == ([3, 2], [1, 3], "torch.float32")
    assert (tensor["alignment"], tensor["device"]) == (16, "cpu")
    bound = describe_value(functools.partial(helper, 3))
    assert (bound["kind"], bound["type"]) == ("function", "functools.partial")
    assert describe_value(Config)["kind"] == "value"
    inner = found["items"][1]["items"][0]
    assert [item["value"] for item in inner["items"]] == [1.5, None]
