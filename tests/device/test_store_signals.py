"""signals="store": every op without a read-modify-write on a peer's memory, by results, by the
checker and by the code that the compiler makes of it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog import World, gpu_limits
from sundog.compiled import ttgir
from sundog.compiled.assembly import read
from sundog.compiled.recorded import CTX, RecordedLaunch, compile_launch
from sundog.dataset.triton.compile import gpu_target
from sundog.dataset.triton.triton_module import read_module
from sundog.device import context, signal
from sundog.ops.load import find
from sundog.ops.op import OPS
from sundog.testing import check
from sundog.tools._launches import record
from sundog.tools._subject import exercise
from sundog.tools.isa import Case, functions
from sundog.world.waits import signal_form

pytestmark = pytest.mark.compat

TARGETS = ("sm_90", "gfx942")


def by_stores(fn: Callable[[World], Any], is_amd: bool = False) -> Callable[[World], Any]:
    """The same with signals that are stores: those of the simulator and NVIDIA, or of AMD."""
    form = signal.STORE_AMD if is_amd else signal.STORE

    def main(world: World) -> Any:
        world.kernel_mode = form.value
        return fn(world)

    return main


# One op for each way to signal: barriers, single flags, words with data, counts, tell_all, Gluon.
KINDS = (
    "all_gather.push",
    "all_gather.gluon",
    "all_to_all.mail",
    "all_reduce.low_latency",
    "matmul_reduce_scatter.push",
    "all_gather_matmul.hbm_buffer",
)


@pytest.mark.sim_only
@pytest.mark.parametrize("name", KINDS)
def test_an_op_that_signals_by_stores_is_right_and_ordered(name: str) -> None:
    """`exercise` compares each result with the reference, call after call."""
    module = first_case_of(find(name))
    check(by_stores(exercise(module, 2)), 2, schedules=2)  # raises if anything is wrong


def first_case_of(module: ModuleType) -> Any:
    """The op with one case only."""
    names = {name: getattr(module, name) for name in dir(module)}
    return SimpleNamespace(**{**names, "cases": lambda size: module.cases(size)[:1]})


@triton.jit
def _pass_on(x, flag, seen, ctx, TRACE: tl.constexpr):
    """Rank 0 gives rank 1 a tile, one flag after it."""
    at = tl.arange(0, 64)
    if tl.load(ctx + context.RANK) == 0:
        sundog.device.memory.store(x + at, at, 1, ctx)
        signal.signal(flag, 1, 1, ctx, TRACE)
    else:
        signal.wait(flag, 0, 1, ctx, TRACE)
        tl.store(seen + at, tl.load(x + at))


def pass_on(world: World) -> list[int]:
    x, seen = world.zeros((64,), torch.int64, "x"), world.zeros((64,), torch.int64, "seen")
    flag = world.signals(1, "flag")
    world.barrier()
    _pass_on[(1,)](x, flag, seen, world.ctx, TRACE=world.kernel_mode)
    world.synchronize()
    found: list[int] = seen.tolist()
    return found


@pytest.mark.sim_only
def test_a_release_store_makes_an_edge_and_a_relaxed_one_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = check(by_stores(pass_on), 2, schedules=6)
    assert report.results[1] == list(range(64))
    if not signal._HAS_STORE.value:
        weak = signal._STORE_ONE.value.replace("st.release", "st.relaxed")
        monkeypatch.setattr(signal, "_STORE_ONE", tl.constexpr(weak))
        with pytest.raises(AssertionError, match="relaxed release"):
            check(by_stores(pass_on), 2, schedules=6)


def test_stores_are_chosen_by_an_argument_or_a_variable(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def form(world: World) -> tuple[int, int]:
        half = world.group([0, 1])
        return world.kernel_mode, half.kernel_mode if half else -1

    cpu = signal_form("store", torch.device("cpu"), True)
    assert sundog.run(form, 2, "sim", signals="store") == [(cpu, cpu)] * 2
    assert sundog.run(form, 2, "sim") == [(0, 0)] * 2
    monkeypatch.setenv("SUNDOG_SIGNALS", "store")
    assert sundog.run(form, 2, "sim") == [(cpu, cpu)] * 2
    assert sundog.run(form, 2, "sim", signals="atomic") == [(0, 0)] * 2
    with pytest.raises(ValueError, match="'atomic', 'store' or '', got 'stores'"):
        sundog.run(form, 2, "sim", signals="stores")


def test_stores_are_chosen_where_peers_have_no_atomics() -> None:
    cpu = torch.device("cpu")
    assert signal_form("", cpu, has_atomics=True) == 0
    assert signal_form("", cpu, has_atomics=False) == signal.STORE.value
    assert signal_form("atomic", cpu, has_atomics=False) == 0


@pytest.mark.sim_only
def test_what_adds_by_atomics_is_refused() -> None:
    def main(world: World) -> None:
        world.all_reduce(torch.ones(4), algo="atomic")

    with pytest.raises(ValueError, match="signals='store' rules them out"):
        sundog.run(main, 2, "sim", signals="store")


def changed_at_peers(launch: RecordedLaunch, target: str) -> tuple[int, int]:
    """Atomics whose address has a peer's distance in it: how many, and of how many in all."""
    compiled = compile_launch(launch, target)
    is_ptx = gpu_target(target).backend == "cuda"
    text = compiled.asm["ptx" if is_ptx else "amdgcn"]
    met = ttgir.find(ttgir.Flow(read_module(compiled)), read(text, is_ptx).moves)
    atomics = [access for access in met if access.kind == "atomic"]
    return len([a for a in atomics if _is_peers(a, launch.roles)]), len(atomics)


def _is_peers(access: ttgir.MemoryAccess, roles: dict[str, str]) -> bool:
    """Does its address need a word of the context from DELTAS on?"""
    for load in access.needs:
        is_distance = load.offset is None or load.offset >= context.DELTAS.value
        if is_distance and CTX in (roles.get(name) for name in load.arguments):
            return True
    return False


@pytest.mark.sim_only
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [op for op in OPS if op != "all_reduce.atomic"])  # it adds
def test_no_atomic_goes_to_a_peers_address(name: str, target: str) -> None:
    is_amd = target != "sm_90"
    for _, fn, heap in functions(name, Case({}, {}, 2)):
        with gpu_limits.aim(target):
            given = {each.kernel: each for each in record(by_stores(fn, is_amd), 2, heap)}
        assert given
        for launch in given.values():
            to_peers, _ = changed_at_peers(launch, target)
            assert to_peers == 0, (name, launch.kernel.__name__)


@pytest.mark.sim_only
@pytest.mark.parametrize("target", TARGETS)
def test_the_usual_form_has_atomics_at_peers(target: str) -> None:
    """So the test above can fail."""
    for name in ("all_gather.push", "all_reduce.low_latency", "matmul_reduce_scatter.push"):
        ((_, fn, heap),) = functions(name, Case({}, {}, 2))
        with gpu_limits.aim(target):
            launch = record(fn, 2, heap)[0]
        assert changed_at_peers(launch, target)[0] > 0, name
