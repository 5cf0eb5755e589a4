"""Triton's modules as graph records: lossless, relative, deterministic, fast."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton_roundtrip import (
    ARCHS,
    KERNELS,
    STAGES,
    load_kernels,
    lower_case,
    prints,
    prints_of_text,
)

from sundog.dataset.ir_graph import canonical_json, ir_id_of, to_networkx
from sundog.dataset.triton.compile import gpu_target, lower, lower_source
from sundog.dataset.triton.mlir import MlirOperation, parse_module, print_module
from sundog.dataset.triton.mlir_spell import LOCATION_KINDS, VALUE_KINDS
from sundog.dataset.triton.triton_module import generic_text, read_module
from sundog.dataset.triton.ttir import EDGE_KINDS, NODE_KINDS, Alias, Edge, ModuleNode, TtirGraph
from sundog.dataset.triton.ttir import extract_ttir_graph as extract
from sundog.dataset.triton.ttir import rebuild_module_text as rebuild

pytestmark = pytest.mark.compat

NAMES = list(load_kernels().CASES)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMES)
def test_module_is_rebuilt_from_its_record(name: str, arch: str, stage: str) -> None:
    module = lower_case(name, arch, stage)
    expected = prints(module)
    record = json.loads(canonical_json(extract(module)))  # key order must not matter
    assert prints_of_text(rebuild(record)) == expected
    assert prints(module) == expected, "extraction changed the module"
    assert record["graph"]["stage"] == stage


def _op_lines(text: str) -> list[str]:
    """The lines of operations without names of values and blocks and without locations."""
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line.startswith(('"', "%", "}"))]
    lines = [re.sub(r"^%.*? = ", "", re.sub(r" loc\(.*", "", line)) for line in lines]
    return [re.sub(r"%[\w$.-]+(#\d+)?|\^bb\d+", "%", line) for line in lines]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_an_operation_is_left_out(name: str, arch: str, stage: str) -> None:
    """Also what Triton's parser would put back, such as a property with its default."""
    module = lower_case(name, arch, stage)
    text = generic_text(module)
    assert _op_lines(print_module(parse_module(text))) == _op_lines(text)
    nodes = [node for node in extract(module)["nodes"] if node["node_kind"] == "op"]
    for node, op in zip(nodes, _preorder(read_module(module).operation), strict=True):
        assert node["op"] == op.name
        assert node["properties"] == op.properties
        assert node["attributes"] == op.attributes
        assert node["result_types"] == op.result_types
        assert node["location"] == op.location


def _preorder(op: MlirOperation) -> list[MlirOperation]:
    inner = [o for region in op.regions for block in region for o in block.operations]
    return [op, *(found for o in inner for found in _preorder(o))]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_reader_agrees_with_libtriton_walk(name: str, stage: str) -> None:
    module = lower_case(name, "sm_90", stage)
    walked: Counter[tuple[str, int, int, int]] = Counter()

    def visit(op: Any) -> None:
        counts = op.get_num_operands(), op.get_num_results(), op.get_num_regions()
        walked[(op.get_name(), *counts)] += 1

    module.walk(visit)
    read = Counter(
        (op.name, len(op.operands), len(op.result_types), len(op.regions))
        for op in _preorder(parse_module(generic_text(module)).operation)
    )
    assert read == walked


def test_extraction_is_silent_and_needs_a_context(capfd: pytest.CaptureFixture[str]) -> None:
    module = lower_case("add", "sm_90", "ttgir")
    extract(module)
    assert capfd.readouterr() == ("", "")
    module.context = None
    with pytest.raises(ValueError, match=r"module\.context"):
        extract(module)


