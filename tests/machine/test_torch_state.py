"""What torch keeps per thread or process is kept per rank."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sundog

Run = Callable[..., list]

_get_handler: Any = ctypes.CDLL("libc10.so")._ZN3c1012WarningUtils19get_warning_handlerEv
_get_handler.restype = ctypes.c_void_p

DRAWS = """
import torch
for rank in range(3):
    torch.manual_seed(42 + rank)
    draws = []
    for _ in range(3):
        draws += [torch.rand(()).item(), torch.randn(()).item(), torch.randperm(100)[0].item()]
    print(draws)
"""


def test_manual_seed_means_what_it_means_in_a_process_of_its_own(run: Run) -> None:
    def main(world: sundog.World) -> list[float]:
        torch.manual_seed(42 + world.rank)
        draws = []
        for _ in range(3):
            draws += [torch.rand(()).item(), torch.randn(()).item(), torch.randperm(100)[0].item()]
            world.barrier()
        return draws

    alone = subprocess.check_output([sys.executable, "-c", DRAWS], text=True)
    assert run(main, 3) == [eval(line) for line in alone.splitlines()]


def test_symmetric_randn_too(run: Run) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        torch.manual_seed(world.rank)
        tensors = []
        for _ in range(2):
            tensors.append(world.randn((5,)).clone().cpu())
            world.barrier()
        return tensors

    if torch.cuda.is_available():
        pytest.skip("a GPU has a generator of its own")
    for rank, tensors in enumerate(run(main, 3)):
        torch.manual_seed(rank)
        for tensor in tensors:
            assert torch.equal(tensor, torch.randn(5))


def test_python_and_numpy_random(run: Run) -> None:
    def main(world: sundog.World) -> list[float]:
        random.seed(world.rank)
        np.random.seed(world.rank)
        draws = []
        for _ in range(3):
            draws += [random.random(), float(np.random.random())]
            world.barrier()
        return draws

    for rank, draws in enumerate(run(main, 3)):
        python, numpy = random.Random(rank), np.random.RandomState(rank)
        assert draws == [f() for _ in range(3) for f in (python.random, numpy.random_sample)]


def test_normal_numbers_come_in_pairs(run: Run) -> None:
    """Of two numbers that are made together the second waits, while the twister stays as it is."""

    def main(world: sundog.World) -> list[float]:
        draws = []
        for _ in range(2):  # the same seed again: the twister comes to where it was before
            random.seed(world.rank)
            np.random.seed(world.rank)
            for _ in range(3):
                draws += [random.gauss(), float(np.random.normal())]
                world.barrier()
        return draws

    for rank, draws in enumerate(run(main, 3)):
        python, numpy = random.Random(rank), np.random.RandomState(rank)
        assert draws == [f() for _ in range(3) for f in (python.gauss, numpy.normal)] * 2


def test_blocking_in_torch_leaks_no_warning_handler(run: Run) -> None:
    """It lies on a stack that is not there any more: the next warning would jump anywhere."""
    handler = _get_handler()

    def main(world: sundog.World) -> list[int]:
        x = world.empty((5,)).fill_(world.rank)
        found = []
        for _ in range(3):
            world.all_gather(x).sum().item()  # waits inside
            found.append(_get_handler())
        return found

    assert run(main, 3) == [[handler] * 3] * 3
    assert _get_handler() == handler


class Marker(TorchFunctionMode):
    """Adds its number to what `torch.full` makes."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + self.number if func is torch.full else result


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.adds += func is torch.ops.aten.add.Tensor
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:  # also where `run` skips the test: later ones need float32
        torch.set_default_dtype(before)


@pytest.fixture
def caller(backend: str) -> None:
    """For tests of what a caller sees after the ranks."""
    if backend == "symm":
        pytest.skip("this process is a rank itself, and keeps what a rank leaves behind")


