"""Values between ranks: what travels as data, what is refused, and what bad bytes do (nothing)."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sundog.backends._codec import decode, encode
from sundog.errors import BadValue
from sundog.world.heap import Call


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: str


@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    made: list = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append("ran")


@dataclasses.dataclass
class More:
    """Has an attribute that is no field, and that would be lost."""

    x: int

    def __post_init__(self) -> None:
        self.hidden = object()


PLAIN = [
    None, True, False, 0, -1, 255, 1 << 63, -(1 << 200), 0.5, float("inf"), 2 + 3j, "", "caf\u00e9",
    "\udc80", b"\x00\xff", bytearray(b"ab"), (), (1, (2, [3])), [], {}, {"a": {1: (2.5, None)}},
    {1, 2}, frozenset({"x"}), torch.float8_e4m3fn, torch.Size([2, 3]), Colour.RED, Pair(1, "b"),
    Call("alloc", 8, "x", "f.py:1"), 1 == 1,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_what_is_data_comes_back_as_it_was(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.bool, torch.complex64],
)
def test_tensors_come_back_with_their_bytes(dtype: torch.dtype) -> None:
    base = torch.arange(48, dtype=torch.float32).to(dtype).view(4, 12)
    for tensor in (base, base[1:3, ::2].t(), base[0, 0], base[:0]):
        back = decode(encode({"x": [tensor]}))["x"][0]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.contiguous().view(-1).tolist() == tensor.reshape(-1).tolist()
        back.zero_()  # memory of its own


def test_a_view_sends_its_elements_alone() -> None:
    assert len(encode(torch.zeros(1 << 20)[:4])) < 300


def test_a_tensor_that_requires_grad_still_does() -> None:
    assert decode(encode(torch.ones(2, requires_grad=True))).requires_grad


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(0.5), np.array(3)], ids=repr
)
def test_arrays_come_back(array: Any) -> None:
    back = decode(encode(array))
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_dataclass_comes_back_without_a_call_of_its_own() -> None:
    back = decode(encode(Config(16)))
    assert isinstance(back, Config)
    assert back == Config(16)
    assert back.made == ["ran"], "by __init__ on the sender's side, not a second time here"


@pytest.mark.parametrize(
    "value",
    [
        Path("x"), lambda: 0, ValueError("x"), torch.nn.Parameter(torch.ones(1)), object(), More(1),
        [1, {2}, (Path("x"),)], np.array([object()]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_needs_pickle_is_refused_with_the_way_out(value: Any) -> None:
    with pytest.raises(ValueError, match=r"plan: a value of type .* would need pickle") as error:
        encode(value, "plan")
    assert "pickle=True" in str(error.value)
    assert "SUNDOG_ALLOW_PICKLE=1" in str(error.value)


def test_pickle_must_be_asked_for_on_both_sides() -> None:
    data = encode([1, Path("x")], allow_pickle=True)
    assert decode(data, allow_pickle=True) == [1, Path("x")]
    with pytest.raises(BadValue, match="it is pickled, and this rank did not ask for that"):
        decode(data)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list = []
    value.append(value)
    with pytest.raises(ValueError, match="nested more than 100 deep, or one that holds itself"):
        encode(value)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    data = pickle.dumps(Malicious(tmp_path / "ran"))
    with pytest.raises(
        BadValue, match=r"the value of rank 1 is not data .*header .*80 04"
    ) as error:
        decode(data, "the value of rank 1")
    assert "Nothing of it was run" in str(error.value)
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists(), "the attack itself works"


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("subprocess", "Popen"), ("builtins", "eval"), ("not.imported", "X"),
     ("sundog.backends._codec", "_Reader"), ("", "")],
)  # fmt: skip
def test_only_classes_that_are_their_fields_are_looked_up(module: str, name: str) -> None:
    real = encode(Call("alloc", 8, "x", "f.py:1"))
    old = [encode(text)[8:] for text in (Call.__module__, Call.__qualname__)]
    new = [encode(text)[8:] for text in (module, name)]
    forged = real.replace(old[0], new[0]).replace(old[1], new[1])
    assert forged != real
    with pytest.raises(BadValue, match="is not a class of 4 fields imported here"):
        decode(forged)


def test_bad_bytes_raise_one_error_and_nothing_else() -> None:
    good = encode([PLAIN, torch.arange(6), np.arange(3), {"a": (1, 2)}])
    chance = random.Random(0)
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(8, len(bad))] = chance.randrange(256)
        with contextlib.suppress(BadValue):  # any other error fails the test
            decode(bytes(bad[: chance.choice([len(bad), chance.randrange(len(bad))])]))
    for data in (b"", b"sundog1:", good[:-1], good + b"N", b"sundog1:[" + b"\xff" * 8):
        with pytest.raises(BadValue):
            decode(data)


def test_deep_bytes_do_not_end_the_process() -> None:
    nested = b"[" + (1).to_bytes(8, "little")
    with pytest.raises(BadValue, match="nested more than 100 deep"):
        decode(b"sundog1:" + nested * 100_000 + b"N")
