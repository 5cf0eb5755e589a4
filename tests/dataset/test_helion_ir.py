"""Helion's device IR as a graph record: lossless, and none of the ten known gaps (helion.md 1.3).

Gaps 7 and 9 are about run identity and rows: they are tested in test_helion_collect.py.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import shutil
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("helion")

import operator

import helion
import networkx
import torch
from helion_kernels import CASES
from support.scripts import Script

from sundog.dataset.helion.device_ir import IrEdge, IrGraphMeta, IrNode, extract_ir_graph
from sundog.dataset.helion.device_rebuild import differences, graph_differences, rebuild
from sundog.dataset.helion.device_regions import KNOWN_REGION_KINDS, is_graph_id
from sundog.dataset.helion.node_values import MAX_DISPLAY, encode, resolve_target, warn_once
from sundog.dataset.ir_graph import IR_SCHEMA_VERSION, canonical_json, ir_id_of, to_networkx

IDENTITY: dict[str, Any] = {
    "run_id": "r",
    "kernel_id": "k",
    "kernel_name": "n",
    "input_shapes": [[2, 3]],
}
_bound: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield
    _bound.clear()


def bind(name: str) -> Any:
    if name not in _bound:
        kernel, args = CASES[name]()
        _bound[name] = kernel.bind(args)
    return _bound[name]


def extract(name: str) -> Any:
    """A record that has been on disk: what the reader sees, not what the writer had."""
    bound = bind(name)
    record = extract_ir_graph(bound.host_function.device_ir, env=bound.env, **IDENTITY)
    return json.loads(canonical_json(record))


def compare(name: str, record: Any) -> list[str]:
    bound = bind(name)
    return differences(bound.host_function.device_ir, record, env=bound.env)


def node(record: Any, node_id: str) -> Any:
    return next(n for n in record["nodes"] if n["id"] == node_id)


def edges(record: Any, kind: str) -> list[Any]:
    return [e for e in record["links"] if e["edge_kind"] == kind]


def ends(found: list[Any]) -> set[tuple[str, str]]:
    return {(e["source"], e["target"]) for e in found}


def _is_one_piece(graph: Any) -> bool:
    """Connected, but for the `output(None)` that ends every root."""
    lonely = [
        n for n, d in graph.nodes(data=True) if d["op_kind"] == "output" and not graph.degree(n)
    ]
    return networkx.is_weakly_connected(graph.subgraph(set(graph) - set(lonely)))


# ---- lossless


@pytest.mark.parametrize("name", CASES)
def test_rebuilt_graphs_equal_the_originals(name: str) -> None:
    assert compare(name, extract(name)) == []


@pytest.mark.parametrize("name", CASES)
def test_rebuilt_graphs_print_the_same(name: str) -> None:
    # fx's own printer, as a second opinion that shares no code with ours.
    graphs = rebuild(extract(name))
    for info in bind(name).host_function.device_ir.graphs:
        for old, new in zip(info.graph.nodes, graphs[info.graph_id].nodes, strict=True):
            assert old.format_node() == new.format_node()


@pytest.mark.parametrize("name", ["layer_norm", "branch", "until", "reduce_pair", "stepped"])
def test_deleting_any_edge_breaks_equality(name: str) -> None:
    record = extract(name)
    for i, edge in enumerate(record["links"]):
        damaged = {**record, "links": record["links"][:i] + record["links"][i + 1 :]}
        assert compare(name, damaged), edge
        if edge["edge_kind"] == "data":  # seen by the rebuilt graphs alone
            assert graph_differences(bind(name).host_function.device_ir, damaged), edge


@pytest.mark.parametrize("field", sorted({**IrNode.__annotations__}))
def test_deleting_any_attribute_breaks_equality(field: str) -> None:
    record = extract("attention")
    for i in (3, len(record["nodes"]) // 2, len(record["nodes"]) - 2):
        damaged = copy.deepcopy(record)
        del damaged["nodes"][i][field]
        assert compare("attention", damaged)


def _literals(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in an argument template that is neither a hole nor a container."""
    if isinstance(value, dict) and value["t"] in ("list", "tuple", "slice"):
        return [p for i, v in enumerate(value["v"]) for p in _literals(v, (*path, i))]
    if isinstance(value, dict) and value["t"] == "dict":
        return [p for i, (_, v) in enumerate(value["v"]) for p in _literals(v, (*path, i, 1))]
    return [] if value == {"t": "node"} else [path]


