"""Plans: ops bound to a problem; found again by what they depend on; made and evicted by all alike.

Making a plan is where ranks agree. One exchange compares what they ask for and where their tensors
are, and says which plans may go: those that no rank's graph holds, in the order in which rank 0
used them last. So every rank evicts the same ones, and their heaps stay the same.

Before the exchange each rank waits for its streams. After it nothing runs that uses a plan of this
world, on any rank: no kernel ends before its peers are done with this rank's memory. So what is
evicted may be handed out again at once.
"""

from __future__ import annotations

import operator
import weakref
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..errors import OutOfHeap, RankMismatch, WaitTimeout, by_rank

if TYPE_CHECKING:
    from ..world.streams import Use
    from ..world.tensors import Symmetric
    from ..world.waits import Progress, Waits
    from ..world.world import World

__all__ = [
    "CachedCall", "NoFormula", "Plan", "Plans", "StagedTensor", "Staging", "agree", "barrier_flags",
    "check_grad", "check_plain",
]  # fmt: skip

_MOST_REPEATS = 256


@dataclass(frozen=True)
class Plan:
    """An op bound to a problem and a config, its workspaces allocated. Calling it only launches."""

    world: World
    problem: Any
    config: Any
    workspaces: tuple[torch.Tensor, ...]
    launch: Callable[..., Any]
    used: list[Use] = field(default_factory=list, repr=False, compare=False)  # the latest one

    def __call__(self, *tensors: torch.Tensor) -> Any:
        check_grad("a plan", *tensors)
        self.world._check_open()
        self.world._streams.mark_used(self)
        return self.launch(*tensors)

    def free(self) -> None:
        """Give the workspaces back, on every rank at the same place in its program.

        Refused while a captured graph uses them: graph.free() comes first.
        """
        self.world.barrier()  # a peer's kernel may still read them when this rank's has ended
        for tensor in self.workspaces:
            self.world.free(tensor)


@dataclass(eq=False)
class Staging:
    """Heap memory through which the calls on one stream copy a tensor, one call after the other.

    All plans of the stream share it: a call is done with it when its kernel has ended.
    """

    buffer: torch.Tensor
    offset: int


@dataclass(eq=False)
class StagedTensor:
    """The part of a staging buffer that has the shape of a call's tensor."""

    staging: Staging
    shape: tuple[int, ...]
    dtype: torch.dtype
    _view: torch.Tensor | None = None
    _buffer: torch.Tensor | None = None

    def view(self) -> torch.Tensor:
        if self._view is None or self._buffer is not self.staging.buffer:  # it has grown
            self._buffer = self.staging.buffer
            nbytes = torch.Size(self.shape).numel() * self.dtype.itemsize
            self._view = self._buffer[:nbytes].view(self.dtype).view(self.shape)
        return self._view


