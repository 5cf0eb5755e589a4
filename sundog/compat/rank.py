"""One rank of a program that was written for torchrun, torch.distributed and CUDA."""

from __future__ import annotations

import functools
import inspect
import multiprocessing.process
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing.reductions
from torch._C._distributed_c10d import _SymmetricMemory

from ..errors import CannotInterpret, SundogError
from ..machine.launcher import current_machine
from ..world.world import World
from . import cuda, operators, symmetric
from .devices import CudaIsHere, answered_with, check_device
from .groups import SimulatedGroup, WorldState
from .patches import Environment, Patches, PerRank, current, entered, for_ranks, variables

_BACKENDS = ("nccl", "gloo", "undefined", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cuda:nccl")
_PER_RANK = ("_group_name_to_workspace_tensor", "_group_name_to_store", "_backend_streams")
_NEEDS_A_GPU = re.compile(
    r"'torch\._C' has no attribute '_(cuda|nccl)|CUDA is not available|CUDA_HOME|"
    r"'torch\.cuda' has no attribute|"
    r"compiled with(out)? CUDA|0 active drivers|find backend for device type cpu|"
    r"'CUDA' backend|from the 'CPU' backend|NVIDIA driver|lib(cuda|cudart|nvrtc)\b|"
    r"support for cuda|CUDA support|initialize CUDA|dummy base class|_host_emptyCache|"
    r"accelerator device when none|a cuda device, but got|only supported on CUDA"
)
_NO_OPERATOR = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'")

_LONG = 200  # letters of what torch says, of which the first sentence is enough

_shared: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()  # by machine


class Rank:
    """What each rank has where torch has one per process."""

    def __init__(self, world: World, shared: dict[Any, Any]) -> None:
        self.world = world
        self.shared = shared  # by all ranks of this process
        self.environment = variables(world.rank, world.size)
        self.state = WorldState()
        self.dicts: dict[str, dict] = {}
        self.allocations: list[symmetric.SymmetricTensor] = []
        self.groups_of: dict[int, str] = {}  # by number of allocation
        self.backend = "CUDA"  # of symmetric memory, which here is the same for all backends
        self.streams = ExitStack()  # those that torch.cuda.set_stream chose
        self._num_streams = 0
        self._held: list[torch.Tensor] = []

    def new_stream(self) -> int:
        self._num_streams += 1
        return self._num_streams

    def set_stream(self, number: int) -> None:
        """Make this the current stream until another one is chosen or the program ends."""
        self.streams.enter_context(self.world.stream(number))

    def default_group(self) -> SimulatedGroup:
        if self.state.default_pg is None:
            raise ValueError(
                "the program has no process group yet: call torch.distributed.init_process_group"
            )
        group: SimulatedGroup = self.state.default_pg
        return group

    def group_named(self, name: str) -> SimulatedGroup:
        for group, known in self.state.pg_names.items():
            if known == name:
                return group
        known = ", ".join(map(repr, self.state.pg_names.values())) or "none"
        raise ValueError(f"no process group named {name!r} on this rank (there are: {known})")

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor whose address the program has taken, since kernels may reach it by that."""
        machine = current_machine()
        if machine is None:
            return
        with torch._C.DisableTorchFunction():
            if any(each.data_ptr() == tensor.data_ptr() for each in self._held):
                return
            if machine.memory.hold(tensor, "a tensor", self.world.rank) is not None:
                self._held.append(tensor)
                if machine.checker is not None:
                    machine.checker.meet(tensor.untyped_storage())

    def add_group(self, ranks: Sequence[int], backend: str) -> SimulatedGroup:
        name = str(self.state.group_count)
        self.state.group_count += 1
        group = SimulatedGroup(self.world, ranks, name)
        self.state.pg_map[group] = (backend, dist.HashStore())
        self.state.pg_names[group] = name
        self.state.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self.state.pg_backend_config[group] = f"cpu:{backend},cuda:{backend}"
        self.state.pg_to_tag[group] = f"ptd:{name}"
        self.state.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
        self.state.tags_to_pg.setdefault("", []).append(group)
        return group


def as_rank(main: Callable[..., Any], argv: Sequence[str] | None = None) -> Callable[[World], Any]:
    """Return a rank's function for `sundog.run` that calls main() as a process of torchrun would.

    The program finds `argv` as sys.argv, by default this process's own.
    """

    @functools.wraps(main)
    def run(world: World) -> Any:
        if world.device.type != "cpu":
            raise ValueError(
                f"as_rank: device `cuda` would be CPU memory, and this world is on {world.device}: "
                "use backend 'sim' or 'shm', or start the program with torchrun"
            )
        machine = current_machine()
        rank = Rank(world, {} if machine is None else _shared.setdefault(machine, {}))
        symmetric.Reach.of(machine)
        with (
            entered(rank, functools.partial(install, argv=argv)),
            CudaIsHere(rank),
            rank.streams,
        ):
            try:
                return _called(main)
            except Exception as error:
                if missing := _NO_OPERATOR.search(str(error)):
                    said = f"no imported library defines torch.ops.{missing[1]}.{missing[2]}"
                    raise ImportError(said).with_traceback(error.__traceback__) from error
                if not _NEEDS_A_GPU.search(str(error)) or isinstance(error, SundogError):
                    raise
                said = str(error).partition("\n")[0]
                if len(said) > _LONG:
                    said = said.partition(". ")[0]
                text = f"{type(error).__name__}: {said}: this needs a GPU, and is not simulated"
                raise CannotInterpret(text).with_traceback(error.__traceback__) from error

    return run


def _called(main: Callable[..., Any]) -> Any:
    """Call main(); refuse what torchrun would not run to its end."""
    try:
        inspect.signature(main).bind()
    except TypeError as error:
        said = f"main() is called without arguments, as by torchrun: {error}"
        raise CannotInterpret(said) from None
    result = main()
    if inspect.isgenerator(result) or inspect.iscoroutine(result):
        result.close()
        kind = type(result).__name__
        raise CannotInterpret(f"main() returned a {kind}, and has run nothing: make it a function")
    return result


class _Proxy:
    """c10d's _world: each rank's own, and the process's in any other thread."""

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def _mine(self) -> Any:
        rank = current()
        return object.__getattribute__(self, "_original") if rank is None else rank.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)