def _delete_literal(template: Any, path: tuple[Any, ...]) -> None:
    for step in path[:-1]:
        template = template["v"][step] if isinstance(template, dict) else template[step]
    inner = template["v"] if isinstance(template, dict) else template
    if isinstance(template, dict) and template["t"] == "slice":
        inner[path[-1]] = 12345  # a slice has always three parts
    else:
        del inner[path[-1]]


@pytest.mark.parametrize("name", ["softmax", "attention", "branch", "stepped", "add_kept"])
def test_deleting_any_literal_breaks_equality(name: str) -> None:
    record = extract(name)
    device_ir = bind(name).host_function.device_ir
    count = 0
    for i, entry in enumerate(record["nodes"]):
        for field in ("args", "kwargs"):
            for path in _literals(entry[field]):
                if path:
                    damaged = copy.deepcopy(record)
                    _delete_literal(damaged["nodes"][i][field], path)
                    assert graph_differences(device_ir, damaged), (entry["id"], path)
                    count += 1
    assert count > 10


def test_every_kind_of_value_survives() -> None:
    shape = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    size = shape.create_unbacked_symint() * 2 + 1
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    inf, nan = float("inf"), float("nan")
    values = [
        None,
        True,
        1,
        1.0,
        -0.0,
        inf,
        -inf,
        nan,
        1e-300,
        2**70,
        "s",
        1j,
        ...,
        slice(x, None, 2),
    ]
    values += [
        (),
        [],
        (x, [x, (1,)]),
        {"a": x, "b": [3]},
        torch.float8_e4m3fn,
        torch.device("cuda:1"),
    ]
    values += [torch.strided, torch.channels_last, size, torch.ops.aten.add.Tensor, operator.mul]
    call = graph.call_function(operator.add, (values, x), {"key": [x, slice(1, x)]})
    graph.output([call])
    device_ir = SimpleNamespace(
        graphs=[SimpleNamespace(graph_id=0, graph=graph)], root_ids=[0], grid_block_ids=[]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SimpleNamespace is no known region kind
        record = json.loads(canonical_json(extract_ir_graph(device_ir, **IDENTITY)))
        assert differences(device_ir, record) == []
    for i in range(len(values)):
        damaged = copy.deepcopy(record)
        other = damaged["nodes"][1]["args"]["v"][0]["v"]
        other[i] = "another" if other[i] != "another" else None
        assert graph_differences(device_ir, damaged), values[i]


def test_a_value_that_cannot_be_held_is_reported_and_differs() -> None:
    graph = torch.fx.Graph()
    graph.call_function(operator.add, (object(), 1))
    device_ir = SimpleNamespace(graphs=[SimpleNamespace(graph_id=0, graph=graph)], root_ids=[0])
    warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot hold a value of type builtins.object"):
        record = extract_ir_graph(device_ir, **IDENTITY)
    assert graph_differences(device_ir, record)


@pytest.mark.parametrize("name", CASES)
def test_no_field_holds_printed_ir(name: str) -> None:
    device_ir = bind(name).host_function.device_ir
    text = canonical_json(extract(name))
    for info in device_ir.graphs:
        for fx_node in info.graph.nodes:
            printed = fx_node.format_node()
            assert printed is None or json.dumps(printed)[1:-1] not in text
    assert "call_function[" not in text
    assert "%" not in text


# ---- the ten gaps


def test_gap_1_literal_arguments_are_kept() -> None:
    softmax = extract("softmax")
    assert node(softmax, "g0:amax")["args"]["v"][1:] == [{"t": "list", "v": [1]}, True]
    assert node(softmax, "g0:_mask_to")["args"]["v"][1] == {"t": "float", "v": "-inf"}
    assert node(softmax, "g0:x")["args"]["v"] == ["x"]
    assert node(softmax, "g0:row")["args"]["v"][1]["v"][1] == {"t": "slice", "v": [None] * 3}
    assert node(extract("add_kept"), "g0:add_1")["args"]["v"][1] == 1.5
    step = node(extract("stepped"), "g1:_for_loop_step")["args"]["v"]
    assert step[0] == 0
    assert [step[i]["v"] for i in (1, 2, 4)] == [[0], [128], [2]]
    cast = node(extract("layer_norm"), "g0:row")["args"]["v"][1]
    assert cast == {"t": "dtype", "v": "float32"}


def test_gap_2_edges_have_argument_slots_and_keyword_names() -> None:
    record = extract("layer_norm")
    into_mean = [e for e in edges(record, "data") if e["target"] == "g0:mean"]
    assert [(e["kwarg"], e["arg_positions"]) for e in into_mean] == [("_extra_args", [0])]
    store = {e["source"]: e for e in edges(record, "data") if e["target"] == "g0:store"}
    assert store["g0:convert_element_type_3"]["arg_positions"] == [2]
    assert store["g0:block_size_0"]["arg_positions"] == [1, 0]
    loop = [e for e in edges(extract("jagged"), "data") if e["target"] == "g1:_for_loop"]
    assert sorted(e["arg_positions"] for e in loop) == [[2, 0], [3, 0], [3, 1], [3, 2]]


def test_gap_3_calls_children_results_and_carries_are_connected() -> None:
    record = extract("attention")
    assert ends(edges(record, "call")) == {("g1:_for_loop", "g0:arg0_1")}
    regions = {(e["source"], e["target"]): e["arg_positions"] for e in edges(record, "region")}
    assert regions == {
        ("g1:q", "g0:arg0_1"): [3, 0],
        ("g1:m_i", "g0:arg1_1"): [3, 1],
        ("g1:l_i", "g0:arg2_1"): [3, 2],
        ("g1:acc", "g0:arg3_1"): [3, 3],
    }
    results = {(e["target"], e["output_index"]) for e in edges(record, "result")}
    assert results == {("g1:getitem", 0), ("g1:getitem_1", 1), ("g1:getitem_2", 2)}
    carried = {(e["source"], e["target"], e["output_index"]) for e in edges(record, "carried")}
    assert carried == {("g0:output", f"g0:arg{i + 1}_1", i) for i in range(3)}
    assert all(e["exact"] for e in edges(record, "carried"))


def test_gap_3_of_if() -> None:
    record = extract("branch")
    assert {(e["role"], e["target"]) for e in edges(record, "call")} == {
        ("if", "g1:arg0_1"),
        ("else", "g0:arg0_1"),
    }
    results = {(e["source"], e["target"], e["output_index"]) for e in edges(record, "result")}
    # `other` is assigned in the else branch only: the if branch passes the outer value on.
    assert results == {
        ("g1:output", "g2:getitem", 0),
        ("g2:other", "g2:getitem_1", None),
        ("g0:output", "g2:getitem_2", 1),
        ("g0:output", "g2:getitem_3", 0),
    }
    assert edges(record, "carried") == []


def test_gap_3_of_while() -> None:
    record = extract("until")
    assert {(e["role"], e["target"]) for e in edges(record, "call")} == {
        ("cond", "g0:arg0_1"),
        ("body", "g1:arg0_1"),
    }
    results = {(e["role"], e["source"], e["target"]) for e in edges(record, "result")}
    assert results == {("cond", "g0:output", "g2:_while_loop"), ("body", "g1:output", "g2:getitem")}
    carried = ends(edges(record, "carried"))
    assert carried == {("g1:output", "g1:arg0_1"), ("g1:output", "g0:arg0_1")}


@pytest.mark.parametrize("name", ["scan", "reduce_pair"])
def test_gap_4_combine_functions_are_connected(name: str) -> None:
    record = extract(name)
    graph = to_networkx(record)
    assert _is_one_piece(graph)
    call = next(e for e in edges(record, "call"))
    assert (call["role"], call["arg_positions"]) == ("combine", [0])
    values = 1 if name == "scan" else 2
    slots = [n["id"] for n in record["nodes"] if n["op_kind"] == "placeholder"]
    regions = [(e["arg_positions"], slots.index(e["target"])) for e in edges(record, "region")]
    given = [[1]] if values == 1 else [[1, 0], [1, 1]]
    assert regions == [(p, i + c * values) for c in (0, 1) for i, p in enumerate(given)]
    assert [slots.index(e["target"]) for e in edges(record, "carried")] == list(range(values))


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_gap_5_alternates_are_not_live_and_know_their_original(name: str) -> None:
    record = extract(name)
    live = {g["graph_id"]: g["live"] for g in record["graph"]["graphs"]}
    assert live == {0: True, 1: False, 2: False, 3: False}
    assert [g["alternate_of"] for g in record["graph"]["graphs"]] == [None, 0, 0, 0]
    assert record["graph"]["rolled_reductions"] == [
        {
            "original_graph_id": 0,
            "rolled_block_ids": [1],
            "used_rdim": True,
            "can_be_rolled_by_caller": False,
        }
    ]
    assert {e["edge_kind"] for e in record["links"]} == {"data"}
    ids = {n["id"] for n in record["nodes"]}
    for entry in record["nodes"]:
        assert entry["live"] == (entry["graph_id"] == 0)
        if not entry["live"] and entry["op_kind"] != "output":
            original = node(record, entry["original_node"])
            assert original["live"]
            assert entry["original_node"] in ids
            if entry["op_kind"] == "call_function":
                assert original["target"] == entry["target"]


def test_gap_5_placeholder_of_an_alternate_names_its_value() -> None:
    record = extract("softmax")
    assert node(record, "g3:getitem_1")["original_node"] == "g0:amax"
    assert node(record, "g3:getitem_3")["original_node"] == "g0:sum_1"


def test_gap_6_blocks_symbols_and_config_slots() -> None:
    record = extract("attention")
    assert record["graph"]["grid_block_ids"] == [[0, 1]]
    blocks = {b["block_id"]: b for b in record["graph"]["blocks"]}
    assert [blocks[i]["symbol"] for i in range(4)] == ["u0", "u1", "u2", "u3"]
    slots = {i: b["config_slots"].get("block_sizes") for i, b in blocks.items()}
    assert slots == {0: 0, 1: 1, 2: None, 3: 2}
    assert (blocks[2]["reduction"], blocks[2]["concrete_size"]) == (True, 64)
    shape = node(record, "g0:load")["shape"]
    assert {s["symbol"]: s["block_id"] for s in record["graph"]["symbols"]}[shape[0]] == 0
    config = bind("attention").config_spec.default_config().config
    assert len(config["block_sizes"]) == 3
    assert blocks[3]["config_slots"]["range_num_stages"] < len(config["range_num_stages"])


def test_gap_6_sizes_of_tensors_and_arguments_have_an_origin() -> None:
    record = extract("dynamic")
    origins = {s["symbol"]: (s["origin"], s["host"]) for s in record["graph"]["symbols"]}
    assert origins["u0"] == ("NameOrigin", "size")
    sizes = node(record, "g0:x")["shape"]
    assert [origins[s][1] for s in sizes] == ["x.size(0)", "x.size(1)"]
    assert node(record, "g0:x")["concrete_shape"] == [64, 128]
    assert node(record, "g0:load")["concrete_shape"] == [None, None]


def _code(name: str, **changes: Any) -> str:
    bound = bind(name)
    config = {**bound.config_spec.default_config().config, **changes}
    return bound.to_triton_code(helion.Config(**config))


@pytest.mark.parametrize("name", ["add", "matmul", "attention"])
def test_gap_6_memory_operations_name_their_indexing_slot(name: str) -> None:
    # Helion's own code generator is the witness: one slot at a time is a block pointer.
    record = extract(name)
    slots = {}
    for entry in record["nodes"]:
        if entry["config_slots"] and "indexing" in entry["config_slots"]:
            slots[entry["config_slots"]["indexing"][0]] = entry
    length = len(bind(name).config_spec.default_config().config["indexing"])
    assert sorted(slots) == list(range(length))
    for slot, entry in slots.items():
        choice = ["pointer"] * length
        choice[slot] = "block_ptr"
        pointer = next(
            line for line in _code(name, indexing=choice).splitlines() if "make_block_ptr" in line
        )
        producer = next(
            e["source"]
            for e in edges(record, "data")
            if e["target"] == entry["id"] and e["arg_positions"] == [0]
        )
        tensor = node(record, producer)["args"]["v"][0]
        assert f"make_block_ptr({tensor}," in pointer, (slot, entry["id"], pointer)


def test_gap_6_loads_name_their_eviction_slot() -> None:
    record = extract("attention")
    policies = len(bind("attention").config_spec.default_config().config["load_eviction_policies"])
    loads = [n for n in record["nodes"] if n["target"] == "helion.language.memory_ops:load"]
    assert len(loads) == policies == 3
    for load in loads:
        (slot,) = load["config_slots"]["load_eviction_policies"]
        choice = [""] * policies
        choice[slot] = "first"
        line = next(
            x
            for x in _code("attention", load_eviction_policies=choice).splitlines()
            if "evict_first" in x
        )
        assert line.strip().startswith(f"{load['name']} ="), (load["id"], line)


def test_gap_8_no_absolute_path_is_kept() -> None:
    for name in CASES:
        text = canonical_json(extract(name))
        assert os.fspath(Path(__file__).parent) not in text
        assert '"/' not in text
    loc = node(extract("add"), "g0:add")["source_loc"]
    assert loc.partition(":")[0] in ("helion_kernels.py", "tests/dataset/helion_kernels.py")


_OTHER = """
import sys
sys.path[:0] = [{place!r} + "/tests/dataset", {root!r}]
sys.modules.pop("helion_kernels", None)
from sundog.dataset.ir_graph import canonical_json
from sundog.dataset.helion.device_ir import extract_ir_graph
import helion_kernels
assert helion_kernels.__file__.startswith({place!r})
for name in {names}:
    kernel, args = helion_kernels.CASES[name]()
    bound = kernel.bind(args)
    print(canonical_json(extract_ir_graph(bound.host_function.device_ir, env=bound.env,
          run_id="r", kernel_id="k", kernel_name="n", input_shapes=[[2, 3]])))
"""


def test_gap_8_another_checkout_gives_the_same_bytes(tmp_path: Path) -> None:
    here = Path(__file__)
    folder = tmp_path / "another place" / "tests" / "dataset"
    folder.mkdir(parents=True)
    shutil.copy(here.parent / "helion_kernels.py", folder)
    for package in (here.parent, here.parent.parent):  # a package here is a package there
        if (package / "__init__.py").exists():
            (folder.parent.parent / package.relative_to(here.parents[2]) / "__init__.py").touch()
    names = ["softmax", "attention", "branch"]
    root = os.fspath(here.parents[2])
    script, place = tmp_path / "other.py", os.fspath(tmp_path / "another place")
    script.write_text(_OTHER.format(place=place, root=root, names=names))
    status, out, errors = Script(script).end(100)
    assert status == 0, errors
    expected = [canonical_json(extract(name)) for name in names]
    assert out.splitlines() == expected


@pytest.mark.parametrize("name", CASES)
def test_gap_10_targets_resolve_to_the_operation(name: str) -> None:
    record = extract(name)
    for info in bind(name).host_function.device_ir.graphs:
        for fx_node in info.graph.nodes:
            target = node(record, f"g{info.graph_id}:{fx_node.name}")["target"]
            if fx_node.op == "call_function":
                assert resolve_target(target) is fx_node.target
            assert " at 0x" not in target
    if name == "softmax":
        assert node(record, "g0:amax")["target"] == "aten.amax.default"


# ---- beyond fx: what Helion compiles


def test_operands_that_fx_dropped_are_in_the_lowering() -> None:
    # `centred * centred` is `mul(centred, None)` in Helion's fx graph.
    entry = node(extract("layer_norm"), "g0:mul")
    assert entry["args"]["v"] == [{"t": "node"}, None]
    ops = entry["lowering_ops"]
    assert [op["op"] for op in ops] == ["load", "load", "mul", "return"]
    assert [op["args"][0] for op in ops[:2]] == [{"t": "input", "v": 0}] * 2
    assert ops[2]["args"] == [{"t": "op", "v": 0}, {"t": "op", "v": 1}]


# ---- the specification's own list


def test_fields_and_envelope() -> None:
    record = extract("matmul")
    assert record.get("schema_version", 0) == IR_SCHEMA_VERSION
    assert record["ir_id"] == ir_id_of(record)
    assert record["run_id"] == record["graph"]["run_id"] == "r"
    assert all(set(n) == set(IrNode.__annotations__) for n in record["nodes"])
    assert all(set(e) == set(IrEdge.__annotations__) for e in record["links"])
    assert record["graph"]["frontend"] == "helion"
    assert record["graph"]["input_shapes"] == [[2, 3]]
    other = copy.deepcopy(record)
    other["graph"].update(run_id="x", kernel_id="y", kernel_name="z", input_shapes=None)
    assert ir_id_of(other) == record["ir_id"]


@pytest.mark.parametrize("name", CASES)
def test_networkx_loads_it(name: str) -> None:
    record = extract(name)
    graph = to_networkx(record)
    assert (len(graph.nodes), len(graph.edges)) == (len(record["nodes"]), len(record["links"]))
    assert _is_one_piece(graph.subgraph(n["id"] for n in record["nodes"] if n["live"]))
    for entry in record["links"]:
        assert {entry["source"], entry["target"]} <= {n["id"] for n in record["nodes"]}


def test_region_kinds_are_those_of_the_installed_helion() -> None:
    root = Path(helion.__file__).parent
    bases: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        for name, above in re.findall(r"^class (\w+)\(([^)]*)\):", path.read_text("utf-8"), re.M):
            bases[name] = {base.strip().rpartition(".")[2] for base in above.split(",")}
    kinds = {"GraphInfo"}
    while new := {name for name, above in bases.items() if above & kinds} - kinds:
        kinds |= new
    assert kinds - {"GraphInfo", "NodeArgsGraphInfo"} == KNOWN_REGION_KINDS


def test_an_unknown_region_kind_warns_once() -> None:
    graph = torch.fx.Graph()
    graph.output(None)
    info = type("StrangeGraphInfo", (), {"graph_id": 0, "graph": graph})()
    device_ir = SimpleNamespace(graphs=[info], root_ids=[0])
    warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="StrangeGraphInfo"):
        record = extract_ir_graph(device_ir, **IDENTITY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extract_ir_graph(device_ir, **IDENTITY)
    assert record["nodes"][0]["region_kind"] == "StrangeGraphInfo"


def test_bool_is_not_a_graph_id() -> None:
    assert [is_graph_id(v) for v in (1, True, 1.0, None)] == [True, False, False, False]


def test_empty_device_ir_gives_a_valid_record() -> None:
    record = extract_ir_graph(SimpleNamespace(graphs=[], root_ids=[]), **IDENTITY)
    assert record["nodes"] == record["links"] == []
    assert record["graph"]["num_graphs"] == 0
    assert record["ir_id"] == ir_id_of(record)
    assert rebuild(record) == {}
    assert len(to_networkx(record)) == 0


_MALFORMED = {
    "bool id": lambda x: (True, [0], [4], [x]),
    "missing arguments": lambda x: (0,),
    "no such graph": lambda x: (99, [0], [4], [x]),
    "arguments are no list": lambda x: (0, [0], [4], 7),
    "too many arguments": lambda x: (0, [0], [4], [x, x]),
    "none": lambda x: (None, None, None, None),
}


@pytest.mark.parametrize("what", _MALFORMED)
def test_malformed_control_flow_warns_once_and_never_raises(what: str) -> None:
    tracing = importlib.import_module("helion.language._tracing_ops")
    body, root = torch.fx.Graph(), torch.fx.Graph()
    body.output([body.placeholder("a")])
    x = root.call_function(tracing._host_tensor, ("x",))
    for _ in range(2):
        root.call_function(tracing._for_loop, _MALFORMED[what](x))
    root.output(None)
    infos = [SimpleNamespace(graph_id=i, graph=g) for i, g in enumerate((body, root))]
    warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="malformed control-flow node") as caught:
        record = extract_ir_graph(SimpleNamespace(graphs=infos, root_ids=[1]), **IDENTITY)
    assert len([w for w in caught if "malformed" in str(w.message)]) == 1
    assert {e["edge_kind"] for e in record["links"]} <= {"data"}


