"""Torch operations of a capture: recorded with their tensors, done at every replay.

An operation that writes into a tensor is not done at capture. One that makes a tensor is, for its
shape; the tensor is then poisoned, belongs to the graph, and every replay writes into it. One whose
result the host must know can't be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..callsite import caller_frame
from ..errors import SundogError
from ..world.capture import COPY, READ
from ..world.poison import poison_tensor
from .accesses import Accessed, accessed, is_view, tell
from .machine import Machine
from .tasks import Operation, Stream

if TYPE_CHECKING:
    from .recording import Recording

__all__ = ["Operations"]

_TO_HOST = ("cpu", "tolist", "numpy", "__array__")
_FROM_HOST = ("tensor", "as_tensor", "from_numpy", "frombuffer")
_UNKNOWN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Operations(TorchDispatchMode):
    """The torch operations of one recording."""

    def __init__(self, machine: Machine, recording: Recording) -> None:
        super().__init__()
        self._machine = machine
        self._recording = recording
        self._is_inside = 0
        self._name = ""
        self._at: tuple[str, int, str] = ("", 0, "")
        self._seed: torch.Tensor | None = None  # of operations that draw random numbers

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """A torch function that the host calls during the capture."""
        self._name, self._at = getattr(func, "__name__", str(func)), caller_frame()
        made = bool(args) and isinstance(args[0], torch.Tensor)
        if self._name in _TO_HOST or (self._name == "to" and "cpu" in args[1:]):
            raise self._recording.refuse(
                f"Tensor.{self._name}", COPY, "Keep it on the device; read it behind the replay."
            )
        if (self._name in _FROM_HOST and not made) or _from_host(self._name, args):
            raise self._recording.refuse(
                f"torch.{self._name}",
                COPY,
                "Make the tensor before the capture, and copy_ into it; for a number fill_ does.",
            )
        with self:
            return func(*args, **kwargs)

    def operator(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator that the host's code reaches during the capture, or that we call."""
        if self._is_inside:
            return func(*args, **kwargs)
        self._name, self._at = func._opname, caller_frame()
        with self:
            return func(*args, **kwargs)

    def __enter__(self) -> Operations:
        self._is_inside += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_inside -= 1
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_unknown(func, args):
            raise self._recording.refuse(
                f"torch's {self._name}",
                READ,
                "The host would wait for the device, and a replay would not look again. Compute "
                "with the tensor on the device, or read it behind the replay.",
            )
        if func._schema.is_mutable:
            func(*_copied(args), **_copied(kwargs))  # what is wrong with it is raised here
            self._add(func, args, kwargs, None)
            return _written(func, args, kwargs)
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        for tensor in made:
            poison_tensor(tensor)
            if self._machine.checker is not None:
                self._machine.checker.meet(tensor.untyped_storage(), tensor.element_size())
        if "empty" not in func._opname:
            self._add(func, args, kwargs, result)
        return result

    def _add(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        touched = accessed(func, args, kwargs, result)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        at = self._at

        def run(stream: Stream) -> None:
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableTorchDispatch(),
                torch.inference_mode(),
            ):
                self._do(func, args, kwargs, touched, seeded)
            if self._machine.checker is not None:
                tell(self._machine.checker, stream, touched, at)
            self._machine.host_wrote()

        self._recording.add(Operation(f"torch's {self._name}", run))

    def _do(self, func: Any, args: tuple, kwargs: dict, touched: Accessed, seeded: bool) -> None:
        if seeded:  # the generator is the graph's own: other ranks' numbers do not depend on it
            outside = torch.get_rng_state()
            torch.set_rng_state(outside if self._seed is None else self._seed)
        made = tree_leaves(func(*args, **kwargs))
        for kept, new in zip(touched.made, made, strict=False):
            kept.copy_(new)
        if seeded:
            self._seed = torch.get_rng_state()
            torch.set_rng_state(outside)


def _copied(values: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, values)


def _from_host(name: str, args: tuple) -> bool:
    """What indexing copies to a GPU, as an H200 with torch 2.11 refused it: a list as an index,
    and a number that goes to one place. (`x[1:3] = 2.0` fills, and is fine.)"""
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(each, list) for each in index):
        return True
    alone = isinstance(args[1], int) and not isinstance(args[1], bool)
    return name == "__setitem__" and alone and isinstance(args[2], int | float)


def _is_unknown(func: Any, args: tuple) -> bool:
    """Does the host need to know what it computes, if only the size?"""
    if func is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return any(tag in func.tags for tag in _UNKNOWN)


def _written(func: Any, args: tuple, kwargs: dict) -> Any:
    """What an operation that writes into its arguments returns: those arguments."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    by_alias = {
        str(sorted(a.alias_info.before_set)): given.get(a.name)
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }
    results = []
    for each in func._schema.returns:
        if each.alias_info is None:
            raise SundogError(f"the simulator can't capture {func}: it writes and makes tensors")
        results.append(by_alias[str(sorted(each.alias_info.before_set))])
    return results[0] if len(results) == 1 else tuple(results) or None
