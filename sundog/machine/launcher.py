"""The launch path of `kernel[grid](...)` on the simulator."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..callsite import caller
from ..interpreter.gluon_twins import check_launch
from ..interpreter.interpreter import convert_argument, twin
from ..target import has_gpu
from ..world.tensors import heaps
from .baton import RunnerThread
from .machine import Machine
from .tasks import Launch

_OPTIONS = {field.name for kind in (CUDAOptions, HIPOptions) for field in dataclasses.fields(kind)}

Launcher = Callable[[JITFunction, Any, tuple, dict], Any]  # kernel, grid, args, kwargs

followers: set[int] = set()  # the running threads that `adopt` put on the stream of a rank


class Installed:
    """Sends `kernel[grid](...)` of the machine's hosts to `launcher` while it is entered.

    By default that is the simulator. A process may have a stack of worlds. `owns` says whether an
    address is in this rank's heap of a world: a launch goes to the world that owns one of its
    tensors, else to the innermost. `adopt` gets every thread that a host or one of its followers
    starts, before it runs.
    """

    _stack: list[Installed] = []  # noqa: RUF012 -- one per process, as is JITFunction.run
    original: Callable = JITFunction.run
    tune: Callable = Autotuner.run
    start: Callable = threading.Thread.start

    def __init__(
        self,
        machine: Machine | None,
        launcher: Launcher | None = None,
        owns: Callable[[int], bool] | None = None,
        adopt: Callable[[threading.Thread], None] | None = None,
    ) -> None:
        self.machine = machine  # None where ranks are processes and run on a GPU
        self.launcher = launcher
        self.owns = owns
        self.adopt = adopt

    def __enter__(self) -> None:
        if not Installed._stack:
            Installed.original, Installed.tune = JITFunction.run, Autotuner.run
            Installed.start = threading.Thread.start
            JITFunction.run, Autotuner.run = _run, _run_tuned
            threading.Thread.start = _start_thread  # type: ignore[method-assign, assignment]
        Installed._stack.append(self)

    def __exit__(self, *exc: object) -> None:
        Installed._stack.remove(self)
        if not Installed._stack:
            JITFunction.run, Autotuner.run = Installed.original, Installed.tune
            threading.Thread.start = Installed.start  # type: ignore[method-assign]

    def _simulate(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> None:
        assert self.machine is not None
        launch = _prepare(self.machine, kernel, args, kwargs, grid)
        recording = self.machine.host.recording
        if recording is not None:
            recording.launch(launch, loaded=launch.version in self.machine.loaded)
            return
        self.machine.loaded.add(launch.version)
        self.machine.streams.launch(launch, self.machine.host.stream)


def current_machine() -> Machine | None:
    """Return the machine whose hosts are running, if any."""
    return Installed._stack[-1].machine if Installed._stack else None


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the running host's torch operations, which touch only its own memory."""
    machine = current_machine()
    sight = machine.host.sight if machine is not None and machine.is_host_running() else None
    with sight.off() if sight is not None else nullcontext():
        yield


def _run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if warmup:
        return Installed.original(kernel, *args, grid=grid, warmup=True, **kwargs)
    stack = Installed._stack
    chosen = stack[-1] if len(stack) == 1 else _owner(stack, kernel, args, kwargs)
    return (chosen.launcher or chosen._simulate)(kernel, grid, args, kwargs)


def _owner(stack: list[Installed], kernel: JITFunction, args: tuple, kwargs: dict) -> Installed:
    """Return the world whose heap has one of the tensors, else the innermost world."""
    for _, tensor in _tensors({str(i): a for i, a in enumerate((*args, *kwargs.values()))}):
        with torch._C.DisableTorchFunction():
            address = tensor.untyped_storage().data_ptr()
        for each in reversed(stack):
            if each.owns is not None and each.owns(address):
                return each
    return stack[-1]


def _start_thread(thread: threading.Thread) -> None:
    if not isinstance(thread, RunnerThread):  # our threads read no result
        _finish_pending()
        is_follower = threading.get_ident() in followers
        for world in Installed._stack if is_follower else _of_running_hosts():
            if world.adopt is not None:
                world.adopt(thread)
    Installed.start(thread)


def _finish_pending() -> None:
    """Finish pending work, which a thread or a child process of a rank may read."""
    for world in _of_running_hosts():
        assert world.machine is not None
        world.machine.streams.before_thread()


def _of_running_hosts() -> list[Installed]:
    """Return the worlds in which this thread is a host whose turn it is."""
    return [each for each in Installed._stack if each.machine and each.machine.is_host_running()]


os.register_at_fork(before=_finish_pending)  # a child would not run the kernels


_can_time = functools.cache(has_gpu)  # asked at every launch


