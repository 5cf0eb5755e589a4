"""The one evaluator: compile, compare, time, and write a row, whatever the outcome.

Compilers run beside the measurements, one process each, and each world that measures is a process
too, so a config that crashes or hangs costs only its own row. Idle compilers compile what the
search is likely to ask for next, then what the next search will begin with. Results of the same run
that a base already has are not measured again.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...dataset.identity import config_json
from ...dataset.recorder import Recorder, Trial
from ...errors import SundogError
from .._pool import Failure, Worker, finished
from .compile_configs import CompiledConfig, Compilers
from .measure import Measured
from .space import fields_text

_MOST_DEATHS = 5
# Samples of a first look are taken in one moment and share its noise: one read 22.1 us for a config
# that takes 18.5 (H200, all_reduce.two_shot). A config that is nearer to the best may be better.
_FIRST_LOOK_MS, _MOST_NEAR = 4e-3, 16


class Evaluator:
    """Evaluates configs. `known` has configs, as JSON, that were tried before, and their times.

    Without measurers configs are only compiled; without compilers they are compiled where they are
    measured. Each measurer has a GPU of the same kind. `job` is the number of this job. `ahead`
    returns, from the times so far, what is likely to be asked for next; `after` is what the
    following jobs begin with.
    """

    def __init__(
        self,
        recorder: Recorder,
        compilers: Compilers,
        measurers: Sequence[Worker],
        known: dict[str, float | None],
        timer: str,
        step: Callable[[], None] = lambda: None,
        job: int = 0,
    ) -> None:
        self.times: dict[Any, float | None] = {}  # of all requested configs
        self.ahead: Callable[[dict[Any, float | None]], list[Any]] = lambda times: []
        self.after: list[tuple[int, Any]] = []
        self._recorder = recorder
        self._compilers = compilers
        self._measurers = measurers
        self._known = known
        self._timer = timer
        self._step = step
        self._job = job
        self._trials: dict[Any, Trial] = {}
        self._finalists: set[Any] = set()  # that were measured again
        self._beside: set[Any] = set()  # that were measured beside busy compilers
        self.failed = 0  # of those that were tried
        self.last_error = ""  # of those
        self.writing_s = 0.0  # seconds that rows took
        self._deaths = 0  # of measurers, in a row

    def __call__(self, configs: list[Any], generation: int) -> list[float | None]:
        new = []
        for config in dict.fromkeys(configs):
            if config in self.times:
                continue
            if config_json(config) in self._known:
                self._done(config, self._known[config_json(config)])
            else:
                new.append(config)
        self._run(new, generation)
        return [self.times[config] for config in configs]

    @property
    def best(self) -> tuple[Any, float] | None:
        """The config with the least time, and its milliseconds; at the end among the finalists."""
        timed = {c: t for c, t in self.times.items() if t is not None}
        timed = {c: t for c, t in timed.items() if c in self._finalists} or timed
        if not timed:
            return None
        config = min(timed, key=lambda config: timed[config])
        return config, timed[config]

    def measure_again(self, count: int, default: Any) -> None:
        """Measure the best few again, interleaved on one GPU, which decides.

        Among them are the default, which the best is compared with, those that are about as fast,
        and the best few of those that were measured while compilers were busy, when a call took 0.5
        to 2.6 us more, whether of 14 us or of 180 (H200).
        """
        timed = {c: t for c, t in self.times.items() if t is not None}
        ranked = sorted(timed, key=lambda config: timed[config])
        near = [c for c in ranked[:_MOST_NEAR] if timed[c] < timed[ranked[0]] + _FIRST_LOOK_MS]
        beside = [config for config in ranked if config in self._beside]
        best = [*ranked[:count], *near, *beside[:count], *({default} & set(timed))]
        finalists = list(dict.fromkeys(best))
        if not self._measurers or len(finalists) < 2:
            return
        self._measurers[0].submit((self._job, finalists))
        reply = self._measurers[0].wait()
        ended = isinstance(reply, Failure)  # the process died, and any of them may have caused it
        if ended:
            reply = [Measured(failure=reply)] * len(finalists)
        for config, measured in zip(finalists, reply, strict=True):
            self._start(config, None)  # if it is from a run before this one
            self._end(config, measured)
            if measured.failure is None:
                self._finalists.add(config)
                self.times[config] = statistics.median(measured.samples_ms)
            elif not ended:  # its own failure: a config that failed once is not the best
                self.times[config] = None
                self.failed += 1

    # inside

    def _run(self, configs: list[Any], generation: int) -> None:
        to_compile, to_measure = deque[Any](), deque[Any]()
        for config in configs:
            if not self._compilers.workers:
                to_measure.append(config)
            elif (self._job, config) in self._compilers.done:  # ahead of time
                self._take(config, generation, to_measure)
            elif (self._job, config) not in self._compilers.at:
                to_compile.append(config)
        while any(config not in self.times for config in configs):
            self._hand_out(to_compile, to_measure, generation)
            for worker, task, reply in finished(self._workers()):
                if worker in self._measurers:
                    self._measured(task[1][0], reply)
                    continue
                self._compilers.done[task] = reply
                job, config = task
                if job == self._job and config in configs:
                    self._take(config, generation, to_measure)

    def _workers(self) -> list[Worker]:
        return [*self._compilers.workers, *self._measurers]

    def _hand_out(self, to_compile: deque, to_measure: deque, generation: int) -> None:
        free = [worker for worker in self._measurers if worker.task is None]
        for worker in free[: len(to_measure)]:
            config = self._start(to_measure.popleft(), generation)
            worker.submit((self._job, [config]))
        for worker in self._compilers.idle[: len(to_compile)]:
            worker.submit((self._job, self._start(to_compile.popleft(), generation)))
        idle = self._compilers.idle
        if idle and any(worker.task is not None for worker in self._measurers):
            known = {*self._compilers.done, *self._compilers.at}
            mine = [(self._job, config) for config in self.ahead(self.times)]
            likely = [task for task in [*mine, *self.after] if task not in known]
            for worker, task in zip(idle, likely, strict=False):
                worker.submit(task)

    def _start(self, config: Any, generation: int | None) -> Any:
        if config not in self._trials:
            begin = time.perf_counter()
            self._trials[config] = self._recorder.start(
                config, decorator=_text(config), generation=generation
            )
            self.writing_s += time.perf_counter() - begin
        return config

    def _write(self, config: Any, status: str, **cells: Any) -> None:
        self.last_error = cells.get("error", "") or self.last_error
        begin = time.perf_counter()
        self._trials[config].end(status, **cells)
        self.writing_s += time.perf_counter() - begin

    def _take(self, config: Any, generation: int, to_measure: deque) -> None:
        """Queue a compiled config for measuring, or write its row."""
        self._start(config, generation)
        reply = self._compilers.done[self._job, config]
        if isinstance(reply, Failure):
            self._write(config, reply.status, error=reply.error)
            self.failed += 1
            self._done(config, None)
            return
        if self._measurers:
            to_measure.append(config)
            return
        self._write(config, "compiled", **self._facts(config))
        self._done(config, None)

    def _measured(self, config: Any, reply: list[Measured] | Failure) -> None:
        measured = Measured(failure=reply) if isinstance(reply, Failure) else reply[0]
        self._end(config, measured)
        self._deaths = self._deaths + 1 if isinstance(reply, Failure) else 0
        if self._deaths == _MOST_DEATHS:
            raise SundogError(
                f"the last {_MOST_DEATHS} configs all ended the process that measures, the last "
                f"one like this: {measured.failure and measured.failure.error}. Is the GPU still "
                "there? What was measured is kept: resume the run to go on from it."
            )
        failed = measured.failure is not None
        if self._compilers.at:
            self._beside.add(config)
        self.failed += failed
        self._done(config, None if failed else statistics.median(measured.samples_ms))

    def _end(self, config: Any, measured: Measured) -> None:
        facts = self._facts(config)
        if measured.failure is not None:
            failure = measured.failure
            self._write(config, failure.status, error=failure.error, **facts)
        else:
            samples = measured.samples_ms
            self._write(config, "ok", samples=samples, timer=self._timer, **facts)

    def _facts(self, config: Any) -> dict[str, Any]:
        compiled = self._compilers.done.get((self._job, config))
        if not isinstance(compiled, CompiledConfig):
            return {}
        return {
            "compile_time_s": compiled.seconds,
            "metrics": compiled.metrics,
            "ir_id": compiled.ir_ids,
        }

    def _done(self, config: Any, milliseconds: float | None) -> None:
        self.times[config] = milliseconds
        self._step()


def _text(config: Any) -> str:
    return fields_text(config) if dataclasses.is_dataclass(config) else str(config)
