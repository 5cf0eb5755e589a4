"""The call path that every collective and every fused op takes.

Choose an algorithm, agree once, stage what must be symmetric, and launch. When the same call comes
again, only launch.

An algorithm's file says which of its tensors peers touch: SYMMETRIC = ("x",), ("out",) or both.
If a user's tensor is not on the heap, but must be, it goes through a buffer that is (plans.py). The
next call on the stream may reuse that buffer, because no kernel ends before its peers are done
with this rank's tensors.

A plan's key is everything that it depends on, including the stream: one plan runs on one stream at
a time. Ranks agree when a plan is made; a disagreement is reported before anything is allocated. A
tensor that peers reach must have the same offset in every rank's heap. Ranks compare offsets in
the first call with each, but not in a capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .op import Plan, check_grad, check_plain

if TYPE_CHECKING:
    from ..world.world import World
    from .plans import Plans, StagedTensor

ASYNC_STREAM = 1
_USUAL = (None, False, False)  # options after `algo`
_NONE: dict[str, int] = {}
_WHERE = ("on the heap", "an ordinary tensor")


class CallOptions(NamedTuple):
    """What every op takes besides its tensors."""

    algo: str = "auto"
    config: Any = None
    async_op: bool = False
    explain: bool = False


@dataclass(frozen=True)
class AsyncHandle:
    """An op under way on the rank's second stream. `wait` returns its result."""

    world: World
    done: Any
    result: Any
    used: tuple[torch.Tensor, ...]  # memory that must not be reused before the op is done

    def wait(self) -> Any:
        """Order what this rank launches from now on after the op. The host does not wait."""
        self.world.wait_event(self.done)
        return self.result


@dataclass(eq=False)
class CachedCall:
    """A plan, and how the user's tensors reach it: as they are, or through a staging buffer."""

    op: str
    plan: Plan
    why: Callable[[], str] = lambda: ""
    is_flat: bool = False  # the kernels take tensors of one dimension
    in_place: tuple[int, ...] = ()  # which of the user's tensors peers reach without a copy
    staged: dict[int, StagedTensor] = field(default_factory=dict)
    places: set[tuple] = field(default_factory=set)  # offsets of those, which ranks have compared
    offsets: list[int] = field(default_factory=list)  # what it holds of the heap
    key: Any = None  # a tuple; its last item is the stream
    serial: int = 0  # the same on every rank
    used: int = 0  # the number of its latest call

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch. The last tensor is the output."""
        if self.is_flat:
            x, out = tensors  # unrolled, which is faster than a loop
            tensors = x if x.dim() == 1 else x.view(-1), out if out.dim() == 1 else out.view(-1)
        if not self.staged:
            self.plan.launch(*tensors)
            return
        passed, last = list(tensors), len(tensors) - 1
        for place, staged in self.staged.items():
            passed[place] = staged.view()
            if place != last:  # detached, or the buffer would keep every call's autograd graph
                passed[place].copy_(tensors[place].detach())
        self.plan.launch(*passed)
        if last in self.staged:
            tensors[last].detach().copy_(passed[last])  # it may be a parameter

    def __repr__(self) -> str:
        return f"{self.op} of {self.plan.problem} with {self.plan.config}"


# the same call again


@dataclass
class _Repeat:
    """A call that was made with certain tensors."""

    call: CachedCall
    start: Callable[[], bool] | None = None  # starts its kernels, from the third time on
    is_known: bool = False

    def run(self, world: World, x: torch.Tensor, out: torch.Tensor) -> None:
        """Run it where its kernels can't just be started. Find out how to do that next time."""
        backend = world._backend
        world._streams.mark_captured(self.call)
        if self.is_known or backend.graph is not None:
            self.call.run((x, out))
        else:
            self.start = backend.relaunch(lambda: self.call.run((x, out)), (x, out))
            self.is_known = True