@dataclass(eq=False)
class CachedCall:
    """A plan, and how the user's tensors get to it: as they are, or through a staging buffer."""

    op: str
    plan: Plan
    why: Callable[[], str] = lambda: ""
    is_flat: bool = False  # the kernels take tensors of one dimension
    in_place: tuple[int, ...] = ()  # which tensors peers reach where the user put them
    staged: dict[int, StagedTensor] = field(default_factory=dict)
    places: set[tuple] = field(default_factory=set)  # of those in place, that ranks have compared
    offsets: list[int] = field(default_factory=list)  # what it holds of the heap
    key: Hashable = None  # under which it is found
    serial: int = 0  # the same on every rank
    used: int = 0  # the number of its latest call

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch. The last tensor is the output."""
        if self.is_flat:
            x, out = tensors  # one by one: this is faster than a loop
            tensors = x if x.dim() == 1 else x.view(-1), out if out.dim() == 1 else out.view(-1)
        if not self.staged:
            self.plan.launch(*tensors)
            return
        passed, last = list(tensors), len(tensors) - 1
        for place, staged in self.staged.items():
            passed[place] = staged.view()
            if place != last:  # detached: else the buffer would keep every call's autograd graph
                passed[place].copy_(tensors[place].detach())
        self.plan.launch(*passed)
        if last in self.staged:
            tensors[last].detach().copy_(passed[last])  # also if it is a parameter

    def __repr__(self) -> str:
        return f"{self.op} of {self.plan.problem} with {self.plan.config}"


class Plans:
    """One rank's cached plans. At most `max_plans` stay, besides those that graphs hold."""

    def __init__(
        self, world: World, memory: Symmetric, waits: Waits, progress: Progress, max_plans: int
    ) -> None:
        self.heap = memory.heap
        self._memory = memory
        self._waits = waits
        self._expired = waits.word
        self._words = progress.words
        self._progress = progress
        self.max_plans = max_plans
        self.repeats: dict[tuple, Any] = {}  # calls with these very tensors (dispatch.py)
        self.agreed: tuple | None = None  # the problem and config that ranks have just compared
        self.count = 0  # calls so far
        self._world: World = weakref.proxy(world)  # which has this: no cycle keeps the heap
        self._calls: dict[Hashable, CachedCall] = {}
        self._staging: dict[tuple[int, str], Staging] = {}
        self._retired: list[tuple[Staging, set[int]]] = []  # that captured calls have addresses of
        self._pinned: set[int] = set()  # serials of plans that a graph of some rank holds
        self._evictable: list[int] = []  # the others, the least recently used first
        self.made = 0  # plans so far; equal on all ranks

    def __iter__(self) -> Any:
        return iter(self._calls.values())

    def find(self, key: Hashable) -> CachedCall | None:
        return self._calls.get(key)

    def begin(self, call: CachedCall) -> None:
        """Note that this rank calls it now. Every call comes here."""
        if self._expired.value:
            self.raise_if_expired()
        self.count = call.used = count = self.count + 1
        words = self._words  # COUNT and SERIAL of world/waits.py
        words[0] = count
        words[1] = call.serial

    def raise_if_expired(self) -> None:
        """Raise WaitTimeout if a wait of this rank expired, each time until the world recovers."""
        if self._waits.word.value:
            self._world._raise_if_expired()
            error = self._waits.error  # it was caught; without a barrier this call would go wrong
            if error is not None:
                raise WaitTimeout(str(error), error.record)

    def name_of(self, serial: int) -> str:
        """Name a plan for a message."""
        found = [call for call in self if call.serial == serial]
        return repr(found[0]) if found else f"a plan that is gone (number {serial})"

    def remember(self, identity: tuple, repeat: Any) -> None:
        if len(self.repeats) >= _MOST_REPEATS:
            self.repeats.clear()
        self.repeats[identity] = repeat

    def plan(
        self, key: Hashable, op: str, asked: str, build: Callable[[], Plan], more: Any = None,
        compare: Callable[[list[Any]], None] = lambda everyone: None,
    ) -> Plan:  # fmt: skip
        """The plan that was made for this key, or a new one if all ranks ask for the same.

        `compare` gets every rank's `more`, and raises if they do not fit.
        """
        self._world._streams.mark_captured()
        call = self.find(key)
        if call is None:
            compare(self.agree(op, asked, more))
            call = self.make(key, lambda: CachedCall(op, build()))
        self._world._streams.mark_captured(call)
        self.begin(call)
        return call.plan

    # where ranks agree

    def agree(self, op: str, asked: str, more: Any = None) -> list[Any]:
        """Compare what the ranks ask for: a collective on the host. Every rank's `more`."""
        self.raise_if_expired()
        self._world._refuse_in_capture(
            "this call", "plan made during capture", "Call it once before, with such tensors."
        )
        # This rank's streams are idle then: what all ranks evict is nobody's any more.
        self._world.synchronize()
        place = self._progress.place
        mine = [asked, self._idle_serials(), self.made, self.max_plans, more, place]
        everyone = self._world._compare(mine, f"plan of {op}")
        if len({each[0] for each in everyone}) > 1:
            text = by_rank([each[0] for each in everyone], self._world._ranks)
            raise RankMismatch(f"{op}: ranks passed different arguments:\n{text}")
        self._progress.share([each[5] for each in everyone], self._world._compare)
        self._words = self._progress.words
        self._settle(everyone)
        while self._evictable and len(self._calls) >= everyone[0][3]:
            self._evict(1)
        return [each[4] for each in everyone]

    def make(self, key: Hashable, build: Callable[[], CachedCall]) -> CachedCall:
        """Build a call that all ranks have agreed on; evict others as long as there is no room."""
        count = 1
        while True:
            try:
                call = self._allocating(build)
                break
            except OutOfHeap:
                if not self._evict(count):
                    raise
                count *= 2
        self.made += 1
        call.serial, call.key = self.made, key
        self._calls[key] = call
        return call

    def _allocating(self, build: Callable[[], CachedCall]) -> CachedCall:
        """Plans outlive the current scope. If building fails on every rank, free its memory."""
        with self._memory.own_scope() as offsets:
            try:
                call = build()
            except (OutOfHeap, RankMismatch, ValueError):
                self._memory.end_scope()
                self._free_unused()
                raise
        call.offsets = offsets
        return call

    def free(self) -> None:
        """Evict all that no graph holds: a collective on the host."""
        self._world.synchronize()
        mine = ["", self._idle_serials(), self.made]
        self._settle(self._world._compare(mine, "freeing of plans"))
        self._evict(len(self._calls))

    def clear(self) -> None:
        """Forget all: plans know their world, and would keep it and its heap."""
        self._calls.clear()
        self.repeats.clear()
        self._staging.clear()
        self._retired.clear()

    # memory

    def stage(self, tensor: torch.Tensor, role: str) -> StagedTensor:
        """A place on the heap for a tensor of the calls on this stream; `role`: in or out."""
        key = (self._world.stream_number, role)
        nbytes = tensor.numel() * tensor.itemsize
        staging = self._staging.get(key)
        if staging is None or staging.buffer.numel() < nbytes:
            staging = self._staging[key] = self._grown(staging, nbytes, f"staging.{role}")
        return StagedTensor(staging, tuple(tensor.shape), tensor.dtype)

    def _grown(self, old: Staging | None, nbytes: int, name: str) -> Staging:
        """A larger buffer, which the calls that had the old one use too from now on."""
        buffer = self._memory.allocate(_step(nbytes), torch.uint8, name, "data", scoped=False)
        offset = self._memory.block_of(buffer).offset
        if old is None:
            return Staging(buffer, offset)
        users = {call.serial for call in self if old in _stagings(call)}
        self._let_go(Staging(old.buffer, old.offset), users)
        old.buffer, old.offset = buffer, offset
        return old

    def _let_go(self, staging: Staging, users: set[int]) -> None:
        holders = users & self._pinned
        if holders:
            self._retired.append((staging, holders))
        else:
            self._memory.free(staging.offset)

    def _evict(self, count: int) -> bool:
        """The least recently used ones. False if there was none."""
        serials, self._evictable = set(self._evictable[:count]), self._evictable[count:]
        for call in [call for call in self if call.serial in serials]:
            self._remove(call)
        self._free_unused()
        return bool(serials)

    def _remove(self, call: CachedCall) -> None:
        del self._calls[call.key]
        self.repeats.clear()
        for offset in reversed(call.offsets):
            self._memory.free(offset)

    def _free_unused(self) -> None:
        """Free the staging buffers that no call uses."""
        used = {staged.staging for call in self for staged in call.staged.values()}
        for key, staging in list(self._staging.items()):
            if staging not in used:
                del self._staging[key]
                self._let_go(staging, set())

    def _idle_serials(self) -> bytes:
        """Of the plans that no graph of this rank holds, the least recently used first.

        As bytes: one by one, hundreds of numbers would take most of the time of an exchange.
        """
        held = self._world._streams.captured_calls()
        calls = sorted(self, key=_last_use)
        return array("q", [call.serial for call in calls if call not in held]).tobytes()

    def _settle(self, everyone: list[Any]) -> None:
        """Which plans may go: those that every rank would let go, in rank 0's order."""
        first, *others = [array("q", each[1]) for each in everyone]
        common = set(first).intersection(*others)
        self.made = max(each[2] for each in everyone)
        self._evictable = [serial for serial in first if serial in common]
        self._pinned = {call.serial for call in self} - common
        retired, self._retired = self._retired, []
        for staging, holders in retired:
            self._let_go(staging, holders)