def install(patches: Patches, argv: Sequence[str] | None = None) -> list[Callable[[], None]]:
    """Put everything in place. Return what undoes the rest."""
    patches.set(sys, "argv", [*(sys.argv if argv is None else argv)])
    patches.set(c10d, "_world", _Proxy(c10d._world))
    cuda.install(patches)
    _install_host_calls(patches)
    patches.set_everywhere(
        c10d, {name: for_ranks(call, getattr(c10d, name)) for name, call in _FUNCTIONS.items()}
    )
    patches.set(dist, "ProcessGroup", SimulatedGroup)
    for name in _PER_RANK:
        patches.set(symm_mem, name, PerRank(name, getattr(symm_mem, name)))
    for name, function in _SYMMETRIC.items():
        if hasattr(_SymmetricMemory, name):  # torch 2.11 lacks is_symm_mem_tensor
            replaced = for_ranks(function, getattr(_SymmetricMemory, name))
            patches.set(_SymmetricMemory, name, staticmethod(replaced))
    environment: Any = os.environ
    patches.set(environment, "_data", Environment(environment._data))
    pad_size = _SymmetricMemory.signal_pad_size
    libraries = operators.register()

    def undo() -> None:
        _SymmetricMemory.signal_pad_size = pad_size
        for library in libraries:
            library._destroy()

    return [undo]


# torch.distributed


def _init_process_group(rank: Rank, /, backend: Any = None, *args: Any, **kwargs: Any) -> None:
    name = str(backend or "nccl").lower()
    if name not in _BACKENDS:
        raise CannotInterpret(
            f"init_process_group({name!r}): the simulator has a group for nccl and gloo. Use one "
            "of these, or run on GPUs."
        )
    asked = kwargs.get("world_size", -1)
    if asked not in (-1, rank.world.size):
        raise CannotInterpret(
            f"init_process_group(world_size={asked}): this world has {rank.world.size} ranks; "
            f"run it with --world {asked}"
        )
    if rank.state.default_pg is not None:
        raise ValueError("trying to initialize the default process group twice!")
    group = rank.add_group(range(rank.world.size), "gloo" if name == "gloo" else "nccl")
    rank.state.default_pg = group
    rank.dicts.setdefault("_group_name_to_store", {})[group.group_name] = dist.HashStore()


def _destroy_process_group(rank: Rank, group: Any = None) -> None:
    rank.world.synchronize()
    if group is None or group is rank.state.default_pg:
        rank.state = WorldState()
        return
    for table in (rank.state.pg_map, rank.state.pg_names, rank.state.pg_group_ranks):
        table.pop(group, None)


