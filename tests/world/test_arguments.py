"""Arguments that torch would take, or that are wrong: each gets a sentence, not a TypeError."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sundog
from sundog.errors import SundogError

Run = Callable[..., list]
CALLS: dict[str, Callable[[sundog.World, Any], Any]] = {
    "all_gather": lambda world, x: world.all_gather(x),
    "all_reduce": lambda world, x: world.all_reduce(x),
    "reduce": lambda world, x: world.reduce(x, 0),
    "reduce_scatter": lambda world, x: world.reduce_scatter(x),
    "broadcast": lambda world, x: world.broadcast(x),
    "send": lambda world, x: world.send(x, 1 - world.rank),
    "all_gather into": lambda world, x: world.all_gather(world.zeros(2), x),
    "all_reduce into": lambda world, x: world.all_reduce(world.zeros(2), out=x),
}
SHAPES: dict[str, Callable[[sundog.World], Any]] = {
    r"dtype 3: expected a torch.dtype; .* world.empty\(\(2, 3\)\)": lambda w: w.empty(2, 3),
    "dtype 'float32': expected a torch.dtype": lambda w: w.zeros(2, "float32"),
    "shape 2.5: expected a whole number": lambda w: w.empty(2.5),
    "shape 'ab': expected a whole number": lambda w: w.empty("ab"),
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (r"fn must be callable as fn\(world\), got None", {"fn": None}),
    ("world_size must be a whole number of at least 1, got '2'", {"world_size": "2"}),
    ("world_size must be a whole number of at least 1, got 2.0", {"world_size": 2.0}),
    ("heap_size must be at least 65536 bytes, got '64M'", {"heap_size": "64M"}),
    ("timeout must be >= 0 seconds .*, got -1", {"timeout": -1}),
    ("timeout must be >= 0 seconds .*, got nan", {"timeout": float("nan")}),
    ("timeout must be >= 0 seconds .*, got '5s'", {"timeout": "5s"}),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_list_in_place_of_a_tensor(run: Run, call: str) -> None:
    """As torch's all_gather takes, which has the output first."""

    def main(world: sundog.World) -> str:
        with pytest.raises(ValueError, match=f"^{call.split()[0]}: .* is a list") as error:
            CALLS[call](world, [torch.ones(2)])
        return str(error.value)

    assert all("expected a tensor; the input comes first" in text for text in run(main, 2))


@pytest.mark.parametrize("text", SHAPES)
def test_shapes_and_dtypes(run: Run, text: str) -> None:
    def main(world: sundog.World) -> None:
        with pytest.raises(ValueError, match=text):
            SHAPES[text](world)
        world.barrier()  # nothing was allocated

    run(main, 2)


@pytest.mark.parametrize(("text", "options"), OPTIONS)
def test_what_run_is_given(text: str, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"fn": lambda world: None, "world_size": 2, "backend": "shm"}
    with pytest.raises(ValueError, match=text):
        sundog.run(**(given | options))


def test_sms_of_the_simulator() -> None:
    with pytest.raises(ValueError, match="num_sms -1: at least 1"):
        sundog.Sim(num_sms=-1)


@pytest.mark.sim_only
def test_a_second_thread(run: Run) -> None:
    """Ranks take turns in one thread."""

    def main(world: sundog.World) -> list[float]:
        told: list[BaseException] = []

        def other() -> None:
            try:
                world.all_reduce(torch.ones(2))
            except SundogError as error:
                told.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "a second thread uses a world" in str(told[0])
        return world.all_reduce(torch.ones(2), out=world.zeros(2)).tolist()

    assert run(main, 1) == [[1.0, 1.0]]


def test_names_can_be_completed_before_they_are_used() -> None:
    assert {"World", "init", "run", "tune"} <= set(dir(sundog))
