"""A tuning farm, with a stand-in for Ray that runs an actor's calls where they are made.

Ray itself is no part of the test set: `python -m benchmarks.farm` runs on a real cluster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sundog.dataset.hardware import versions
from sundog.dataset.reader import read
from sundog.dataset.validate import validate
from sundog.errors import SundogError
from sundog.tools._pool import Failure, Worker, finished, serve
from sundog.tools.tune import farm
from sundog.tools.tune.compile_configs import Compilers
from sundog.tools.tune.farm import Farm, FarmActor, FarmWorker, different, gpu_in_use
from sundog.tools.tune.measure import TunePlace, Where, serve_world, time_on_gpu
from sundog.tools.tune.tune import _where, tune

from .test_tune_run import ON_SIM, fake_clock, rows

pytestmark = pytest.mark.sim_only
OP = "tools.tune.toy_op"


NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H200": 1.0}},
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}},
    {"Alive": True, "Resources": {"CPU": 8.0}},
    {"Alive": False, "Resources": {"GPU": 8.0, "accelerator_type:B200": 1.0}},
    {"Alive": True, "Resources": {"GPU": 1.0, "accelerator_type:H200": 1.0}},
]


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class _Actor:
    """Calls are made at once; what they raise comes with `get`."""

    def __init__(self, ray: _Ray, made: Any) -> None:
        self._ray, self._made = ray, made

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._ray.call(self._made, name, given))


class _Ray(ModuleType):
    """What the farm uses of Ray."""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def __init__(self) -> None:
        super().__init__("ray")
        self.killed = 0
        self.calls = 0
        self.dies: dict[Any, float] = {}  # tasks, and how often their worker dies for good
        self.tasks: list[Any] = []
        self.poison = 0  # the number of a task whose worker always dies
        self.hangs = False
        self.options: dict[str, Any] = {}

    def init(self, address: str | None, **options: Any) -> None:
        if address == "nowhere":
            raise ConnectionError("could not connect\nand more")
        if address == "older":
            raise RuntimeError("Version mismatch: The cluster has:\n Ray: 2.9\nThis has:\n Ray: 3")

    def shutdown(self) -> None:
        self.ended = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    available_resources = cluster_resources

    def nodes(self) -> list[dict[str, Any]]:
        return NODES

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options = options
        return lambda kind: SimpleNamespace(remote=lambda *a: _Actor(self, kind(*a)))

    def call(self, made: Any, name: str, given: tuple) -> Callable[[], Any]:
        self.calls += name == "run"
        if name == "run" and self._dies(given[0]):
            return _raising(RayError("the actor died\nits trace"))
        value = getattr(made, name)(*given)
        return lambda: value

    def _dies(self, task: Any) -> bool:
        self.tasks += [] if task in self.tasks else [task]
        left = self.dies.get(task, 0)
        self.dies[task] = left - 1
        return left > 0 or self.tasks.index(task) + 1 == self.poison

    def get(self, reply: Callable[[], Any], timeout: float | None = None) -> Any:
        return reply()

    def wait(self, replies: list, **options: Any) -> tuple[list, list]:
        return ([], replies) if self.hangs else (replies[:1], replies[1:])

    def kill(self, actor: Any) -> None:
        self.killed += 1


def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    made = _Ray()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def test_a_farm_writes_what_the_pool_writes(ray: _Ray, tmp_path: Path) -> None:
    """The same rows and graphs; this process wrote them all."""
    options: dict[str, Any] = {"world": 2, "budget": 6, "search": "random", "targets": ["sm_90"]}
    (local,) = tune(OP, log=str(tmp_path / "local"), **options)
    (farmed,) = tune(OP, log=str(tmp_path / "farm"), farm="head", **options)
    assert ray.options == {"max_restarts": -1, "max_task_retries": 2, "num_cpus": 1}
    assert (farmed.tried, farmed.failed, farmed.run_id) == (6, 0, local.run_id)
    kept = ("config", "status", "ir_id")
    found = [
        sorted(tuple(row[k] for k in kept) for row in rows(str(tmp_path / name)))
        for name in ("local", "farm")
    ]
    assert found[0] == found[1]
    assert validate(read(str(tmp_path / "farm"))).damage == []
    assert ray.killed >= 1, "its actors are given back"


def test_a_worker_that_dies_for_good_costs_its_config_alone(ray: _Ray, tmp_path: Path) -> None:
    ray.poison = 2
    base = str(tmp_path / "log")
    options: dict[str, Any] = {"world": 2, "search": "random", "targets": ["sm_90"], "log": base}
    (tuned,) = tune(OP, budget=4, farm="head", **options)
    assert (tuned.tried, tuned.failed) == (4, 1)
    assert tuned.error == "its worker died 3 times: the actor died"
    (again,) = tune(OP, budget=6, farm="head", resume=True, **options)
    assert (again.tried, again.run_id) == (6, tuned.run_id)
    ended = [row for row in rows(base) if row["status"] == "compiled"]
    assert len({row["config"] for row in ended}) == len(ended), "each once, also after --resume"


def _actor(ray: _Ray) -> FarmActor:
    about = {"host": "h", "versions": versions(), "gpu_used": 0, "gpu_total": 0}
    made = SimpleNamespace(about=lambda: about, run=lambda task: task)
    return FarmActor(ray, lambda: _Actor(ray, made), lambda _: None)


def test_a_worker_that_starts_too_late_is_an_error(ray: _Ray) -> None:
    """The room is that of the moment, before the worker's own share is free again."""
    ray.get = lambda *given, **more: _raising(GetTimeoutError("late"))()  # type: ignore[method-assign]
    ray.available_resources = lambda: {"CPU": 1.0 + ray.killed}  # type: ignore[method-assign]
    said = r"within 120 s: the cluster has .*3.0.*'CPU': 1.0} of that is free.*busy.*resume the run"
    with pytest.raises(SundogError, match=said):
        FarmWorker(_actor(ray), 5).submit("a task")
    assert ray.killed == 1


