"""Try the algorithms that the model can't tell apart, in the first calls, if the user allows it.

    sundog.run(train, 8, tune="online")      # or sundog.init(tune="online")

Where nothing was measured, `algo="auto"` takes what the model expects to be fastest. With
tune="online" each algorithm that the model rates within 10 % of that runs some of the first calls
of a problem, and is timed. Then all ranks compare: the slowest rank of each call counts, and the
fastest algorithm stays. Ranks wait for each other before and after such a call. Results are the
same, since auto only chooses among algorithms with the same bits.

Asynchronous calls and those of a capture, which do not wait, are not used for this.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .op import World
from .select import choose

if TYPE_CHECKING:
    from .dispatch import Request

CALLS = 4  # of each algorithm; the first one compiles and does not count


def check_tune(tune: str, link: str = "") -> None:
    if tune not in ("", "online"):
        raise ValueError(f"tune must be 'online' or '', got {tune!r}")
    if tune and link:
        raise ValueError(
            f"tune={tune!r} compares the times of all ranks, but with link={link!r} rank 0 alone "
            "is measured: leave one of them out"
        )


def run_online(request: Request) -> Any:
    """Run the algorithm whose turn it is. The algorithm's name is part of its plan's key."""
    world, options = request.world, request.options
    tryout = _tryout(request)
    if options.explain and world.rank == 0:
        print(tryout.explain())
    is_tried = not (tryout.is_over or options.async_op or world.is_capturing)
    algo = tryout.algo if is_tried or tryout.is_over else tryout.algos[0]  # which was planned first
    planned = dataclasses.replace(request, options=options._replace(algo=algo, explain=False))
    request.may_repeat = tryout.is_over
    result = tryout.run(world, planned.run_planned) if is_tried else planned.run_planned()
    request.cached = planned.cached
    return result


def _tryout(request: Request) -> Tryout:
    world, tryouts = request.world, request.world._plans.tryouts
    key = (request.op, request.problem, request.staged)
    if key not in tryouts:
        choice = choose(
            request.op, request.problem, world._target, world.num_sms, None, world.backend,
            request.ordinary(), world.owns_gpu,
        )  # fmt: skip
        tryouts[key] = Tryout(choice.near or (choice.algo,), choice.why)
    found: Tryout = tryouts[key]
    return found


@dataclass
class Tryout:
    """The first calls of a problem: which algorithm each one runs, and how long it took."""

    algos: tuple[str, ...]
    why: str  # before it was tried
    seconds: dict[str, list[float]] = field(default_factory=dict)
    medians: dict[str, float] = field(default_factory=dict)  # at the end, of all ranks
    clock: Callable[[], float] = time.perf_counter

    @property
    def is_over(self) -> bool:
        return len(self.algos) < 2 or bool(self.medians)

    @property
    def algo(self) -> str:
        """The algorithm that the next call runs."""
        if self.is_over:
            return min(self.algos, key=lambda algo: self.medians.get(algo, 0.0))
        calls = sum(map(len, self.seconds.values()))
        return self.algos[calls % len(self.algos)]  # interleaved, so that noise hits all of them

    def run(self, world: World, call: Callable[[], Any]) -> Any:
        """Make this call and note its time. After the last one all ranks choose."""
        algo = self.algo
        world.barrier()
        world.synchronize()  # so that no earlier work is in its time
        begin = self.clock()
        result = call()
        world.synchronize()
        self.seconds.setdefault(algo, []).append(self.clock() - begin)
        if sum(map(len, self.seconds.values())) == CALLS * len(self.algos):
            self._end(world)
        return result

    def _end(self, world: World) -> None:
        everyone = world.exchange(self.seconds, "times of algorithms")
        for algo in self.algos:
            calls = list(zip(*(each[algo] for each in everyone), strict=True))
            self.medians[algo] = statistics.median(max(ranks) for ranks in calls[1:])

    def explain(self) -> str:
        if not self.medians:
            return f"{self.why}; tried online: {', '.join(self.algos)}, this call {self.algo}"
        times = ", ".join(f"{algo} {1e6 * s:.1f} us" for algo, s in self.medians.items())
        return f"{self.why}; tried online, {CALLS - 1} calls each: {times}; {self.algo} stays"