def _new_group(rank: Rank, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    chosen = sorted(ranks) if ranks is not None else list(range(rank.world.size))
    if not set(chosen) <= set(range(rank.world.size)):
        raise ValueError(
            f"new_group({chosen}): this world has ranks 0 to {rank.world.size - 1}; run it with "
            f"--world {max(chosen) + 1}, or leave the others out"
        )
    if rank.world.rank not in chosen:
        rank.state.group_count += 1
        return c10d.GroupMember.NON_GROUP_MEMBER
    return rank.add_group(chosen, "nccl")


def _resolve(rank: Rank, name: str) -> SimulatedGroup:
    return rank.group_named(name)


_FUNCTIONS: dict[str, Any] = {
    "init_process_group": _init_process_group,
    "destroy_process_group": _destroy_process_group,
    "new_group": _new_group,
    "_resolve_process_group": _resolve,
    "is_nccl_available": lambda rank: True,
    "_set_pg_timeout": lambda rank, /, *args, **kwargs: None,
}


# _SymmetricMemory's own functions


_SYMMETRIC: dict[str, Any] = {
    "empty_strided_p2p": symmetric.allocate,
    "rendezvous": symmetric.rendezvous,
    "set_group_info": lambda rank, *args, **kwargs: None,
    "has_multicast_support": lambda rank, *args: current_machine() is not None,
    "is_symm_mem_tensor": lambda rank, tensor: symmetric.find(rank, tensor) is not None,
    "get_backend": lambda rank, device=None: rank.backend,
    "set_backend": lambda rank, name: setattr(rank, "backend", name),
}


# other functions that a program calls on the host


_ACCELERATOR: dict[str, Any] = {
    "is_available": lambda rank: True,
    "device_count": lambda rank: rank.world.size,
    "current_accelerator": lambda rank, check_available=False: torch.device("cuda"),
    "current_device_index": lambda rank: rank.world.rank,
    "current_device_idx": lambda rank: rank.world.rank,
    "set_device_index": check_device,
    "set_device_idx": check_device,
    "synchronize": lambda rank, device=None: rank.world.synchronize(),
    "current_stream": cuda.current_stream_of,
    "set_stream": lambda rank, stream: rank.set_stream(stream.number),
    "empty_cache": lambda rank: None,
}


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CannotInterpret(what)

    return refuse


_ONE_PROCESS = "sundog runs main() in every rank already: name the function that a rank runs"
_SEVERAL_GPUS = (
    "broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather"
)  # fmt: skip
_ONE_GPU = "torch.cuda.comm.{}: each rank has one GPU here; use torch.distributed instead"
_PROFILER = (
    "torch.profiler is not simulated, since there is no time here: leave it out, or use a GPU"
)


_STORE = (
    "a store of torch.distributed is not simulated: exchange values by all_gather_object, or use "
    "GPUs"
)


class NoTCPStore:
    """torch.distributed.TCPStore, whose construction waits for the other ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise CannotInterpret(_STORE)


class FileStore(dist.FileStore):
    """torch.distributed.FileStore: a rank reads what is there; a wait would stop all ranks."""

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        if not self.check(keys):
            raise CannotInterpret(_STORE)


class Generator:
    """torch.Generator, which gives the CPU's numbers on any device."""

    def __new__(cls, device: Any = None) -> Any:
        return torch._C.Generator("cpu")


def _uncompiled(rank: Rank, /, model: Any = None, **kwargs: Any) -> Any:
    """Answer torch.compile, which compiles nothing in a rank: its first call is for one thread."""
    return (lambda function: function) if model is None else model


def _install_host_calls(patches: Patches) -> None:
    """Answer torch.accelerator and autocast; refuse what hangs or crashes among threads."""
    for name, call in _ACCELERATOR.items():
        if hasattr(torch.accelerator, name):
            patches.set(
                torch.accelerator, name, answered_with(call, getattr(torch.accelerator, name))
            )
    stores = {"TCPStore": NoTCPStore, "FileStore": FileStore}
    made = {name: cuda.constructor(new, getattr(dist, name)) for name, new in stores.items()}
    patches.set_everywhere(dist, made)
    generator = cuda.constructor(Generator, torch.Generator)
    patches.set_everywhere(torch, {"Generator": generator})
    reduced = torch.multiprocessing.reductions.reduce_tensor
    between = _refusing(
        "reduce_tensor: memory is not shared between processes by CUDA here; rendezvous symmetric "
        "memory, or use GPUs"
    )
    patches.set_everywhere(
        torch.multiprocessing.reductions, {"reduce_tensor": answered_with(between, reduced)}
    )
    several = torch.nn.parallel.comm
    refusals = {name: _refusing(_ONE_GPU.format(name)) for name in _SEVERAL_GPUS}
    patches.set_everywhere(
        several, {name: for_ranks(no, getattr(several, name)) for name, no in refusals.items()}
    )
    patches.set(torch, "compile", for_ranks(_uncompiled, torch.compile))
    spawns = torch.multiprocessing
    for name in ("spawn", "start_processes"):
        refused = _refusing(f"torch.multiprocessing.{name}: {_ONE_PROCESS}")
        patches.set(spawns, name, for_ranks(refused, getattr(spawns, name)))
    process = multiprocessing.process.BaseProcess
    started = _refusing(f"a process that main() starts: {_ONE_PROCESS}")
    patches.set(process, "start", answered_with(started, process.start))
    profile = torch.autograd.profiler.profile
    patches.set(profile, "__init__", for_ranks(_refusing(_PROFILER), profile.__init__))
    cast = torch.autocast.__init__

    def of_the_cpu(
        rank: Any, self: Any, kind: str, dtype: Any = None, *more: Any, **named: Any
    ) -> None:
        if kind == "cuda":
            kind, dtype = "cpu", dtype or torch.float16
        cast(self, kind, dtype, *more, **named)

    patches.set(torch.autocast, "__init__", for_ranks(of_the_cpu, cast))
