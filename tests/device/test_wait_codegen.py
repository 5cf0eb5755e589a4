"""In compiled code, no tile is loaded before the wait that stands before it in the source."""

from __future__ import annotations

import functools
import linecache
from typing import Any

import pytest
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from sundog import gpu_limits
from sundog.compiled import hoisted
from sundog.compiled.assembly import Place
from sundog.compiled.recorded import CTX
from sundog.compiled.ttgir import Flow, argument_names
from sundog.dataset.triton import compile as compile_module
from sundog.dataset.triton.compile import gpu_target, lower_source
from sundog.dataset.triton.mlir import MlirOperation
from sundog.dataset.triton.triton_module import read_module
from sundog.ops.op import OPS
from sundog.tools._launches import record
from sundog.tools.isa import Case, functions

from . import wait_kernels, wait_kernels_gluon

pytestmark = pytest.mark.compat

TARGETS = ("sm_90", "gfx942", "gfx950")
STAGES = (1, 2, 3, 4)
BLOCK = 64


def hoisted_loads(
    target: str, wait: str, stages: int, described: bool = False
) -> list[hoisted.Hoisted]:
    ttgir = lower_source(
        source_of(wait, described), {"num_stages": stages}, arch=target, stage="ttgir"
    )
    return hoisted.find(written(target, wait, described), ttgir, constant={"ctx"})


@functools.cache
def written(target: str, wait: str, described: bool) -> Flow:
    """The TTIR, which is the same for every number of stages."""
    return Flow(
        read_module(lower_source(source_of(wait, described), {}, arch=target, stage="ttir"))
    )


@functools.cache
def source_of(wait: str, described: bool) -> ASTSource:
    types = {"a": "*fp16", "b": "*fp16", "wrong": "*i32", "junk": "*i32", "epoch": "i64"}
    types |= {"steps": "i32", "late": "i32"}
    types |= dict.fromkeys(("flags", "done", "counter", "ctx"), "*i64")
    constants: dict[str, Any] = {"WAIT": wait, "FENCED": False, "BLOCK": BLOCK}
    if described:
        types["a_tiles"] = f"tensordesc<fp16[{BLOCK}, {BLOCK}]>"
    else:
        constants["a_tiles"] = None
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    kernel = wait_kernels.arriving_product
    signature = {name: given[name] for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if "*" in t}
    return ASTSource(kernel, signature=signature, constexprs=constants, attrs=even)


def source_line(place: Place) -> str:
    """The line of the innermost function."""
    return linecache.getline(wait_kernels.__file__, place[0][1]).strip()


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("wait", wait_kernels.WAITS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_tile_is_loaded_before_its_wait(target: str, wait: str, stages: int) -> None:
    assert hoisted_loads(target, wait, stages) == []


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("wait", wait_kernels.WAITS)
def test_no_tile_is_loaded_by_descriptor_before_its_wait(wait: str, stages: int) -> None:
    assert hoisted_loads("sm_90", wait, stages, described=True) == []


@pytest.mark.parametrize(
    ("target", "described"), [("sm_80", False), ("sm_90", True), *((t, False) for t in TARGETS)]
)
def test_without_the_barrier_tiles_are_loaded_before_their_wait(
    target: str, described: bool
) -> None:
    """So the tests above can fail: Triton does pipeline this loop."""
    for stages in (2, 3, 4):
        found = hoisted_loads(target, wait_kernels.BARE, stages, described)
        assert [source_line(each.load)[:4] for each in found] == ["x = ", "y = "]
        assert {source_line(each.acquire)[:7] for each in found} == {"seen = "}
    assert hoisted_loads(target, wait_kernels.BARE, 1, described) == []


@pytest.mark.sim_only
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_no_kernel_of_an_op_loads_before_its_wait(op: str, target: str) -> None:
    for name, fn, heap in functions(op, Case({}, {}, 2)):
        with gpu_limits.aim(target):
            kernels = {launch.kernel: launch for launch in record(fn, 2, heap)}
        assert kernels, name
        for kernel, launch in kernels.items():
            if kernel.is_gluon():
                continue  # nothing pipelines it: see below
            source, options = compile_module.source_of(
                kernel, launch.args, launch.kwargs, arch=target
            )
            constant = {name for name, role in launch.roles.items() if role == CTX}
            assert hoisted.find_in(source, options, target, constant) == [], name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wait", wait_kernels_gluon.WAITS)
def test_in_gluon_a_barrier_stands_between_the_wait_and_the_load(wait: str, target: str) -> None:
    """Gluon has no TTIR to compare with: in TTGIR, acquire, CTA barrier, load, in this order."""
    types = {"a": "*fp32", "wrong": "*i32", "junk": "*i32", "epoch": "i64", "late": "i32"}
    types |= {"steps": "i32", **dict.fromkeys(("flags", "done", "counter", "ctx"), "*i64")}
    threads = gpu_target(target).warp_size
    constants: dict[str, Any] = {"WAIT": wait, "BLOCK": 4096, "THREADS": threads}
    given = {**types, **dict.fromkeys(constants, "constexpr")}
    kernel = wait_kernels_gluon.arriving_sum
    signature = {name: given[name] for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature=signature, constexprs=constants, attrs={})
    flow = Flow(read_module(lower_source(source, {}, arch=target, stage="ttgir")))
    order = [kind for op in flow.operations if (kind := _kind(flow, op))]
    load = order.index("tile")
    acquire = max(n for n, kind in enumerate(order[:load]) if kind == "acquire")
    assert "barrier" in order[acquire:load], order


def _kind(flow: Flow, op: MlirOperation) -> str:
    if "barrier" in op.name and op.name.startswith(("gpu.", "ttg.")):
        return "barrier"
    if "atomic_rmw" in op.name:
        sem = op.properties["sem"]
        return "acquire" if isinstance(sem, dict) and sem["value"] == 2 else ""
    is_load = op.name.endswith(".load") or op.name.endswith("buffer_load")
    return "tile" if is_load and "a" in argument_names(flow, op) else ""