def repeated(
    world: World, asked: tuple, x: torch.Tensor, out: torch.Tensor | None, options: CallOptions
) -> bool:
    """Relaunch a call already made with these tensors, without its checks, which still hold.

    The checks take half of the host's time for a small op. Only calls with the usual options can be
    repeated, torch's ops among them, eager or compiled. `asked` has the op's name, its arguments
    besides tensors and options, and at the end whether `out` was made here.
    """
    if options[1:] != _USUAL or not (isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor)):
        return False
    try:
        with torch._C.DisableTorchFunction():  # on `virtual` it would check every access
            has_grad = torch.is_grad_enabled() and (x.requires_grad or out.requires_grad)
            if has_grad or x.is_neg() or out.is_neg():
                return False
            identity = identity_of(world, asked, options[0], x, out)
    except RuntimeError:  # a tensor has no address: the checks say which
        return False
    return again(world, identity, x, out)


def again(world: World, identity: tuple, x: torch.Tensor, out: torch.Tensor) -> bool:
    """Do as `repeated`, for two tensors that are neither negated nor differentiated."""
    plans = world._plans
    repeat = plans.repeats.get(identity)
    if repeat is None:
        return False
    plans.begin(repeat.call)
    if repeat.start is None or not repeat.start():
        repeat.run(world, x, out)
    return True


def identity_of(world: World, asked: tuple, algo: str, x: torch.Tensor, out: torch.Tensor) -> tuple:
    """Return what a call's plan and kernels depend on, and which allocations are live.

    Only contiguous tensors come to a plan. An `out` that was made here can differ only in its
    address. Nothing more is read: after other code, whose data is in the caches, each costs 0.3 us.
    """
    key = (
        asked, algo, x.data_ptr(), out.data_ptr(), x.shape, x.is_contiguous(), x.dtype, x.device,
        world._backend.stream_number, world._heap.num_calls, world.kernel_mode,
        forward_ad._current_level,
    )  # fmt: skip
    if asked[-1]:
        return key
    return (*key, out.shape, out.is_contiguous(), out.dtype, out.device)


# a call


def call(
    world: World, op: str, problem: Any, tensors: dict[str, torch.Tensor], options: CallOptions,
    asked: tuple = (), is_flat: bool = True,
) -> Any:  # fmt: skip
    """Run an op on tensors of the problem's sizes, the output last, with a cached plan if any.

    `asked` is for `repeated`, and empty if the op can't be repeated. `is_flat`: its kernels take
    tensors of one dimension.
    """
    request = Request(world, op, problem, tensors, options, is_flat)
    if options.async_op:
        return on_stream(world, ASYNC_STREAM, request.run, next(iter(tensors.values())))
    result = request.run()
    is_real = not any(each.is_complex() for each in tensors.values())  # it may be a conjugated view
    if asked and options[1:] == _USUAL and is_real and request.may_repeat:
        with torch._C.DisableTorchFunction():
            identity = identity_of(world, asked, options[0], *tensors.values())
        world._plans.remember(identity, _Repeat(request.cached))
    return result


def on_stream(
    world: World, number: int, run: Callable[[], Any], *used: torch.Tensor
) -> AsyncHandle:
    """Call `run` on another stream of this rank, after everything on the current one."""
    before = world.record_event()
    with world.stream(number):
        world.wait_event(before)  # after what wrote the inputs and what last used the output
        world._streams.mark_captured()
        result = run()
        return AsyncHandle(world, world.record_event(), result, used)


