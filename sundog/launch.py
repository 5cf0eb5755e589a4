"""`run` and `init`, which make a world per rank from a backend's name."""

from __future__ import annotations

import atexit
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from . import knobs
from .backends import Capabilities, WorldOptions, load
from .backends._link import LINKS
from .backends.sim import Sim
from .errors import SundogError
from .target import GPU_HEAP, has_gpu
from .torch import names
from .world.waits import SIGNALS, signal_form
from .world.world import World

_CPU_HEAP = 64 << 20
# Backends if none is named: without a GPU, and with one.
_WITHOUT_TORCHRUN = ("sim", "virtual")
_UNDER_TORCHRUN = ("shm", "symm")


def run(
    fn: Callable[[World], Any],
    world_size: int,
    backend: str | None = None,
    *,
    heap_size: int = 0,
    timeout: float = 0,
    link: str = "",
    sim: Sim | None = None,
    torch: bool = False,
    signals: str = "",
    tune: str = "",
) -> list[Any]:
    """Run `fn(world)` once per rank and return the results by rank.

    With `torch`, `fn()` is a program for torchrun, CUDA and torch.distributed, without an argument,
    which runs on the simulator (see sundog.compat).

    The default backend is `virtual` if there is a GPU, else `sim`. The argument `sim` says how to
    simulate (schedule, SMs, whether waits expire), for that backend only. With link="pcie" all
    ranks but the first are passive (docs/gpu.md): on `virtual` their data is in host memory, on
    `sim` it is apart from their flags. `signals`, `tune`: see `init`.
    """
    if not callable(fn):
        raise ValueError(f"fn must be callable as fn(world), got {fn!r}")
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    name = _chosen(backend or ("sim" if sim is not None else ""), _WITHOUT_TORCHRUN)
    module = load(name)
    can = module.CAPABILITIES
    _check_link(link, name, can)
    _check_options(signals, tune, link)
    if sim is not None and not can.takes_sim:
        raise ValueError(f"sim=... is for backend 'sim', not {name!r}")
    if torch and can.on_gpu:
        raise ValueError(f"torch=True is for backends 'sim' and 'shm', not {name!r}: use torchrun")
    nbytes = _heap_size(heap_size, can.on_gpu, world_size)
    options = WorldOptions(nbytes, _seconds(timeout), link, sim)
    if torch:
        from .compat.rank import as_rank

        fn = as_rank(fn)
    return module.run(_with_options(fn, signals, tune), world_size, options)


def _with_options(fn: Callable[[World], Any], signals: str, tune: str) -> Callable[[World], Any]:
    """Return `fn` for a world with these options for signals and tuning."""

    def run_rank(world: World) -> Any:
        process = os.getpid()
        if signals:
            world.kernel_mode = signal_form(signals, world.device, True)
        world.tune = tune
        try:
            return fn(world)
        finally:
            if os.getpid() != process:
                _end_fork(sys.exc_info()[1])

    return run_rank


def _end_fork(error: BaseException | None) -> None:
    """End a fork that leaves its rank's function, since only the parent may continue."""
    status = error.code if isinstance(error, SystemExit) else error
    if status is error and error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else status is not None)


def _check_options(signals: str, tune: str, link: str = "") -> None:
    knobs.check()
    if signals not in ("", *SIGNALS):
        raise ValueError(f"signals must be 'atomic', 'store' or '', got {signals!r}")
    if tune:
        from .ops.online import check_tune  # it imports models, which takes a while

        check_tune(tune, link)


