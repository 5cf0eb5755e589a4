"""With tracing off a kernel has the instructions that it has with its trace points cut out."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from sundog.compiled.recorded import compile_launch
from sundog.tools._launches import record
from sundog.tools.isa import Case, functions

pytestmark = pytest.mark.sim_only

SUBJECTS = {  # an op, and the modules that its kernel's trace points are in
    "all_gather.push": ["sundog.device.signal", "sundog.collectives.all_gather_push"],
    "all_gather_matmul.hbm_buffer": [
        "sundog.device.signal",
        "sundog.device.local",
        "sundog.fused._fetchers",
        "sundog.fused._workers",
        "sundog.fused.all_gather_matmul_hbm_buffer",
    ],
}


class CutOut(ast.NodeTransformer):
    """Points alone go; a signal or a wait loses its TRACE."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        match node.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="trace"))):
                self.count += 1
                return ast.Pass()
            case ast.Call(args=[*_, last]) as call if ast.unparse(last) in ("TRACE", "cfg.trace"):
                self.count += 1
                call.args.pop()
        return node


def instructions(op: str) -> list[str]:
    """Of the kernel that a call launches, for sm_90."""
    [(_, fn, heap)] = functions(op, Case({}, {}, 2))
    [launch] = record(fn, 2, heap)
    text = compile_launch(launch, "sm_90").asm["ptx"]
    code = text[text.index(".entry") : text.rindex("}")]
    lines = [re.sub(r"//.*", "", line).strip() for line in code.splitlines()]
    return [line for line in lines if re.match(r"@?%?\w[\w.%]*\s.*;", line)]


@pytest.mark.parametrize("op", SUBJECTS)
def test_off_is_as_without(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_points = instructions(op)
    for name in SUBJECTS[op]:
        cut = CutOut()
        tree = cut.visit(ast.parse(inspect.getsource(sys.modules[name])))
        assert cut.count > 0
        path = tmp_path / f"{name}.py"
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        package, _, last = name.rpartition(".")
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules[package], last, module)
        spec.loader.exec_module(module)
    assert len(with_points) > 100
    assert instructions(op) == with_points