def _run_tuned(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
    """Run an @triton.autotune kernel. Where nothing can be timed, its first config will do."""
    if Installed._stack[-1].launcher is not None and _can_time():
        return Installed.tune(tuner, *args, **kwargs)
    one = copy.copy(tuner)  # other ranks launch it meanwhile, and its cache is for a GPU
    one.nargs = dict(zip(one.arg_names, args, strict=False))
    one.configs = one.prune_configs(kwargs)[:1]
    return Installed.tune(one, *args, **kwargs)


def _prepare(machine: Machine, kernel: JITFunction, args: Any, kwargs: Any, grid: Any) -> Launch:
    bound = _bind(kernel, args, kwargs)
    if kernel.is_gluon():
        check_launch(kernel, bound, kwargs)
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    shape = grid({**kwargs, **bound}) if callable(grid) else grid
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if not 1 <= len(shape) <= 3 or min(shape) < 0:
        raise ValueError(f"grid {shape} of {kernel.__name__}: expected one to three sizes, >= 0")
    constants = {p.name for p in kernel.params if p.is_constexpr}
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    rank = machine.host.rank
    tensors = _tensors(bound)
    for name, tensor in tensors:
        _check_device(kernel.__name__, name, tensor)
        _check_world(machine, kernel.__name__, name, tensor)
        if machine.checker is not None:
            with torch._C.DisableTorchFunction():
                machine.checker.meet(tensor.untyped_storage())
    held = [machine.memory.hold(t, name, rank) for name, t in tensors]

    def convert(arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            name: _plain(v) if name in constants else convert_argument(v)
            for name, v in arguments.items()
        }

    return Launch(
        kernel.__name__,
        twin(kernel),
        bound,
        convert,
        (shape + (1, 1))[:3],
        rank,
        [start for start in held if start is not None],
        caller(),
        _warps(kernel, kwargs),
        kernel=kernel,
        options=options,
        version=_version(kernel, bound, options),
    )


def repeat(machine: Machine, launch: Launch) -> Launch:
    """Launch the same kernel again on the same tensors."""
    tensors = _tensors(launch.arguments)
    if machine.checker is not None:
        with torch._C.DisableTorchFunction():
            for _, tensor in tensors:
                machine.checker.meet(tensor.untyped_storage())
    held = [machine.memory.hold(tensor, name, launch.rank) for name, tensor in tensors]
    return dataclasses.replace(
        launch,
        arguments=dict(launch.arguments),
        held=[start for start in held if start is not None],
    )


def _version(kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any]) -> tuple:
    """Return what decides which binary a launch needs, as far as a simulator knows."""
    constants = {p.name for p in kernel.params if p.is_constexpr}
    with torch._C.DisableTorchFunction():
        kinds = [
            str(value) if name in constants else str(getattr(value, "dtype", type(value)))
            for name, value in arguments.items()
        ]
    return kernel, *kinds, *(f"{name}={value}" for name, value in sorted(options.items()))


def _bind(kernel: JITFunction, args: Any, kwargs: Any) -> dict[str, Any]:
    names = kernel.arg_names
    unknown = [k for k in kwargs if k not in names and k not in _OPTIONS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], [*names, *_OPTIONS], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"kernel {kernel.__name__} has no argument {unknown[0]!r}.{hint}")
    own = {k: v for k, v in kwargs.items() if k in names}
    try:
        return inspect.getcallargs(kernel.fn, *args, **own)
    except TypeError as error:
        raise ValueError(f"launch of {kernel.__name__}: {error}") from None


def _warps(kernel: JITFunction, kwargs: Any) -> int:
    warps: int = kwargs.get("num_warps", CUDAOptions.num_warps)
    if warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(
            f"launch of {kernel.__name__}: num_warps={warps}, and Triton compiles for 1, 2, 4, 8, "
            "16 or 32"
        )
    return warps


def _tensors(bound: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in bound.items():
        values = value if isinstance(value, tuple) else (value,)
        for each in values:
            each = each.base if isinstance(each, TensorDescriptor) else each
            each = getattr(each, "base", each)  # triton's TensorWrapper
            if isinstance(each, torch.Tensor):
                found.append((name, each))
    return found


def _check_device(kernel: str, name: str, tensor: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu":
            raise ValueError(
                f"argument {name} of {kernel} is on {tensor.device}, but the simulator runs on "
                "the CPU: launch it on a world of a GPU backend, or make the tensor on the CPU"
            )


def _check_world(machine: Machine, kernel: str, name: str, tensor: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if start == 0 and end > 0:
        raise ValueError(
            f"argument {name} of {kernel} (shape {tuple(tensor.shape)}) has no memory: it is a "
            f"{type(tensor).__name__}. Pass a tensor that was made outside the fake mode."
        )
    if start in heaps and not machine.memory.is_heap(start, end):
        raise ValueError(
            f"argument {name} of {kernel} (shape {tuple(tensor.shape)}) is on the heap of another "
            f"world than the one of rank {machine.host.rank} that launches it. Launch on the world "
            "that made the tensor, or copy it: world.as_symmetric(tensor)."
        )


def _plain(value: Any) -> Any:
    return getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