def init(
    backend: str | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    dim: str | int | tuple[str, ...] | None = None,
    heap_size: int = 0,
    timeout: float = 0,
    signals: str = "",
    tune: str = "",
) -> World:
    """Return the world of this process, which torchrun started as one of several ranks.

    The default backend is `symm` if there is a GPU, else `shm`. The ranks are the members of
    `group`, a ProcessGroup; or of dimension `dim` of `mesh`, a DeviceMesh; else of
    torch.distributed's default group, which is made with gloo if there is none. Only members call.
    A process may have several worlds at once, one for each group that it is a member of. Ranks on
    several machines get a SpanningWorld: kernels inside each, torch.distributed between them
    (docs/nodes.md).

    `signals` says how a kernel sets a peer's flag: "atomic", or "store", which also works on links
    without native atomics. The default (without SUNDOG_SIGNALS) is "store" on such links.

    tune="online" lets algo="auto" try, in the first calls of a problem that was not measured, what
    the model rates within 10 % of the best (sundog/ops/online.py).
    """
    _check_options(signals, tune)
    name = _chosen(backend, _UNDER_TORCHRUN)
    module = load(name)
    if not module.CAPABILITIES.processes:
        raise ValueError(f"sundog.init: ranks of {name!r} are not processes: use sundog.run")
    from .backends._groups import members_of
    from .nodes.spanning import open_world

    seconds = _seconds(timeout)
    members = members_of(group, mesh, dim, seconds)
    _check_no_other(members.group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nbytes = _heap_size(heap_size, module.CAPABILITIES.on_gpu, local)
    world: World = open_world(members, module, nbytes, seconds)
    if signals:
        world.kernel_mode = signal_form(signals, world.device, True)
    getattr(world, "local", world).tune = tune  # over machines: that of each machine's kernels
    if not _initialized:
        atexit.register(_look_at_exit)
    _initialized[members.group] = world
    return world


_initialized: dict[str, World] = {}  # the world that `init` returned last, by its group


def _look_at_exit() -> None:
    """Tell the other ranks what happened if a process ends with open worlds.

    A wait that expired sets the exit status.
    """
    error, failures = getattr(sys, "last_value", None), []
    for world in _initialized.values():
        if world._closed:
            continue
        failure = None if error else world._failure()
        world._backend.fail(error or failure or SystemExit())
        failures += [failure] if failure is not None else []
    for failure in failures:
        # An exception here would be printed, and the exit status would stay 0.
        traceback.print_exception(type(failure), failure, failure.__traceback__)
    if failures:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _leave_to_parent() -> None:
    """End the worlds in a fork, whose actions would count as those of its parent, the rank."""
    for world in names.open_worlds():
        world._end(f"the world belongs to process {os.getppid()}, and a fork of it is no rank")
        world._plans.clear()  # or earlier calls could be repeated without a check
    _initialized.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _check_no_other(group: str) -> None:
    """Refuse a second world over the same group."""
    other = _initialized.get(group)
    if other is not None and not other._closed:
        raise SundogError(
            f"sundog.init: this process already has {other!r}. Use that one (world.group makes "
            "worlds of some of its ranks), or close it first: world.close(). For a world of other "
            "processes give group=... or mesh=..."
        )


def _check_link(link: str, name: str, can: Capabilities) -> None:
    if link not in LINKS:
        raise ValueError(f"link must be 'pcie', 'host' or '', got {link!r}")
    if link not in can.links:
        raise ValueError(
            f"link={link!r} puts a real link between ranks on one GPU: it is for backend "
            f"'virtual', and for 'sim', which checks it on a CPU, not {name!r}"
        )


def _chosen(name: str | None, defaults: tuple[str, str]) -> str:
    chosen = name or knobs.backend.get() or defaults[has_gpu()]
    if chosen not in knobs.BACKENDS:
        raise ValueError(f"backend {chosen!r}: expected one of {', '.join(knobs.BACKENDS)}")
    return chosen


def _heap_size(asked: int, on_gpu: bool, local_ranks: int) -> int:
    """Return the bytes per rank. Raise if this machine has too little for all its ranks."""
    nbytes = asked or knobs.heap_size.get() or (GPU_HEAP if on_gpu else _CPU_HEAP)
    if not isinstance(nbytes, int) or nbytes < 1 << 16:
        raise ValueError(f"heap_size must be at least {1 << 16} bytes, got {nbytes!r}")
    if on_gpu:
        # On AMD Triton takes offsets in storage below 2 GiB as 32-bit numbers, which cuts the
        # distance to a peer's heap (`sundog isa` marks it).
        return max(nbytes, 2 << 30) if torch.version.hip else nbytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes * local_ranks > memory:
        raise ValueError(
            f"heap_size {nbytes:,} for {local_ranks} ranks is {nbytes * local_ranks:,} bytes, and "
            f"this machine has {memory:,}. Ask for at most {memory // local_ranks:,} each."
        )
    return nbytes


def _seconds(timeout: float) -> float:
    if not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise ValueError(f"timeout must be >= 0 seconds (0 uses SUNDOG_TIMEOUT), got {timeout!r}")
    return timeout or knobs.timeout.get()
