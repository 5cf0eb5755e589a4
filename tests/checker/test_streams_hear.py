"""What a stream keeps of the signals that the programs of its kernels have heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sundog.compat.iris as stand_in
from sundog.checker.clocks import Clocks, StreamActor
from sundog.checker.findings import AccessEvent


def program(number: int, heard: dict[str, Any]) -> Any:
    places = {"warps": 3 * number, "zero": 3 * number + 1, "bulk": 3 * number + 2}
    return SimpleNamespace(heard=heard, clock={}, pending={}, **places)


def heard(actor: Any) -> Any:
    return SimpleNamespace(event=SimpleNamespace(actor=actor))


def test_an_inherited_signal_does_not_replace_a_newer_one() -> None:
    before = program(10, {})
    old = heard(before)
    first, second = program(1, {"peer": old}), program(2, {"peer": old})
    first.heard["peer"] = new = heard(first)
    stream = StreamActor(0, 100)
    stream.heard["peer"] = old
    Clocks().end([first, second], stream)
    assert stream.heard["peer"] is new


def test_an_access_of_a_stand_in_is_at_the_line_of_the_kernel() -> None:
    stack = ((stand_in.__file__, 131, "load"), ("/theirs/kernel.py", 7, "kernel"))
    event = AccessEvent(None, "load", False, False, True, stack=stack)
    assert event.where == ("/theirs/kernel.py", 7, "kernel")