@dataclass
class Request:
    """One call of an op, from its arguments to its launch."""

    world: World
    op: str
    problem: Any
    tensors: dict[str, torch.Tensor]
    options: CallOptions
    is_flat: bool
    may_repeat: bool = True  # with the same algorithm

    def run(self) -> torch.Tensor:
        self._check()
        if self.world.tune and self.options[:2] == ("auto", None):
            from .online import run_online  # only if the user allows it

            return run_online(self)
        return self.run_planned()

    def run_planned(self) -> torch.Tensor:
        world, plans = self.world, self.world._plans
        key = (self.op, self.problem, self.options[:2], self.staged, world.stream_number)
        world._streams.mark_captured()
        found = plans.find(key)
        self.cached = found or self._make(plans, key)
        if self.options.explain and world.rank == 0:
            print(self.cached.why())
        if found and not world.is_capturing:
            self._agree_place(found)
        world._streams.mark_captured(self.cached)
        plans.begin(self.cached)
        self.cached.run([*self.tensors.values()])
        return [*self.tensors.values()][-1]

    def _check(self) -> None:
        """Raise ValueError for what no algorithm takes."""
        if not isinstance(self.options.config, Hashable):
            raise ValueError(
                f"{self.op}: config {self.options.config!r} is not a Config of one of its "
                "algorithms"
            )
        for name, tensor in self.tensors.items():
            if name == "x" and tensor.device != self.world.device:
                raise ValueError(
                    f"{self.op}: x is on {tensor.device}, but this rank is on {self.world.device}; "
                    "move it"
                )

    @functools.cached_property
    def staged(self) -> tuple[bool | None, ...]:
        """Return which tensors are not on the heap; None for one that no peer reaches."""
        touched = _reached(self.op, self.options.algo)
        return tuple(
            self._is_ordinary(name, tensor) if name in touched else None
            for name, tensor in self.tensors.items()
        )

    def _is_ordinary(self, name: str, tensor: torch.Tensor) -> bool:
        memory = self.world._memory
        if memory.find(tensor) is not None:
            return False
        self.world._check_open()  # a group that has ended: its tensors were freed with it
        memory.refuse_freed(f"{self.op}: {name}", tensor)
        return True

    def ordinary(self) -> dict[str, int]:
        """Count the bytes of the tensors that an algorithm may have to copy to the heap."""
        return {name: self.tensors[name].nbytes for name, s in self._named_staged() if s}

    def _named_staged(self) -> Iterator[tuple[str, bool | None]]:
        return zip(self.tensors, self.staged, strict=True)

    def _place(self, name: str) -> tuple:
        """Return the offset of a tensor on the heap, by which peers find theirs."""
        tensor = self.tensors[name]
        return self.world.offset_of(tensor), () if self.is_flat else tensor.stride()

    def _make(self, plans: Plans, key: tuple) -> CachedCall:
        """Agree with all ranks, then make the plan."""
        refused: str | None = None
        try:
            self.world.num_sms = self.world._streams.share()
            algo, module, config, why = decide(
                self.world, self.op, self.problem, self.options, self.ordinary()
            )
            refused = self.world._streams.refuse_wide(self.op, config)
            where = [f"{n} {_WHERE[s]}" for n, s in self._named_staged() if s is not None]
            mine = f"{self.problem}, {algo}, {config}, {', '.join(where)}"
        except ValueError as error:
            refused = str(error)
            mine = f"{self.problem}, refused: {refused}"
        on_heap = [name for name, s in self._named_staged() if s is False]
        places = {name: self._place(name) for name in on_heap}
        everyone = plans.agree(self.op, mine, places)
        if refused is not None:
            raise ValueError(refused)
        in_place = [name for name in on_heap if name in module.SYMMETRIC]
        for name in in_place:
            plans.compare_places(self.op, name, [each[name] for each in everyone])
        made = plans.make(key, lambda: self._build(plans, module, config, why))
        made.places.update((name, *places[name]) for name in in_place)
        return made

    def _build(
        self, plans: Plans, module: ModuleType, config: Any, why: Callable[[], str]
    ) -> CachedCall:
        names, last = list(self.tensors), len(self.tensors) - 1
        staged, in_place, copied = {}, [], ""
        for at, name in enumerate(names):
            if name not in module.SYMMETRIC:
                continue
            if not self.staged[at]:
                in_place.append(at)
                continue
            tensor = self.tensors[name]
            staged[at] = plans.stage(
                tensor.view(-1) if self.is_flat else tensor, "out" if at == last else "in"
            )
            copied += f"; {name} is not on the heap and goes through a copy that is"
        plans.agreed = (self.problem, config)
        try:
            plan = module.plan(self.world, self.problem, config)
        finally:
            plans.agreed = None
        return CachedCall(
            self.op, plan, lambda: why() + copied, self.is_flat, tuple(in_place), staged
        )

    def _agree_place(self, cached: CachedCall) -> None:
        """Compare the offset of a tensor that peers reach, once for each offset."""
        names = list(self.tensors)
        for name in (names[at] for at in cached.in_place):
            place = self._place(name)
            if (name, *place) not in cached.places:
                everyone = self.world._compare(place, f"place of {name}")
                self.world._plans.compare_places(self.op, name, everyone)
                cached.places.add((name, *place))