def test_records_are_deterministic() -> None:
    first = canonical_json(extract(lower_case("attention", "sm_90", "ttgir")))
    assert canonical_json(extract(lower_case("attention", "sm_90", "ttgir"))) == first


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["call", "softmax"])
def test_another_checkout_gives_the_same_bytes(name: str, stage: str, tmp_path: Path) -> None:
    records = []
    for folder in ("here", "there/and/deeper"):
        path = tmp_path / folder / "kernels.py"
        path.parent.mkdir(parents=True)
        shutil.copy(KERNELS, path)
        records.append(canonical_json(extract(lower_case(name, "sm_90", stage, path))))
    assert records[0] == records[1]
    assert str(tmp_path) not in records[0]
    files = set(re.findall(r'"file":"([^"]*)"', records[0]))
    assert "kernels.py" in files
    assert not any(file.startswith("/") for file in files)


def test_run_identity_is_recorded_but_not_hashed() -> None:
    module = lower_case("add", "sm_90", "ttir")
    plain = extract(module)
    named = extract(module, run_id="r", kernel_id="k", kernel_name="n", input_shapes=[[4096]])
    assert named["ir_id"] == plain["ir_id"] == ir_id_of(plain)
    assert named["run_id"] == named["graph"]["run_id"] == "r"
    assert named["graph"]["input_shapes"] == [[4096]]
    assert (named["graph"]["kernel_name"], plain["graph"]["kernel_name"]) == ("n", "add_kernel")
    assert extract(lower_case("add", "sm_90", "ttgir"))["ir_id"] != plain["ir_id"]


def test_compiled_kernel_and_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text lacks the locations of loop variables; all else is the in-memory module's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = load_kernels().softmax_kernel
    names = ["x_ptr", "out_ptr", "x_stride", "out_stride", "num_rows", "num_cols", "BLOCK"]
    types = ["*fp32", "*fp32", "i32", "i32", "i32", "i32", "constexpr"]
    signature = dict(zip(names, types, strict=True))
    source = triton.compiler.ASTSource(kernel, signature, {"BLOCK": 64})
    compiled = triton.compile(source, target=gpu_target("sm_90"))
    record = extract(compiled)
    text = extract(compiled.asm["ttgir"])
    stages = record["graph"].pop("stages")  # a text is one stage of those of a compiled kernel
    assert set(text["graph"].pop("stages") or ()) < set(stages)
    assert record == text
    assert str(tmp_path) not in canonical_json(record)
    module = lower_source(source, {}, arch="sm_90", stage="ttgir")
    whole = extract(module)
    differing = [a for a, b in zip(record["nodes"], whole["nodes"], strict=True) if a != b]
    assert differing
    assert {node["node_kind"] for node in differing} == {"argument"}
    assert record["links"] == whole["links"]
    assert all(node["location"]["kind"] == "unknown" for node in differing)
    assert extract(compiled.asm["ttir"])["graph"]["stage"] == "ttir"


def test_launch_specialises_as_a_real_one() -> None:
    kernels = load_kernels()
    tensor = kernels.CASES["add"].args[0]
    case = kernels.CASES["add"]

    def attrs(numel: int, **options: Any) -> Any:
        args = (tensor, tensor, tensor, numel)
        record = extract(lower(case.kernel, args, {"BLOCK": 1024, **options}, stage="ttgir"))
        function = next(node for node in record["nodes"] if node.get("op") == "tt.func")
        module = record["nodes"][0]["attributes"]
        return function["properties"]["arg_attrs"], module["ttg.num-warps"]["value"]

    divisible = {"kind": "int", "value": 16, "type": "i32"}
    assert attrs(4096)[0][3]["entries"]["tt.divisibility"] == divisible
    assert attrs(4001)[0][3]["entries"] == {}
    assert len(attrs(1)[0]) == 3  # equal to one: a constant, no argument
    assert attrs(4096, num_warps=8)[1] == 8


