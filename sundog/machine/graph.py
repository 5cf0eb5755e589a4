"""Capture on the simulator: record what a host does instead of doing it, then replay it.

Launches and torch operations are kept with their arguments. An operation that writes into a tensor
does not run at capture. One that makes a tensor does, for its shape; the tensor is then poisoned,
belongs to the graph, and every replay writes into it. What a GPU can't capture is refused with its
line, such as an operation whose result the host must know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..callsite import caller_frame
from ..errors import CaptureError, SundogError
from ..world.capture import COPY, LOAD, READ, STREAM, refusal
from ..world.tensors import poison_tensor
from .launcher import repeat
from .machine import Machine
from .tasks import Entry, Event, Launch, Operation, Record, Stream, Wait
from .touched import Accessed, accessed, is_view, tell, words_held

_TO_HOST = ("cpu", "tolist", "numpy", "__array__")
_FROM_HOST = ("tensor", "as_tensor", "from_numpy", "frombuffer")
_UNKNOWN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Recording:
    """What one host records during its capture."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._host = machine.host
        self._origin = machine.host.stream
        self._entries: list[tuple[Stream, Entry]] = []
        # How many entries of each stream a captured stream comes after, to see whether all were
        # joined.
        self._behind: dict[Stream, dict[int, int]] = {self._origin: {}}
        self._latest: dict[Stream, tuple] = {}  # the line of each stream's latest entry
        self._private: dict[Stream, Stream] = {}
        self._refused: CaptureError | None = None
        self._operations = Operations(machine, self)
        self._host.recording = self
        machine.streams.settle()

    # during the capture

    def refuse(self, call: str, reason: str, instead: str, at: Any = None) -> CaptureError:
        error = refusal(call, reason, instead, at)
        self._refused = self._refused or error
        return error

    def explain(self, error: RuntimeError) -> CaptureError | None:
        """Return None: what is refused here has its own message."""
        return None

    def launch(self, launch: Launch, loaded: bool) -> None:
        self._machine.memory.drop(launch.held)
        if not loaded:
            raise self.refuse(
                f"launch of {launch.name}",
                LOAD,
                "Call it once with such arguments before the capture, so that it is compiled.",
            )
        self.add(launch)

    def torch_function(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        return self._operations.call(func, args, kwargs)

    def operator(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Judge an operator of torch that was not called from Python, such as one in jit code."""
        return self._operations.operator(func, args, kwargs)

    def add(self, entry: Entry) -> None:
        stream = self._host.stream
        if stream not in self._behind:
            raise self.refuse(
                f"{entry.name} on stream {stream.number}",
                STREAM,
                f"Let it wait for an event that was recorded on stream {self._origin.number} in "
                "this capture; then it is a part of it.",
            )
        self._entries.append((stream, entry))
        self._latest[stream] = caller_frame()
        self._behind[stream][id(stream)] = len(self._entries)

    def record(self) -> Event:
        event = Event(self._host.rank, recording=self)
        self.add(Record(event))
        event.clock = dict(self._behind[self._host.stream])
        return event

    def wait(self, event: Event) -> None:
        if event.recording is not self:
            raise self.refuse(
                "wait_event",
                STREAM,
                "The event was not recorded in this capture: a replay could not wait for it. Wait "
                "before the capture, or before graph.replay().",
            )
        behind = self._behind.setdefault(self._host.stream, {})
        for stream, entries in event.clock.items():
            behind[stream] = max(behind.get(stream, 0), entries)
        self.add(Wait(event))

    def end(self) -> None:
        self.abort()
        known = self._behind[self._origin]
        loose = [s for s, own in self._behind.items() if own.get(id(s), 0) > known.get(id(s), 0)]
        if loose and self._refused is None:
            self.refuse(
                f"work on stream {loose[0].number} that nothing waits for",
                STREAM,
                f"Record an event after it, and wait for that on stream {self._origin.number}.",
                self._latest[loose[0]],
            )
        if self._refused is not None:
            raise self._refused

    def abort(self) -> None:
        self._host.recording = None
        self._machine.streams.settle()

    # afterwards

    def replay(self) -> None:
        events: dict[Event, Event] = {}
        for stream, entry in self._entries:
            self._machine.streams.put(self._again(entry, events), self._target(stream))
        self._machine.pause()
        self._machine.streams.settle()

    def _again(self, entry: Entry, events: dict[Event, Event]) -> Entry:
        if isinstance(entry, Launch):
            return repeat(self._machine, entry)
        if isinstance(entry, Operation):
            return Operation(entry.name, entry.run)
        event = events.setdefault(entry.event, Event(self._host.rank))
        return Record(event) if isinstance(entry, Record) else Wait(event)

    def _target(self, stream: Stream) -> Stream:
        """Return the replay's stream, or the graph's own stream for one of its branches."""
        if stream is self._origin:
            return self._machine.host.stream
        if stream not in self._private:
            self._private[stream] = self._machine.streams.add(self._host.rank, -1)
        return self._private[stream]

    def free(self) -> None:
        for stream in self._private.values():
            self._machine.streams.drain(stream)
        self._machine.streams.remove(list(self._private.values()))
        self._entries.clear()


class Operations(TorchDispatchMode):
    """The torch operations of one recording."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first capture imports the compiler, which takes two seconds

    def __init__(self, machine: Machine, recording: Recording) -> None:
        super().__init__()
        self._machine = machine
        self._recording = recording
        self._is_inside = 0
        self._name = ""
        self._at: tuple[str, int, str] = ("", 0, "")
        self._seed: torch.Tensor | None = None  # of operations that draw random numbers

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Judge a torch function that the host calls during the capture."""
        self._name, self._at = getattr(func, "__name__", str(func)), caller_frame()
        made = bool(args) and isinstance(args[0], torch.Tensor)
        if self._name in _TO_HOST or (self._name == "to" and "cpu" in args[1:]):
            raise self._recording.refuse(
                f"Tensor.{self._name}", COPY, "Keep it on the device; read it after the replay."
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
        """Judge an operator that the host's code reaches during the capture, or that we call."""
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
                "with the tensor on the device, or read it after the replay.",
            )
        if func._schema.is_mutable:
            func(*_copied(args), **_copied(kwargs))  # raises here if it is wrong
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
            held = words_held(func, args) if self._machine.checker is not None else b""
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableTorchDispatch(),
                torch.inference_mode(),
            ):
                self._do(func, args, kwargs, touched, seeded)
            if self._machine.checker is not None:
                now = accessed(func, args, kwargs, result)  # indices may differ from the last run's
                tell(self._machine.checker, stream, now, at, held)
            self._machine.host_wrote()

        self._recording.add(Operation(f"torch's {self._name}", run))

    def _do(self, func: Any, args: tuple, kwargs: dict, touched: Accessed, seeded: bool) -> None:
        if seeded:  # the graph has its own generator, so other ranks' numbers do not depend on it
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
    """Return whether indexing copies to a GPU, which an H200 with torch 2.11 refused: a list as an
    index, or a number for one element. (`x[1:3] = 2.0` fills, and is fine.)"""
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(each, list) for each in index):
        return True
    alone = isinstance(args[1], int) and not isinstance(args[1], bool)
    return name == "__setitem__" and alone and isinstance(args[2], int | float)


def _is_unknown(func: Any, args: tuple) -> bool:
    """Return whether the host needs the result of an operation, or only its size."""
    if func is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return any(tag in func.tags for tag in _UNKNOWN)


def _written(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the arguments that an operation writes into, which are its result."""
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
