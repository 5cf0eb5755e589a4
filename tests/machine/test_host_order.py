"""Host code that reads a result where no one sees it: in C++, in backward, in another thread."""

from __future__ import annotations

import ctypes
import io
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.device import signal
from sundog.tools.check.schedules import check

SIZE = 4
N = 5
TOTAL = float(sum(range(1, SIZE + 1)))
Run = Callable[..., list]
Read = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.sim_only  # and shm: what runs on a GPU is ordered by CUDA


def _reduced(world: sundog.World) -> torch.Tensor:
    """A result that nothing has looked at; TOTAL everywhere."""
    return world.all_reduce(torch.full((N,), world.rank + 1.0))


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _in_backward(x: torch.Tensor) -> torch.Tensor:
    """x is the gradient that the engine starts from."""
    weight = torch.ones(N, requires_grad=True)
    torch.autograd.backward([weight * 1.0], [x])
    assert weight.grad is not None
    return weight.grad


def _saved_for_backward(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(N, requires_grad=True)
    (weight * x).sum().backward()
    assert weight.grad is not None
    return weight.grad


def _in_a_thread(x: torch.Tensor) -> torch.Tensor:
    read: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: read.append(x + 0.0))
    thread.start()
    thread.join()
    return read[0]


def _by_address(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor((ctypes.c_float * N).from_address(x.data_ptr())[:])


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


READS: dict[str, Read] = {
    "torch.save": _saved,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "jit": _scripted,
    "func.grad": lambda x: torch.func.grad(lambda w: (w * x).sum())(torch.ones(N)),
    "vmap": lambda x: torch.func.vmap(lambda each: each * 1.0)(x),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "array": lambda x: torch.from_numpy(np.asarray(x).copy()),
    "dlpack": lambda x: torch.from_numpy(np.from_dlpack(x).copy()),
    "storage": lambda x: torch.frombuffer(bytearray(bytes(x.untyped_storage())), dtype=x.dtype),
    "address": _by_address,
    "backward": _in_backward,
    "saved tensor": _saved_for_backward,
    "thread": _in_a_thread,
}


@pytest.mark.parametrize("backend", ["sim", "shm"])
@pytest.mark.parametrize("name", READS)
def test_a_result_is_there_for_whoever_reads_it(name: str, backend: str) -> None:
    def main(world: sundog.World) -> list[float]:
        return READS[name](_reduced(world)).tolist()

    assert sundog.run(main, SIZE, backend) == [[TOTAL] * N] * SIZE


@pytest.mark.parametrize("name", READS)
def test_so_it_is_for_the_checker(name: str) -> None:
    """Under which launches return at once, to explore more schedules."""

    def main(world: sundog.World) -> None:
        read = READS[name](_reduced(world))
        assert read.tolist() == [TOTAL] * N

    assert check(main, world_size=SIZE, schedules=2).findings == []


@pytest.mark.parametrize("name", READS)
def test_so_it_is_on_a_side_stream(run: Run, name: str) -> None:
    """Where launches return at once too: streams of a rank run side by side."""

    def main(world: sundog.World) -> list[float]:
        x = torch.full((N,), world.rank + 1.0)
        with world.stream(1):
            return READS[name](world.all_reduce(x)).tolist()

    assert run(main, SIZE) == [[TOTAL] * N] * SIZE


class Summed(torch.autograd.Function):
    """Whose backward calls a collective. In it, no TorchFunctionMode sees what torch does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: sundog.World) -> torch.Tensor:
        ctx.world = world
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.world.all_reduce(grad.contiguous()), None


@pytest.mark.parametrize("backend", ["sim", "shm"])
@pytest.mark.parametrize("stream", [0, 1])
def test_collectives_in_backward(backend: str, stream: int) -> None:
    """One before and one after an operator of torch's own."""

    def main(world: sundog.World) -> list[float]:
        x = torch.ones(N, requires_grad=True)
        with world.stream(stream):
            y = Summed.apply(Summed.apply(x, world) * 3.0, world)
            (y * (world.rank + 1.0)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert sundog.run(main, SIZE, backend) == [[3 * TOTAL * SIZE] * N] * SIZE


def test_the_checker_sees_collectives_in_backward() -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(N, requires_grad=True)
        (Summed.apply(x, world) * (world.rank + 1.0)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [TOTAL] * N

    assert check(main, world_size=SIZE, schedules=3).findings == []


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_collectives_in_hooks(backend: str) -> None:
    """Of a tensor, of a leaf whose gradient is complete, and of a module."""

    def main(world: sundog.World) -> list[float]:
        layer = torch.nn.Linear(N, 1, bias=False)
        torch.nn.init.ones_(layer.weight)

        def replace(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = world.all_reduce(parameter.grad)

        def gather(module: Any, grads: Any, _: Any) -> Any:
            return (world.all_reduce(grads[0].contiguous()),)

        layer.weight.register_post_accumulate_grad_hook(replace)
        layer.register_full_backward_hook(gather)
        x = torch.full((1, N), world.rank + 1.0, requires_grad=True)
        y = x * 1.0
        y.register_hook(lambda grad: world.all_reduce(grad))
        layer(y).sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        return x.grad.flatten().tolist() + layer.weight.grad.flatten().tolist()

    expected = [float(SIZE * SIZE)] * N + [TOTAL] * N
    assert sundog.run(main, SIZE, backend) == [expected] * SIZE


class Spread(torch.autograd.Function):
    """The input of a layer whose columns are on different ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: sundog.World) -> torch.Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.world.all_reduce(grad.contiguous()), None


class Collect(torch.autograd.Function):
    """The output of a layer whose rows are on different ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: sundog.World) -> torch.Tensor:
        return world.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _two_layers(world: sundog.World, steps: int) -> None:
    generator = torch.Generator().manual_seed(world.size)
    wide, width = 2 * world.size, 6
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    for _ in range(steps):
        shapes = ((3, width), (width, wide), (wide, width))
        x, a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        whole = [t.clone().requires_grad_() for t in (x, a, b)]
        parts = [t.clone().requires_grad_() for t in (x, a[:, mine], b[mine])]
        expected = (torch.relu(whole[0] @ whole[1]) @ whole[2]).square().sum()
        expected.backward()
        hidden = torch.relu(Spread.apply(parts[0], world) @ parts[1])
        loss = Collect.apply(hidden @ parts[2], world).square().sum()
        loss.backward()
        torch.testing.assert_close(loss, expected)
        wanted = [t.grad for t in whole]
        assert all(grad is not None for grad in wanted)
        for part, grad in zip(parts, (wanted[0], wanted[1][:, mine], wanted[2][mine]), strict=True):
            torch.testing.assert_close(part.grad, grad)


@pytest.mark.parametrize(
    ("backend", "size", "steps"), [("sim", 8, 100), ("sim", 64, 3), ("shm", 4, 20)]
)
def test_two_layers_forward_and_backward(backend: str, size: int, steps: int) -> None:
    sundog.run(lambda world: _two_layers(world, steps), size, backend)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_function(run: Run, compiler: str) -> None:
    """It is compiled, also in a rank, and reads what is there."""
    graphs: list[Any] = []

    def remember(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    @torch.compile(backend=remember, fullgraph=True)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1

    def main(world: sundog.World) -> list[list[float]]:
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        return [twice(_reduced(world)).tolist() for _ in range(3)]

    assert run(main, SIZE) == [[[2 * TOTAL + 1] * N] * 3] * SIZE
    assert len(graphs) == 1


def test_a_compiled_function_on_a_side_stream(run: Run) -> None:
    """Uncompiled while a result is pending there, compiled afterwards, and right in both ways."""
    graphs: list[Any] = []

    def remember(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=remember, fullgraph=True)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1

    def main(world: sundog.World) -> list[list[float]]:
        with world.stream(1):
            answers = [twice(_reduced(world)).tolist() for _ in range(3)]
        return [*answers, twice(_reduced(world)).tolist()]

    assert run(main, SIZE) == [[[2 * TOTAL + 1] * N] * 4] * SIZE
    assert len(graphs) == 1


def test_a_compiled_function_under_the_checker() -> None:
    """It runs uncompiled: the checker sees what it reads and writes."""

    @torch.compile(backend="eager", fullgraph=True)
    def twice(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(2 * x + 1)

    def main(world: sundog.World) -> None:
        x, out = _reduced(world), torch.zeros(N)
        world.barrier()
        with world.stream(1):
            twice(x, out)
        assert out.tolist() == [2 * TOTAL + 1] * N  # on stream 0, with nothing between

    report = check(main, world_size=SIZE, schedules=1)
    assert [finding.kind for finding in report.findings] == ["race"]


@triton.jit
def await_word(flag, epoch, out, ctx):
    signal.wait(flag, 0, epoch, ctx)
    at = tl.arange(0, 8)
    tl.store(out + at, tl.full((8,), 5.0, tl.float32), mask=at < 5)


@triton.jit
def set_word(flag, epoch, ctx):
    signal.signal(flag, tl.load(ctx), epoch, ctx)  # word 0 of a context is the rank


@pytest.mark.parametrize("backend", ["sim", "shm"])
@pytest.mark.parametrize("name", READS)
def test_what_only_the_host_can_end_is_ordered_too(name: str, backend: str) -> None:
    """The kernel on stream 0 waits for one that the host launches after it: the launch returns,
    and what the host then does with the result waits."""

    def main(world: sundog.World) -> list[float]:
        flag, out = world.signals(1, "flag"), torch.zeros(N)
        world.barrier()
        await_word[(1,)](flag, 7, out, world.ctx)
        with world.stream(1):
            set_word[(1,)](flag, 7, world.ctx)
        return READS[name](out).tolist()

    assert sundog.run(main, 2, backend) == [[5.0] * N] * 2


def test_jit_code_is_captured(run: Run) -> None:
    """No function of Python calls its operators: they are recorded, and done at the replay."""

    def main(world: sundog.World) -> list[float]:
        x, total = torch.zeros(N), torch.zeros(N)
        _scripted(world.all_reduce(x, out=total))
        with world.capture() as graph:
            read = _scripted(world.all_reduce(x, out=total))
        x.fill_(world.rank + 1.0)
        graph.replay()
        return read.tolist()

    assert run(main, SIZE) == [[TOTAL] * N] * SIZE


def test_backward_is_captured(run: Run) -> None:
    def main(world: sundog.World) -> list[float]:
        x, weight = torch.zeros(N), torch.ones(N, requires_grad=True)
        weight.grad = torch.zeros(N)
        with world.capture() as graph:
            (weight * x).sum().backward()
        x.fill_(2.0)
        for _ in range(3):
            graph.replay()
        return weight.grad.tolist()

    assert run(main, 2) == [[6.0] * N] * 2


def test_ranks_log_results_that_are_pending() -> None:
    """A handler of logging holds its lock while it prints a tensor, and so while a rank waits."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)

    def main(world: sundog.World) -> None:
        for _ in range(3):
            record = logging.LogRecord("", logging.INFO, "", 0, "%s", (_reduced(world),), None)
            handler.handle(record)

    assert check(main, world_size=SIZE, schedules=4).findings == []
    assert lines.getvalue().splitlines() == [str(torch.full((N,), TOTAL))] * (3 * SIZE * 4)