_last_use = operator.attrgetter("used")


def _stagings(call: CachedCall) -> list[Staging]:
    return [staged.staging for staged in call.staged.values()]


def _step(nbytes: int) -> int:
    """Rounded up to a quarter of a power of two: few sizes, and little that is not used."""
    unit = max(1 << max(nbytes.bit_length() - 3, 0), 256)
    return -(-nbytes // unit) * unit


# what every plan checks


def check_plain(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError if a tensor's memory is not what its shape, strides and dtype say."""
    found = _unusual(tensor)
    if found is not None:
        what, instead = found
        raise ValueError(f"{op}: {name} is {what}; {instead.format(name)}")


def _unusual(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is, and what to do about it. First what would break the questions below."""
    if hasattr(tensor, "to_local"):
        return "a DTensor", "pass {0}.to_local(), which is this rank's part"
    if tensor.is_nested:
        return "a nested tensor", "pass {0}.values(), or each of its tensors"
    if tensor.layout != torch.strided:
        return f"not dense ({tensor.layout})", "pass {0}.to_dense()"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})", "pass {0}.int_repr(), and the scale on its own"
    if tensor.is_meta:
        return "on the meta device, without data", "pass a tensor on this rank's device"
    if tensor.is_conj():
        return "a view that is conjugated when it is read", "pass {0}.resolve_conj()"
    if tensor.is_neg():
        return "a view that is negated when it is read", "pass {0}.resolve_neg()"
    return None


class NoFormula(ValueError):
    """A tensor requires grad, and this call would lose its gradient.

    `world.all_reduce(x)` goes on from here to the op of torch that has a formula (torch/calls.py).
    """


def check_grad(op: str, *tensors: Any, name: str = "") -> None:
    """Raise where a gradient would be lost: kernels have no backward formula.

    Inside an autograd.Function grad mode is off, so an op can be a part of one.
    """
    with torch._C.DisableTorchFunction():  # on `virtual` each look would be asked for its reason
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            called = name or f"argument {place}"
            if is_functorch_wrapped_tensor(tensor):
                raise ValueError(
                    f"{op}: {called} is a tensor of torch.func.grad, vmap or another transform, "
                    f"and {op} has no formula for them. Call it outside the transformed function."
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NoFormula(
                    f"{op}: {called} requires grad, and {op} has no backward formula: the gradient "
                    f"would be lost. Call it inside `with torch.no_grad():`, or pass "
                    f"{name or 'the tensor'}.detach()."
                )


def agree(world: World, op: str, problem: Any, config: Any, refused: str | None) -> None:
    """Compare problem and config on all ranks: a collective on the host.

    `refused` is what `valid` says. Compare before raising, so that the error names the rank that
    disagrees. A call of the op (dispatch.py) has compared them already.
    """
    if world._plans.agreed != (problem, config):
        everyone = world._compare(f"{problem}, {config}", f"plan of {op}")
        if len(set(everyone)) > 1:
            text = by_rank(everyone, world._ranks)
            raise RankMismatch(f"{op}: ranks passed different arguments:\n{text}")
    if refused is not None:
        raise ValueError(f"{op}: {refused}")


def barrier_flags(world: World, op: str, programs: int, *names: str) -> list[torch.Tensor]:
    """Allocate flags for barriers of the programs with one number on all ranks, and their epochs.

    A kernel gives `flags + program * size` to signal.barrier_ranks.
    """
    flags = [world.signals((programs, world.size), f"{op}.{name}") for name in names]
    epochs = world.signals(programs, f"{op}.epochs")
    world.barrier()  # everybody's flags are zero before the first signal
    return [*flags, epochs]