def test_a_config_that_hangs_ends_its_worker(ray: _Ray) -> None:
    now = [0.0]
    worker = FarmWorker(_actor(ray), 5, clock=lambda: now[0])
    worker.submit("a task")
    ray.hangs = True
    assert worker.answer() is None
    now[0] = 6
    assert worker.answer() == Failure("timeout", "no answer after 5 s: it hangs, and was ended")
    assert ray.killed == 1
    ray.hangs = False
    worker.submit("another")
    assert worker.wait() == "another"


def test_a_config_that_waits_for_its_turn_does_not_count_as_hung(ray: _Ray) -> None:
    """Two calls of one actor: the first one hangs and costs its own config alone."""
    now = [0.0]
    actor = _actor(ray)
    first, second = (FarmWorker(actor, 5, clock=lambda: now[0]) for _ in range(2))
    first.submit("hangs")
    second.submit("waits")
    ray.hangs = True
    now[0] = 6
    assert second.answer() is None, "its time has not begun"
    assert first.answer() == Failure("timeout", "no answer after 5 s: it hangs, and was ended")
    assert (ray.killed, ray.calls) == (1, 3), "what waited was given to the next actor"
    now[0] = 10
    assert second.answer() is None, "its time began when the first one ended"
    ray.hangs = False
    assert second.wait() == "waits"


def test_a_config_that_ends_its_process_costs_no_other_config(ray: _Ray) -> None:
    """Both calls of an actor are lost when it dies; then each is tried alone."""
    ray.dies = {"poison": 2, "innocent": 1}
    actor = _actor(ray)
    first, second = (FarmWorker(actor, 5) for _ in range(2))
    first.submit("poison")
    second.submit("innocent")
    answers = {task: reply for _ in range(8) for _, task, reply in finished([first, second])}
    assert answers == {
        "poison": Failure("error", "its worker died 3 times: the actor died"),
        "innocent": "innocent",
    }
    assert actor.depth == 2, "and then two again"


