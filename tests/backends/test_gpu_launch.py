"""A launch on a GPU, as far as it goes without one: what Triton is asked, what counts and waits."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from sundog.backends import virtual
from sundog.backends._gpu import Direct, Gpu, may_wait
from sundog.machine.host_ops import waits
from sundog.machine.launcher import Installed
from sundog.target import Footprint, Target

H200 = Target("NVIDIA H200", "sm_90", 132, 32, 65536, 233472, 64, 32, 60 << 20, 141 << 30)


def test_programs_per_sm():
    """By CUDA's occupancy calculator for sm_90."""
    assert H200.programs_per_sm(Footprint(32, 0, 1)) == 32
    assert H200.programs_per_sm(Footprint(32, 0, 4)) == 16
    assert H200.programs_per_sm(Footprint(168, 0, 4)) == 3
    assert H200.programs_per_sm(Footprint(192, 0, 1)) == 8  # not 10: two warps to a quarter
    assert H200.programs_per_sm(Footprint(32, 232448, 4)) == 1
    assert H200.programs_per_sm(Footprint(32, 115712, 4)) == 2
    assert H200.programs_per_sm(Footprint(32, 115713, 4)) == 1


def test_which_torch_functions_make_the_host_wait():
    x = torch.zeros(3)
    assert waits("item", (x,), {})
    assert waits("to", (x, "cpu"), {})
    assert waits("to", (x,), {"device": torch.device("cpu")})
    assert not waits("to", (x, torch.float16), {})
    assert not waits("copy_", (x, x), {})
    assert waits("copy_", (x, torch.zeros(3, device="meta")), {})
    assert not waits("__getitem__", (x, (slice(1), 0, None)), {})
    assert waits("__getitem__", (x, x > 0), {})
    assert not waits("__setitem__", (x, 0, 5), {})
    assert not waits("fill_", (x, 0), {})


def test_a_kernel_with_no_loop_around_an_atomic_never_waits():
    assert may_wait("scf.while (%1) { tt.atomic_rmw add, acquire }")
    assert not may_wait("scf.for %1 { tt.atomic_rmw add, relaxed }")
    assert not may_wait("scf.while (%1) { tt.load }")
    assert may_wait("tt.atomic_poll %1")


@triton.jit
def _scaled(x, n, BLOCK: tl.constexpr = 4):
    pass


class Compiled:
    """By Triton, pretended."""

    module, n_regs, packed_metadata, asm = None, 40, (), {"ttir": "scf.while tt.atomic_rmw"}
    metadata = SimpleNamespace(shared=9, num_warps=8, num_ctas=2)

    def __init__(self) -> None:
        self.started: list[tuple] = []

    def _init_handles(self) -> None:
        self.module = 1

    def __getitem__(self, grid: tuple) -> Any:
        assert self.module, "the loader must wait for what runs"
        return lambda *args, stream: self.started.append((grid, args, stream))


def test_ranks_on_one_gpu_never_share_a_stream(monkeypatch):
    """Also where others took streams between two worlds: torch has 32, and begins again."""
    handed_out = itertools.cycle(range(32))
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: next(handed_out))
    monkeypatch.setattr(virtual, "_streams", functools.cache(lambda index: {}))
    first = [virtual._stream(0, place) for place in range(2)]
    for _ in range(30):
        torch.cuda.Stream(0)
    second = [virtual._stream(0, place) for place in range(32)]
    assert second[:2] == first
    assert sorted(second) == list(range(32))


def test_triton_is_asked_once_for_each_kind_of_launch(monkeypatch):
    compiled, asked = Compiled(), []
    triton_run = lambda *args, **kwargs: asked.append(args) or compiled  # noqa: E731
    monkeypatch.setattr(Installed, "original", triton_run)
    gpu = object.__new__(Gpu)  # without CUDA
    gpu._direct = Direct()
    x, stream = torch.zeros(64), SimpleNamespace(cuda_stream=5)
    for _ in range(2):  # the second rank comes before the first one's is loaded
        launch = gpu.prepare(_scaled, (3,), (x, 7), {})
        assert (launch.loaded, launch.programs) == (False, 6)
    launch.load()
    assert launch.footprint() == Footprint(40, 9, 8)
    launch.start(stream)
    for _ in range(3):
        gpu.prepare(_scaled, (3,), (x, 7), {}).start(stream)
    assert len(asked) == 1
    assert [(g, a[1:], s) for g, a, s in compiled.started] == [((3, 1, 1), (7, 4), 5)] * 4
    gpu.prepare(_scaled, (3,), (x, 8), {})
    assert len(asked) == 2