def test_launch_takes_tritons_debug_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.device_assert` is code only in debug mode, as at a launch."""
    case = load_kernels().CASES["literals"]

    def has_assert() -> bool:
        record = extract(lower(case.kernel, case.args, {"BLOCK": 128}, stage="ttir"))
        return any(node.get("op") == "tt.assert" for node in record["nodes"])

    assert not has_assert()
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    assert has_assert()


def test_bad_requests_are_refused_in_words() -> None:
    case = load_kernels().CASES["add"]
    with pytest.raises(ValueError, match="sm_NN"):
        lower(case.kernel, case.args, case.options, arch="h100")
    with pytest.raises(ValueError, match="ttir, ttgir"):
        lower(case.kernel, case.args, case.options, stage="ptx")
    with pytest.raises(ValueError, match=r"not a @triton\.jit kernel"):
        lower(print, ())
    with pytest.raises(ValueError, match="TRITON_STORE_BINARY_ONLY"):
        extract(SimpleNamespace(asm={"cubin": b""}))
    with pytest.raises(ValueError, match="cannot parse"):
        extract("this is not a module")


def test_autotuned_kernel_is_lowered_by_its_function() -> None:
    case = load_kernels().CASES["add"]
    tuned = triton.autotune([triton.Config({"BLOCK": 256})], key=["numel"])(case.kernel)
    plain = extract(lower(case.kernel, case.args, case.options))
    assert extract(lower(tuned, case.args, case.options)) == plain


def test_nodes_and_edges_follow_the_schema_and_load_in_networkx() -> None:
    nx = pytest.importorskip("networkx")
    seen = set()
    for name in NAMES:
        record = extract(lower_case(name, "sm_90", "ttgir"))
        assert set(record["graph"]) == set(TtirGraph.__annotations__)
        assert set(record["nodes"][0]) == set(ModuleNode.__annotations__)
        for node in record["nodes"][1:]:
            assert set(node) == set(NODE_KINDS[node["node_kind"]].__annotations__)
        for link in record["links"]:
            seen.add(link["edge_kind"])
            assert set(link) == set(EDGE_KINDS[link["edge_kind"]].__annotations__)
        graph = to_networkx(record)
        assert isinstance(graph, nx.MultiDiGraph)
        assert graph.number_of_nodes() == len(record["nodes"])
        assert graph.number_of_edges() == len(record["links"])
    assert seen == set(EDGE_KINDS)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in _strings(item)]


@pytest.mark.parametrize("name", NAMES)
def test_no_field_holds_printed_ir(name: str) -> None:
    for arch in ARCHS:
        record = extract(lower_case(name, arch, "ttgir"))
        printed = re.compile(r"%\w+ =|loc\(|\) -> |\^bb|tensor<|#ttg\.\w+<")
        assert not [text for text in _strings(record["nodes"]) if printed.search(text)]


DOCS = Path(__file__).parents[2] / "docs" / "ir_graph.md"


def _documented(heading: str) -> set[str]:
    """The first column of the tables under a heading of the docs."""
    section = re.split(r"^#+ ", DOCS.read_text(), flags=re.MULTILINE)
    body = next(part for part in section if part.split("\n", 1)[0] == heading)
    return set(re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE))


def test_docs_name_every_field() -> None:
    assert _documented("graph") == set(TtirGraph.__annotations__)
    assert _documented("op") == set(ModuleNode.__annotations__)
    assert _documented("block") == set(NODE_KINDS["block"].__annotations__)
    assert _documented("argument") == set(NODE_KINDS["argument"].__annotations__)
    assert _documented("alias") == set(Alias.__annotations__)
    assert _documented("Edges") == set(Edge.__annotations__) | set(EDGE_KINDS)
    for kind, schema in EDGE_KINDS.items():
        row = next(row for row in DOCS.read_text().split("\n") if row.startswith(f"| `{kind}` | "))
        own = set(schema.__annotations__) - set(Edge.__annotations__)
        assert set(re.findall(r"`(\w+)`", row.split("|")[3])) == own
    assert _documented("Values") == set(VALUE_KINDS)
    assert _documented("Locations") == set(LOCATION_KINDS)