def test_a_compiler_has_its_next_config_before_it_answers(ray: _Ray, tmp_path: Path) -> None:
    compilers = Farm("head").compilers({}, "sm_90", str(tmp_path / "log"), 5, 1)
    assert (compilers.processes, len(compilers.workers)) == (2, 4), "of 3 CPUs one is reserved"
    assert compilers.progress == ", 0 configs at 2 compilers on head"


def test_gpus_of_each_kind_measure_for_a_target_of_their_own(
    ray: _Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a measurer that dies comes again on a GPU of its kind: Ray gets its name."""
    monkeypatch.setattr(farm, "_Measurer", lambda *given: SimpleNamespace(about=dict))
    given: Any = [], TunePlace("virtual"), time_on_gpu, 5.0
    found = []
    for workers in Farm("head").measurers(*given, on_gpu=True):
        found.append((len(workers), ray.options["num_gpus"], ray.options["accelerator_type"]))
    assert found == [(3, 1, "H200"), (1, 1, "A100")], "a node that is gone does not count"
    by_made_up_clock = [len(workers) for workers in Farm("head").measurers(*given, on_gpu=False)]
    assert by_made_up_clock == [3, 1], "on the GPUs that a cluster says it has, too"
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])
    (alone,) = Farm("head").measurers(*given, on_gpu=False)
    assert (len(alone), ray.options["num_gpus"]) == (1, 0)


def test_compilers_leave_a_cpu_to_each_measurer(
    ray: _Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts no actor for which no CPU is left: the run would end after two minutes."""
    asked: list[int] = []

    def measurers(self: Farm, found: Any, place: Any, timer: Any, *_: Any) -> Any:
        yield [Worker(serve_world(found, place, timer), 60) for _ in range(2)]

    def compilers(self: Farm, *given: Any) -> Any:
        asked.append(given[-1])
        return Compilers([])

    monkeypatch.setattr(Farm, "measurers", measurers)
    monkeypatch.setattr(Farm, "compilers", compilers)
    options: dict[str, Any] = {"place": ON_SIM, "timer": fake_clock, "log": str(tmp_path / "log")}
    (tuned,) = tune(OP, world=2, budget=4, farm="head", **options)
    assert (tuned.tried, tuned.failed, asked) == (4, 0, [2])


def test_measurers_that_differ_are_not_one_target() -> None:
    def on(target: str) -> Worker:
        return Worker(serve(lambda task: Where(target, "sm_90", 132, {})), 5)

    workers = [on("nvidia-h200"), on("nvidia-h100")]
    with pytest.raises(SundogError, match=r"nvidia-h200, sm_90, 132 SMs.* and nvidia-h100, sm_90"):
        _where(workers)
    for worker in workers:
        worker.close()


def test_bad_farms_are_refused_with_both_sides_facts(
    ray: _Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SundogError, match=r"nowhere: no Ray cluster answers .* there.*not connect"):
        Farm("nowhere")
    begin = time.monotonic()
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(SundogError, match=f"{address}: no Ray cluster answers .* refused"):
            Farm(address)
    assert time.monotonic() - begin < 30, "Ray, or its client, tries for minutes"
    with pytest.raises(SundogError, match=r"other versions.* cluster has: Ray: 2.9 This .* Ray: 3"):
        Farm("older")
    with pytest.raises(SundogError, match=r"triton 0\.1 here, .* there"):  # one that comes again
        farm._Compiler({}, "sm_90", {**versions(), "triton": "0.1"})
    mine = {"python": "3.11.7", "torch": "2.13.0", "triton": "3.7.1", "sundog": "0.1.0"}
    about = {"host": "node7", "versions": {**mine, "triton": "3.6.0"}}
    text = different(mine, about)
    assert "node7" in text
    assert "triton 3.7.1 here, 3.6.0 there" in text
    assert "torch" not in text
    assert different(mine, {"host": "node7", "versions": mine}) == ""
    used = {"host": "node7", "gpu_used": 50_000_000, "gpu_total": 100_000_000}
    assert "50,000,000 of 100,000,000 bytes are in use" in gpu_in_use(used)
    assert gpu_in_use({**used, "gpu_used": 9_000_000}) == ""
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(SundogError, match=r"pip install 'ray\[client\]'"):
        Farm("local")
