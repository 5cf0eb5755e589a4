"""A rank's tensors and devices as its program sees them: `cuda` is CPU memory."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from ..errors import CannotInterpret
from .patches import current

INSIDE = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, triton.__file__, os.path.dirname(__file__))
)
_DEVICE: Any = torch.Tensor.device.__get__
_WITH_DEVICE = DeviceContext.__torch_function__.__code__
_IS_CPU: Any = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_KINDS = (_DEVICE, _IS_CUDA, _IS_CPU)


def _caller() -> str:
    """Return the file of the caller's caller's caller, past `with torch.device(...)`."""
    frame: Any = sys._getframe(3)
    while frame.f_code is _WITH_DEVICE:
        frame = frame.f_back
    file: str = frame.f_code.co_filename
    return file


def _is_program() -> bool:
    """Return whether the caller's caller is the program, not torch, Triton or sundog."""
    return not _caller().startswith(INSIDE)


def _is_torch() -> bool:
    return _caller().startswith(INSIDE[0])


class CudaIsHere(TorchFunctionMode):
    """In a rank, what is moved to device `cuda` stays where it is and says that it is on `cuda`."""

    def __init__(self, rank: Any) -> None:
        super().__init__()
        self._rank = rank

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device and not _is_torch():
            return func(*self._numbered(args), **kwargs)
        if name == "__get__":
            if func in _KINDS and (_is_on_cpu(args[0]) or _DEVICE(args[0]).type != "cpu"):
                return func(*args, **kwargs)
            if func == _DEVICE and _is_program():
                return torch.device("cuda", self._rank.world.rank)
            if func == _IS_CUDA and _is_program():
                return True
            if func == _IS_CPU and _is_program():
                return False
            return func(*args, **kwargs)
        if name == "get_device" and _is_program() and not _is_on_cpu(args[0]):
            return self._rank.world.rank
        if name == "data_ptr" and _is_program():
            self._rank.hold(args[0])
        if name in ("cuda", "to") and _is_on_cpu(args[0]):
            args = (args[0].clone(), *args[1:])
        if name in ("cuda", "pin_memory"):
            return args[0]
        if _moves_to_cpu(name, args, kwargs) and _is_program():
            copy = func(args[0].clone(), *args[1:], **kwargs)  # the program expects a copy
            copy.is_on_cpu = True
            return copy
        if name == "to":
            args = (args[0], *self._numbered(args[1:]))
        made_for_cpu = str(kwargs.get("device")) == "cpu" and _is_program()
        if made_for_cpu and sys._getframe(1).f_code is _WITH_DEVICE:
            made_for_cpu = False  # `with torch.device("cuda")`, which got the CPU instead
        if kwargs:
            if isinstance(number := kwargs.get("device"), int):
                kwargs["device"] = torch.device("cuda", number)
            kwargs = {key: self._here(value) for key, value in kwargs.items()}
            if kwargs.get("pin_memory"):
                del kwargs["pin_memory"]
        made = func(*map(self._here, args), **kwargs)
        return _on_cpu(made, args) if made_for_cpu and isinstance(made, torch.Tensor) else made

    def _numbered(self, args: tuple) -> tuple:
        """Return the arguments with a GPU for its number, which stands first."""
        if args and type(args[0]) is int:
            return (torch.device("cuda", args[0]), *args[1:])
        return args

    def _here(self, value: Any) -> Any:
        """Return the CPU for a CUDA device, and anything else unchanged."""
        if type(value) is str and (value == "cuda" or value.startswith("cuda:")):
            value = torch.device(value)
        if type(value) is not torch.device or value.type != "cuda":
            return value
        check_device(self._rank, value)
        return torch.device("cpu")


def _is_on_cpu(tensor: Any) -> bool:
    """Return whether the program made this on the CPU. What it computes from it does not count."""
    return "is_on_cpu" in getattr(tensor, "__dict__", ())


def _on_cpu(made: torch.Tensor, args: tuple) -> Any:
    """Return a tensor that the program made on the CPU; one of its arguments is copied."""
    result: Any = made.clone() if any(made is each for each in args) else made
    result.is_on_cpu = True
    return result


def check_device(rank: Any, device: torch.device | str | int) -> None:
    """Refuse the number of a GPU that this world does not have."""
    number = device if isinstance(device, int) else torch.device(device).index
    if number is not None and number >= rank.world.size:
        raise CannotInterpret(
            f"device cuda:{number}: this world has {rank.world.size} ranks, each with one GPU, "
            f"cuda:0 to cuda:{rank.world.size - 1}"
        )


def _moves_to_cpu(name: str, args: tuple, kwargs: dict) -> bool:
    if name != "to":
        return name == "cpu"
    given = (*args[1:], *kwargs.values())
    return any(_is_on_cpu(v) if isinstance(v, torch.Tensor) else str(v) == "cpu" for v in given)


def answered_with(ours: Any, original: Any) -> Any:
    """Return a function that calls ours only where a rank's program, not torch, calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current() if _is_program() else None
        return original(*args, **kwargs) if rank is None else ours(rank, *args, **kwargs)

    return call