@functools.cache
def _reached(op: str, algo: str) -> frozenset[str]:
    """Return the tensors that peers touch in this algorithm, or in any that "auto" may choose.

    Other tensors may differ by rank without changing the plan: in a gather only one rank has an
    output.
    """
    from .load import algorithms  # only where a call is new

    modules = algorithms(op)
    meant = (modules[algo],) if algo in modules else modules.values()
    return frozenset(name for module in meant for name in module.SYMMETRIC)


def decide(
    world: World, op: str, problem: Any, options: CallOptions, ordinary: dict[str, int] = _NONE
) -> tuple[str, ModuleType, Any, Callable[[], str]]:
    """Choose an algorithm, its module and config; the last says why. `ordinary`: see `choose`."""
    from .load import algorithms  # only where a plan is made
    from .select import choose, config_for

    modules = algorithms(op)
    algo, config, kind = options.algo, options.config, world._target
    if algo == "auto":
        choice = choose(
            op, problem, kind, world.num_sms, config, world.backend, ordinary, world.owns_gpu
        )
        return choice.algo, modules[choice.algo], choice.config, choice.explain
    if algo not in modules:
        known = ", ".join(modules)
        raise ValueError(f"{op}: algo {algo!r} is not known; there are: auto, {known}")
    if config is None:
        config = config_for(f"{op}.{algo}", modules[algo], problem, kind, world.num_sms)
    elif not isinstance(config, modules[algo].Config):
        expected = f"{modules[algo].Config.__module__}.{modules[algo].Config.__name__}"
        raise ValueError(f"{op}: config {config!r} is not a {expected}, which algo {algo!r} takes")
    reason = modules[algo].valid(problem, config)
    if reason is not None:
        raise ValueError(f"{op}: algo {algo!r} does not take {problem} with {config}: {reason}")
    return algo, modules[algo], config, lambda: f"{op}: {algo}, as asked, with {config}"


def packed(
    world: World, op: str, x: torch.Tensor, explain: bool = False, name: str = "x"
) -> torch.Tensor:
    """Return x, or a contiguous copy: kernels read one element after another."""
    _check_tensor(op, name, x)
    if x.is_contiguous():
        return x
    if explain and world.rank == 0:
        print(
            f"{op}: {name} of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous "
            f"and goes through a copy of {x.nbytes} bytes that is"
        )
    return x.contiguous()


def check_contiguous(op: str, **tensors: torch.Tensor | None) -> None:
    for name, given in tensors.items():
        if given is None and name != "x":
            continue
        tensor = _check_tensor(op, name, given)
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                f"contiguous; pass {name}.contiguous()"
            )


def _check_tensor(op: str, name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{op}: {name} is a {type(tensor).__name__}, expected a tensor; the input comes "
            "first, then the output"
        )
    check_plain(op, name, tensor)
    check_grad(op, tensor, name=name)
    return tensor


def check_out(op: str, x: torch.Tensor, out: torch.Tensor, numel: int) -> None:
    """Check that an output holds the result, and shares no memory with the input."""
    check_contiguous(op, out=out)
    if out.numel() != numel or out.dtype != x.dtype:
        raise ValueError(
            f"{op}: out has {out.numel()} elements of {out.dtype}, expected {numel} of {x.dtype}"
        )
    if out.device != x.device:
        raise ValueError(f"{op}: out is on {out.device} and x on {x.device}; put them together")
    a, b = x.data_ptr(), out.data_ptr()
    if a < b + numel * out.itemsize and b < a + x.numel() * x.itemsize:
        raise ValueError(
            f"{op}: out shares memory with x, {abs(a - b)} bytes apart; give it memory of its own"
        )


def is_same(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether the output is the input: the very elements, by any view."""
    same_kind = (x.dtype, x.numel()) == (out.dtype, out.numel()) and out.is_contiguous()
    return same_kind and x.data_ptr() == out.data_ptr() and x.numel() > 0
