"""What variables are after a branch that only some threads take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

import sundog
from sundog import World
from sundog.cli import app
from sundog.errors import CannotInterpret

from .launching import Run, launch

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]

POISON = -0x5A5A5A5B  # 0xA5 in each byte


@triton.jit
def _thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.int32, True, 1)


@triton.jit
def one_number(out, FIRST: tl.constexpr, LAST: tl.constexpr):
    thread = _thread()
    number = 5
    if (thread >= FIRST) & (thread < LAST):
        number = 7
    tl.store(out + thread, number)


@triton.jit
def one_per_thread(out, FIRST: tl.constexpr, LAST: tl.constexpr):
    thread = _thread()
    number = thread + 100
    if thread >= FIRST:
        if thread < LAST:
            number = -thread
        number += 1000
    tl.store(out + thread, number)


@triton.jit
def a_pointer(out, FIRST: tl.constexpr, LAST: tl.constexpr):
    thread = _thread()
    place = out + thread
    if (thread >= FIRST) & (thread < LAST):
        place = out + 64 + thread
    tl.store(place, 7)


@triton.jit
def a_new_one(out, FIRST: tl.constexpr, LAST: tl.constexpr):
    thread = _thread()
    if (thread >= FIRST) & (thread < LAST):
        number = 7
        unread = thread, number  # noqa: F841 -- a tuple that is not used after the branch
    tl.store(out + thread, number)


@triton.jit
def a_loop_of_threads(out, FIRST: tl.constexpr, LAST: tl.constexpr):
    thread = _thread()
    turns = 10
    left = thread
    while (left > 0) & (left < LAST):
        turns += 1
        left -= 1
    tl.store(out + thread, turns)


def inside(at: int, first: int, last: int) -> bool:
    return first <= at < last


NUMBERS = {
    one_number: lambda at, a, b: 7 if inside(at, a, b) else 5,
    one_per_thread: lambda at, a, b: (
        at + 100 if at < a else 1000 - at if at < b else at + 1100
    ),
    a_pointer: lambda at, a, b: 0 if at < 64 and inside(at, a, b) else (
        7 if at < 64 or inside(at - 64, a, b) else 0
    ),
    a_new_one: lambda at, a, b: 7 if inside(at, a, b) else POISON,
    a_loop_of_threads: lambda at, a, b: 10 + (at if at < b else 0),
}  # fmt: skip


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 32), (3, 64), (5, 37), (63, 64), (0, 64)])
@pytest.mark.parametrize("kernel", NUMBERS, ids=lambda kernel: kernel.__name__)
def test_each_thread_has_its_own_value(run: Run, kernel: object, first: int, last: int) -> None:
    size = 128 if kernel is a_pointer else 64
    out = torch.zeros(size, dtype=torch.int32)
    (found,) = launch(run, kernel, (1,), out, FIRST=first, LAST=last, num_warps=2)
    assert found.tolist() == [NUMBERS[kernel](at, first, last) for at in range(size)]


@triton.jit
def a_tile(x, out, LAST: tl.constexpr, BLOCK: tl.constexpr, NEW: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if not NEW:
        tile = tl.load(x + at)
    if _thread() < LAST:
        tile = tl.load(x + at) * 2
    tl.store(out + at, tile)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block", [64, 128])
def test_a_tile_has_the_elements_of_its_threads(
    run: Run, block: int, dtype: torch.dtype, new: bool
) -> None:
    x = torch.arange(1, 33).repeat(4)[:block].to(dtype)
    out = torch.zeros_like(x)
    _, found = launch(run, a_tile, (1,), x, out, LAST=5, BLOCK=block, NEW=new, num_warps=2)
    there = torch.arange(block) % 64 < 5
    assert torch.equal(found[there], 2 * x[there])
    if not new:
        assert torch.equal(found[~there], x[~there])
    elif dtype.is_floating_point:
        assert found[~there].isnan().all()
    else:
        assert (found[~there] == -0x5B).all()


def test_copies_of_a_tile_that_disagree_are_refused(run: Run) -> None:
    """Thread t has element t mod 16, so only some of an element's threads change it."""
    x = torch.ones(16)
    out = torch.zeros(16)
    with pytest.raises(CannotInterpret, match="tile is used after the branch at line"):
        launch(run, a_tile, (1,), x, out, LAST=5, BLOCK=16, NEW=False, num_warps=2)
    found = launch(run, a_tile, (1,), x, out, LAST=64, BLOCK=16, NEW=False, num_warps=2)[1]
    assert torch.equal(found, 2 * x)


@triton.jit
def of_another_type(out, USED: tl.constexpr):
    number = 5
    pair = (1, 2)
    if _thread() < 3:
        number = 7.5
        pair = (3, 4)
    if USED == 1:
        tl.store(out, number)
    if USED == 2:
        tl.store(out, pair[0])
    number = 1
    tl.store(out, number)


def refused(world: World) -> None:
    of_another_type[(1,)](torch.zeros(1), USED=1)


def test_another_type_is_refused_where_it_is_used(run: Run) -> None:
    out = torch.zeros(1)
    assert launch(run, of_another_type, (1,), out, USED=0)[0].item() == 1
    for used in (1, 2):
        with pytest.raises(CannotInterpret, match="which only some threads take"):
            launch(run, of_another_type, (1,), out, USED=used)


def test_its_line_and_status_are_told() -> None:
    text = Path(__file__).read_text().split("\n")
    branch, use = (text.index(line) + 1 for line in (
        "    if _thread() < 3:", "        tl.store(out, number)"))  # fmt: skip
    done = CliRunner().invoke(app, ["check", f"{__name__}:refused", "--world", "1"])
    output = " ".join(done.output.split())
    assert f"test_branches.py:{use}: number is used after the branch at line {branch}," in output
    assert done.exit_code == 2


@triton.jit
def used_in_a_loop(out, n):
    for turn in range(n):
        if _thread() < 4:
            small = tl.arange(0, 16) + turn
            tl.store(out + tl.arange(0, 16), small)


def test_what_is_only_used_inside_is_never_refused(run: Run) -> None:
    out = torch.zeros(16, dtype=torch.int32)
    found = launch(run, used_in_a_loop, (1,), out, 3, num_warps=2)[0]
    assert found.tolist() == [2, 3, 4, 5] + [0] * 12


def test_the_same_on_two_ranks() -> None:
    def main(world: World) -> list[int]:
        out = torch.zeros(64, dtype=torch.int32)
        one_number[(1,)](out, FIRST=0, LAST=world.rank + 1, num_warps=2)
        return out.tolist()

    assert [sum(found) for found in sundog.run(main, 2, "sim")] == [322, 324]