def state() -> dict[str, Any]:
    """All of it, as a rank sees it."""
    x = torch.ones(2, 2, requires_grad=not torch.is_inference_mode_enabled())
    product = x @ x
    return {
        "grad": torch.is_grad_enabled(),
        "recorded": product.requires_grad,
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "product": product.dtype,
        "default": torch.get_default_dtype(),
        "made": torch.empty(1).dtype,
        "full": torch.full((1,), 1.0).item(),
    }


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16, no cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "float64": lambda: default_dtype(torch.float64),
    "mode": lambda: Marker(10.0),
    "two modes": lambda: contextlib.ExitStack(),
}


def entered(name: str) -> contextlib.AbstractContextManager:
    context = CONTEXTS[name]()
    if isinstance(context, contextlib.ExitStack):
        context.enter_context(Marker(100.0))
        context.enter_context(Marker(1000.0))
    return context


def test_modes_across_switches(run: Run) -> None:
    """Each rank is inside another context while the others run; all see only their own."""
    names = list(CONTEXTS)

    def main(world: sundog.World) -> Any:
        seen = [state()]
        with entered(names[world.rank]):
            for _ in range(2):
                seen.append(state())
                world.barrier()
            seen.append(state())
            x = world.zeros((3,))
            world.barrier()
            seen.append(state())
            world.free(x)
        world.barrier()
        seen.append(state())
        return seen

    plain = state()
    for name, seen in zip(names, run(main, len(names)), strict=True):
        with entered(name):
            inside = state()
        assert (inside != plain) == (name != "none")
        assert seen == [plain, inside, inside, inside, inside, plain], name


def test_dispatch_modes_across_switches(run: Run) -> None:
    def main(world: sundog.World) -> int:
        """Ranks 1 and 2 are inside; they enter and leave in the order 1, 2, 1, 2."""
        one = torch.ones(1)
        counter = Counter()
        for turn in range(4):
            world.barrier()
            if (world.rank, turn) in ((1, 0), (2, 1)):
                counter.__enter__()
            for _ in range(1 + world.rank):
                one + one
            if (world.rank, turn) in ((1, 2), (2, 3)):
                counter.__exit__(None, None, None)
        return counter.adds

    assert run(main, 3) == [0, 6, 9]


def drawn() -> tuple[float, float, float]:
    single = torch.rand((), dtype=torch.float32)
    return single.item(), random.random(), float(np.random.random())


@pytest.mark.usefixtures("caller")
@pytest.mark.parametrize("name", CONTEXTS)
def test_ranks_start_as_the_caller_is(run: Run, name: str) -> None:
    """And whatever they leave behind, the caller goes on as before."""

    def main(world: sundog.World) -> Any:
        first = state()
        torch.set_grad_enabled(world.rank == 0)
        torch.set_default_dtype(torch.float16)
        torch.set_autocast_enabled("cpu", world.rank == 1)
        torch.manual_seed(world.rank)
        random.seed(world.rank)
        np.random.seed(world.rank)
        world.barrier()
        return first

    with entered(name):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        expected = state()
        results = run(main, 2)
        gc.collect()  # what a rank left behind must not come back with the garbage
        assert state() == expected
        draws = drawn()
    assert results == [expected, expected]
    gc.collect()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert draws == drawn()
    assert state() == {**state(), "grad": True, "default": torch.float32}


@pytest.mark.usefixtures("caller")
def test_the_caller_is_as_before_after_a_failure(run: Run) -> None:
    def main(world: sundog.World) -> None:
        torch.set_grad_enabled(False)
        with torch.inference_mode(), Marker(5.0), torch.autocast("cpu", torch.bfloat16):
            world.barrier()
            if world.rank == 1:
                raise LookupError
            world.barrier()

    before = state()
    for _ in range(3):
        with pytest.raises(LookupError):
            run(main, 3)
        assert state() == before
        gc.collect()
        assert state() == before


def test_grad_flows_in_a_rank(run: Run) -> None:
    """Autograd runs on the rank's thread and with the rank's state."""

    def main(world: sundog.World) -> float:
        x = torch.full((3,), float(world.rank), requires_grad=True)
        y = (x * x).sum()
        world.barrier()
        y.backward()
        world.barrier()
        assert x.grad is not None
        return x.grad.sum().item()

    assert run(main, 3) == [0.0, 6.0, 12.0]
