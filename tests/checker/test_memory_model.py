"""The kernels on the memory model's page are right, and clean for the checker."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sundog import World
from sundog.testing import check

PAGE = Path(__file__).parents[2] / "docs" / "memory_model.md"
HEAD = "import triton\nimport triton.language as tl\nfrom sundog.device import memory, signal\n\n"
N = 37


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    blocks = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    path = tmp_path_factory.mktemp("page") / "page_kernels.py"
    path.write_text(HEAD + "\n\n".join(blocks))
    spec = importlib.util.spec_from_file_location("page_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_ranks(body: Callable[..., None]) -> Callable[[World], None]:
    def main(world: World) -> None:
        x, inbox = world.randn((3, N), name="x"), world.empty((N,), name="inbox")
        out = torch.empty(3, N)
        ready, done = world.signals(1, "ready"), world.signals(1, "done")
        world.barrier()
        body(world, x, inbox, out, ready, done)
        other = world.exchange(x.clone())[1 - world.rank]
        assert world.rank == 0 or torch.equal(out[0], other[0])

    return main


def test_produce_then_signal_and_wait_then_consume(page: ModuleType):
    def body(world: World, x, inbox, out, ready, done) -> None:
        if world.rank == 0:
            page.produce[(1,)](x[0], inbox, ready, 1, 1, world.ctx, N, BLOCK=64)
        else:
            page.consume[(1,)](inbox, out[0], ready, 0, 1, world.ctx, N, BLOCK=64)

    check(two_ranks(body), 2, schedules=20)


def test_reuse_a_buffer(page: ModuleType):
    def body(world: World, x, inbox, out, ready, done) -> None:
        for call in range(3):
            page.exchange[(1,)](
                x[call], inbox, out[call], ready, done, 1 - world.rank, call + 1, world.ctx, N,
                BLOCK=64,
            )  # fmt: skip
        other = world.exchange(x.clone())[1 - world.rank]
        assert torch.equal(out, other)

    check(two_ranks(body), 2, schedules=20)
