"""The reader and writer of generic-form MLIR, on text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sundog.dataset.triton.mlir import MlirOperand, parse_module, print_module
from sundog.dataset.triton.mlir_spell import LOCATION_KINDS, escape, spell, spell_location, unescape
from sundog.dataset.triton.mlir_value import Cursor, LocationReader, MlirSyntaxError, relative_files

pytestmark = pytest.mark.compat

I32 = {"kind": "int", "value": -7, "type": "i32"}
VALUES: list[tuple[str, Any]] = [
    ("i32", "i32"),
    ("true", True),
    ("12", 12),
    ("-7 : i32", I32),
    ("0xFF800000 : f32", {"kind": "float", "value": "0xFF800000", "type": "f32"}),
    ("4.6566126E-10 : f32", {"kind": "float", "value": "4.6566126E-10", "type": "f32"}),
    ("1.000000e+300 : f64", {"kind": "float", "value": "1.000000e+300", "type": "f64"}),
    ('"a \\22b\\22 \\\\ \\0A"', {"kind": "string", "value": 'a "b" \\ \n'}),
    ("[-7 : i32, true, []]", [I32, True, []]),
    ('{a.b, "c-d" = -7 : i32}', {"kind": "dict", "entries": {"a.b": "unit", "c-d": I32}}),
    ('@f::@"g h"', {"kind": "symbol", "path": ["f", "g h"]}),
    ("array<i32>", {"kind": "dense_array", "element": "i32", "values": []}),
    ("array<i1: true, false>", {"kind": "dense_array", "element": "i1", "values": [True, False]}),
    (
        "dense<[[1, -2], [3, 4]]> : tensor<2x2xi8>",
        {
            "kind": "dense",
            "values": [[1, -2], [3, 4]],
            "type": {"kind": "tensor", "shape": [2, 2], "element": "i8"},
        },
    ),
    (
        "dense<0x7FC00000> : tensor<?xf32, #blocked>",
        {
            "kind": "dense",
            "values": "0x7FC00000",
            "type": {
                "kind": "tensor",
                "shape": [None],
                "element": "f32",
                "encoding": {"kind": "alias", "name": "#blocked"},
            },
        },
    ),
    (
        "#ttg.slice<{dim = 1, parent = #mma}>",
        {
            "kind": "dialect",
            "name": "#ttg.slice",
            "fields": {"dim": 1, "parent": {"kind": "alias", "name": "#mma"}},
        },
    ),
    (
        "#arith.overflow<nsw, nuw>",
        {"kind": "dialect", "name": "#arith.overflow", "params": ["nsw", "nuw"]},
    ),
    ("#ttg.shared_memory", {"kind": "dialect", "name": "#ttg.shared_memory"}),
    (
        "!ttg.memdesc<64x32xf16, #shared, #smem, mutable, 3x64x32>",
        {
            "kind": "dialect",
            "name": "!ttg.memdesc",
            "params": [
                {"kind": "shaped", "shape": [64, 32], "element": "f16"},
                {"kind": "alias", "name": "#shared"},
                {"kind": "alias", "name": "#smem"},
                "mutable",
                {"kind": "shape", "shape": [3, 64, 32]},
            ],
        },
    ),
    (
        "(!tt.ptr<f32>, i32) -> (i32, i1)",
        {
            "kind": "function",
            "inputs": [{"kind": "dialect", "name": "!tt.ptr", "params": ["f32"]}, "i32"],
            "outputs": ["i32", "i1"],
        },
    ),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=[text for text, _ in VALUES])
def test_value_is_read_and_written_back(text: str, value: Any) -> None:
    cursor = Cursor(text)
    assert cursor.value() == value
    assert cursor.pos == len(text)
    assert spell(value) == text


@pytest.mark.parametrize(
    "text",
    [
        "#ttg.padded_shared<[512:+16, 64:+4] {order = [1, 0], shape = [32, 64]}>",
        "#tt.cache_policy<cache_modifier = wt, eviction_policy = evict_normal>",
        "#ttg.shared_linear<{offset = [[0, 1], [1, 0]]}, alignment = 16>",
        "#rocdl<sched_group_mask none>",
        'dense<"0xDEADBEEF"> : tensor<2xi16>',
        "dense<> : tensor<0xi16>",
        "dense<(1.0,2.0)> : tensor<2xcomplex<f32>>",
        "affine_map<(d0, d1) -> (d1, d0)>",
        "() -> ((i32) -> i32)",
        "!llvm.struct<(i32, ptr<3>)>",
    ],
)
def test_unusual_value_keeps_its_spelling(text: str) -> None:
    assert spell(Cursor(text).value()) == text


@given(st.text())
def test_strings_survive(text: str) -> None:
    assert unescape(escape(text)[1:-1]) == text
    assert escape(text).isascii()


@given(st.binary())
def test_strings_that_are_not_utf8_survive(raw: bytes) -> None:
    text = raw.decode("utf-8", "surrogateescape")
    assert unescape(escape(text)[1:-1]) == text


LOCATIONS = [
    "unknown",
    '"k.py":3:14',
    '"k.py":3:14 to :20',
    '"k.py":3:14 to 5:2',
    '"x"',
    '"x"("k.py":3:14)',
    'callsite("f"("a.py":1:2) at callsite("b.py":3:4 at "c.py":5:6))',
    'fused["a.py":1:2, unknown]',
    'fused<{n = 1 : i32}>["a.py":1:2]',
]


@pytest.mark.parametrize("text", LOCATIONS)
def test_location_is_read_and_written_back(text: str) -> None:
    whole = f"loc({text})"
    assert spell_location(LocationReader(whole).read(whole)) == text


def test_every_kind_of_location_is_tried_above() -> None:
    found = [LocationReader(f"loc({text})").read(f"loc({text})") for text in LOCATIONS]
    assert {location["kind"] for location in found} == set(LOCATION_KINDS)


def test_locations_by_alias_may_be_defined_later() -> None:
    text = "loc(callsite(#loc1 at #loc2))"
    reader = LocationReader(text)
    reader.define("#loc1", 'loc("a"(#loc2))')
    reader.define("#loc2", "loc(unknown)")
    unknown = {"kind": "unknown"}
    callee = {"kind": "name", "name": "a", "child": unknown}
    assert reader.read(text) == {"kind": "callsite", "callee": callee, "caller": unknown}
    with pytest.raises(ValueError, match="#loc9"):
        reader.read("loc(#loc9)")


def test_files_are_relative_and_stay_apart(tmp_path: Path) -> None:
    package = tmp_path / "pkg" / "sub"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    inner, script = str(package / "k.py"), str(tmp_path / "script.py")
    names = relative_files([inner, script, "already/relative.py", "/a/b/k.py", "/a/c/k.py"])
    assert names[inner] == "pkg/sub/k.py"
    assert names[script] == "script.py"
    assert names["already/relative.py"] == "already/relative.py"
    assert (names["/a/b/k.py"], names["/a/c/k.py"]) == ("b/k.py", "c/k.py")


MODULE = """\
#loc = loc("/tmp/there.mlir":1:2)
#blocked = #ttg.blocked<{order = [0]}>
"builtin.module"() ({
  "t.func"() <{sym_name = "f"}> ({
  ^bb0(%a: i32 loc("a"(#loc)), %b: tensor<4xi32, #blocked> loc(unknown)):
    "cf.cond_br"(%a)[^bb2, ^bb1] <{n = array<i32: 1, 0>}> : (i32) -> () loc(#loc)
  ^bb1:  // 2 preds: ^bb0, ^bb2
    "t.use"(%late#1) : (i1) -> () loc(#loc1)
  ^bb2:  // pred: ^bb0
    %late:2 = "t.two"(%b, %b) ({
      %x = "t.in"() : () -> i32 loc(#loc)
      "t.yield"(%x) : (i32) -> () loc(#loc)
    }, {
      %x = "t.in"() : () -> f32 loc(#loc)
      "t.yield"(%x) : (f32) -> () loc(#loc)
    }, {
    }) {tail = "}) : {"} : (tensor<4xi32, #blocked>, tensor<4xi32, #blocked>) -> (i32, i1) loc(#loc)
    "cf.br"()[^bb1] : () -> () loc(#loc)
  }) : () -> () loc(#loc)
}) : () -> () loc(#loc)
#loc1 = loc("k.py":7:8)
"""


def test_module_has_its_shape() -> None:
    module = parse_module(MODULE)
    function = module.operation.regions[0][0].operations[0]
    entry, second, third = function.regions[0]
    assert entry.operations[0].successors == [third, second]
    two = third.operations[0]
    assert second.operations[0].operands == [MlirOperand(two, 1)]  # used before it is defined
    assert [len(region) for region in two.regions] == [1, 1, 0]
    for region, kind in zip(two.regions, ["i32", "f32"], strict=False):  # both call it %x
        made, used = region[0].operations
        assert used.operands == [MlirOperand(made, 0)]
        assert made.result_types == [kind]
    assert two.operands == [MlirOperand(entry, 1)] * 2
    assert two.attributes == {"tail": {"kind": "string", "value": "}) : {"}}
    assert second.operations[0].location == {"kind": "file", "file": "k.py", "line": 7, "column": 8}
    assert module.aliases[0][0] == "#blocked"


def test_printed_module_reads_as_the_same() -> None:
    text = print_module(parse_module(MODULE))
    assert print_module(parse_module(text)) == text
    assert text.count("\n") == MODULE.count("\n") + 5 - 4  # labels of entry blocks, no #loc lines


def test_locations_that_parsing_made_up_are_unknown() -> None:
    module = parse_module(MODULE, inferred_from="/tmp/there.mlir")
    assert module.operation.location == {"kind": "unknown"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"t.use"(%late#1)', "t.use %late#1", r"line 8: expected an operation in generic form"),
        ("(%late#1)", "(%never)", r"a definition of never"),
        ("[^bb2, ^bb1]", "[^bb2, ^bb7]", r"block \^bb7"),
        ("%late:2 =", "%late =", "2 results of t.two"),
        ("(i1) -> ()", "(i1, i1) -> ()", "2 operands of t.use"),
        ("<{order = [0]}>", "<{order = [0]}", "a closing '>'"),
        ("<{order = [0]}>", "<{order = [0]}>>", "the end"),
        ("#loc1 =", "{-# x #-}\n#loc1 =", "resources"),
    ],
)
def test_bad_text_is_refused_with_its_place(old: str, new: str, message: str) -> None:
    assert old in MODULE
    with pytest.raises(MlirSyntaxError, match=message):
        parse_module(MODULE.replace(old, new))