def test_caps_apply_to_display_strings_only() -> None:
    graph = torch.fx.Graph()
    call = graph.call_function(operator.add, ("long " * 200, 1))
    call.meta["val"] = 10**400
    device_ir = SimpleNamespace(graphs=[SimpleNamespace(graph_id=0, graph=graph)], root_ids=[0])
    record = extract_ir_graph(device_ir, **IDENTITY)
    entry = record["nodes"][0]
    assert len(entry["value"]) == MAX_DISPLAY
    assert entry["args"]["v"][0] == "long " * 200
    assert entry["literal"] == 10**400
    assert graph_differences(device_ir, record) == []


@pytest.mark.parametrize("name", CASES)
def test_same_bytes_twice_and_after_code_generation(name: str) -> None:
    before = extract(name)
    bound = bind(name)
    bound.to_triton_code(bound.config_spec.default_config())
    assert canonical_json(extract(name)) == canonical_json(before)


def test_two_variables_that_start_alike_are_carried_apart() -> None:
    body, root = torch.fx.Graph(), torch.fx.Graph()
    tracing = importlib.import_module("helion.language._tracing_ops")
    a, b = body.placeholder("a"), body.placeholder("b")
    body.output([b, a])
    x = root.call_function(tracing._host_tensor, ("x",))
    loop = root.call_function(tracing._for_loop, (0, [0], [4], [x, x]))
    for i in range(2):
        root.call_function(tracing._phi, (x, root.call_function(operator.getitem, (loop, i))))
    root.output(None)
    infos = [SimpleNamespace(graph_id=i, graph=g) for i, g in enumerate((body, root))]
    record: Any = extract_ir_graph(SimpleNamespace(graphs=infos, root_ids=[1]), **IDENTITY)
    carried = [(e["output_index"], e["target"], e["exact"]) for e in edges(record, "carried")]
    assert carried == [(0, "g0:a", False), (1, "g0:b", False)]


def test_attention_takes_at_most_50_ms() -> None:
    bound = bind("attention")
    seconds = []
    for _ in range(7):
        start = time.process_time()  # not the wall clock: other tests may run beside this one
        extract_ir_graph(bound.host_function.device_ir, env=bound.env, **IDENTITY)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05, seconds


def test_encode_refuses_a_node_outside_of_arguments() -> None:
    with pytest.raises(AssertionError):
        encode(torch.fx.Graph().placeholder("x"))


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "helion.md").read_text()
    parts = {
        part.partition("\n")[0].strip(): part for part in re.split(r"^### ", text, flags=re.M)[1:]
    }
    for title, fields in (
        ("Graph fields", IrGraphMeta.__annotations__),
        ("Node fields", IrNode.__annotations__),
        ("Edge fields", IrEdge.__annotations__),
    ):
        cells = re.findall(r"^\| (`.*?) \|", parts[title], re.M)
        documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
        kinds = {"data", "region", "call", "result", "carried"} if title == "Edge fields" else set()
        assert documented - kinds - {"edge_kind"} == set(fields) - kinds - {"edge_kind"}
