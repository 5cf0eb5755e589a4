"""`python -m benchmarks.learn outside`: `sundog.tune_triton` on tasks outside the dataset.

Four kernels are written for this, and four of the dataset's have other shapes. Each task is tuned
three times with an empty compiler cache: by the model with five measurements, by the pattern
search with twenty, and by measuring all configs. The last says what the best is, and on its times
the searches are replayed: how many measurements until one is within 2 % of the best?
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from sundog.tools.tune.space import Space, pattern
from sundog.tools.tune.tune_triton import TritonTuned, tune_triton

from .kernels import SUBJECTS
from .kernels.outside_kernels import (
    hard_swish_product_kernel,
    matmul_bias_relu_kernel,
    min_max_rows_kernel,
    outer_gate_kernel,
)
from .subject import Config, Task

NEAR = 1.02
CONFIGS = 48  # of each task
_FEW, _SOME = 5, 20  # measurements of the model, and of the pattern search
_SEEDS = 20


@dataclasses.dataclass(frozen=True)
class OutsideTask:
    """A launch to tune, and what a right result is."""

    name: str
    kernel: Any
    make: Callable[[str], dict[str, Any]]  # arguments by name, on a device
    reference: Callable[[dict[str, Any]], torch.Tensor]
    grid: Callable[[dict[str, Any]], tuple[int, ...]]  # by all arguments and the config's fields
    configs: Sequence[Config]
    trips: Callable[[dict[str, Any]], float]
    flops: float
    out: str = "out"


def outside_tasks() -> list[OutsideTask]:
    bf16, f32 = torch.bfloat16, torch.float32
    return [  # of each kind one first: a run may be cut
        _matmul(3072, 3072, 3072),
        _rows(3000, 6144, bf16),
        _pointwise(3000 * 5000, bf16),
        _tiles(2500, 7000, bf16),
        _of_subject("layer_norm", {"m": 3000, "n": 6144}),
        _of_subject("log_softmax", {"m": 3000, "n": 6000}),
        _rows(700, 20000, f32),
        _pointwise(1000 * 1500, f32),
        _tiles(600, 3000, bf16),
        _matmul(1536, 6144, 2048),
        _of_subject("softmax_online", {"m": 700, "n": 20000}),
        _of_subject("matmul", {"m": 1792, "n": 2304, "k": 3328, "layout": "nn"}),
        _matmul(200, 5000, 4096),
    ]


def _some(space: Mapping[str, Sequence[int]], fits: Callable[[Config], bool]) -> list[Config]:
    """Draw configs of a space, as many as a task has."""
    found: list[Config] = [{}]
    for name, values in space.items():
        found = [{**config, name: value} for config in found for value in values]
    usable = [config for config in found if fits(config)]
    return random.Random(0).sample(usable, min(CONFIGS, len(usable)))


def _matmul(m: int, n: int, k: int) -> OutsideTask:
    def make(device: str) -> dict[str, Any]:
        def full(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        given = {"a": full(m, k), "b": full(k, n), "bias": full(n), "out": out}
        return {**given, "m": m, "n": n, "k": k}

    def reference(args: dict[str, Any]) -> torch.Tensor:
        return (args["a"].float() @ args["b"].float() + args["bias"].float()).relu()

    space = {"BLOCK_M": (32, 64, 128, 256), "BLOCK_N": (32, 64, 128, 256), "BLOCK_K": (32, 64, 128),
             "num_warps": (4, 8), "num_stages": (2, 3, 4)}  # fmt: skip

    def fits(c: Config) -> bool:
        shared = 2 * c["num_stages"] * c["BLOCK_K"] * (c["BLOCK_M"] + c["BLOCK_N"])
        return shared < 220_000 and c["BLOCK_M"] * c["BLOCK_N"] <= 128 * 128 * c["num_warps"] // 4

    return OutsideTask(
        f"matmul_bias_relu {m}x{n}x{k}", matmul_bias_relu_kernel, make, reference,
        lambda c: (triton.cdiv(m, c["BLOCK_M"]), triton.cdiv(n, c["BLOCK_N"])),
        _some(space, fits), lambda c: triton.cdiv(k, c["BLOCK_K"]), 2.0 * m * n * k,
    )  # fmt: skip


def _rows(m: int, n: int, dtype: torch.dtype) -> OutsideTask:
    def make(device: str) -> dict[str, Any]:
        x = torch.randn(m, n, device=device, dtype=dtype)
        return {"x": x, "out": torch.empty_like(x), "n": n}

    def reference(args: dict[str, Any]) -> torch.Tensor:
        x = args["x"].float()
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        return (x - low) / (high - low + 1e-6)

    space = {
        "BLOCK": (256, 512, 1024, 2048, 4096, 8192),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1, 2, 3),
    }
    return OutsideTask(
        f"min_max_rows {m}x{n} {_short(dtype)}", min_max_rows_kernel, make, reference,
        lambda c: (m,), _some(space, _few), lambda c: 2 * triton.cdiv(n, c["BLOCK"]), 4.0 * m * n,
    )  # fmt: skip


def _pointwise(n: int, dtype: torch.dtype) -> OutsideTask:
    def make(device: str) -> dict[str, Any]:
        x, y = (torch.randn(n, device=device, dtype=dtype) for _ in range(2))
        return {"x": x, "y": y, "out": torch.empty_like(x), "n": n}

    def reference(args: dict[str, Any]) -> torch.Tensor:
        return torch.nn.functional.hardswish(args["x"].float()) * args["y"].float()

    space = {
        "BLOCK": (128, 256, 512, 1024, 2048, 4096, 8192),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1, 3),
    }
    return OutsideTask(
        f"hard_swish_product {n} {_short(dtype)}", hard_swish_product_kernel, make, reference,
        lambda c: (triton.cdiv(n, c["BLOCK"]),), _some(space, _few), lambda c: 1.0, 6.0 * n,
    )  # fmt: skip


def _tiles(m: int, n: int, dtype: torch.dtype) -> OutsideTask:
    def make(device: str) -> dict[str, Any]:
        x, row, column = (
            torch.randn(*shape, device=device, dtype=dtype) for shape in ((m, n), (m,), (n,))
        )
        out = torch.empty_like(x)
        return {"x": x, "row": row, "column": column, "out": out, "m": m, "n": n}

    def reference(args: dict[str, Any]) -> torch.Tensor:
        gate = args["row"].float()[:, None] + args["column"].float()[None]
        return args["x"].float() * gate.sigmoid()

    space = {
        "BLOCK_M": (1, 2, 4, 8, 16, 32),
        "BLOCK_N": (64, 128, 256, 512, 1024),
        "num_warps": (1, 2, 4, 8),
    }

    def fits(c: Config) -> bool:
        return 32 <= c["BLOCK_M"] * c["BLOCK_N"] // c["num_warps"] <= 64 * 32

    return OutsideTask(
        f"outer_gate {m}x{n} {_short(dtype)}", outer_gate_kernel, make, reference,
        lambda c: (triton.cdiv(m, c["BLOCK_M"]), triton.cdiv(n, c["BLOCK_N"])),
        _some(space, fits), lambda c: 1.0, 6.0 * m * n,
    )  # fmt: skip


def _few(config: Config) -> bool:
    return 32 <= config["BLOCK"] // config["num_warps"] <= 128 * 32


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_subject(name: str, shape: dict[str, Any]) -> OutsideTask:
    """Take a kernel of the dataset at a shape that it does not have."""
    subject = SUBJECTS[name]
    assert shape not in list(subject.shapes)
    task = Task(subject, shape, "bfloat16")
    constants = subject.constants(shape)
    usable = [config for config in subject.configs if task.takes(config)][:CONFIGS]

    def make(device: str) -> dict[str, Any]:
        return {**task.make(device), **constants}

    def reference(args: dict[str, Any]) -> torch.Tensor:
        return next(iter(subject.reference(args)))

    fields = list(subject.space)
    return OutsideTask(
        f"{name} {'x'.join(str(v) for v in shape.values())}", subject.kernel, make, reference,
        lambda c: task.grid({field: c[field] for field in fields}),
        usable, lambda c: subject.trips(shape, {f: c[f] for f in fields}), task.work[1],
        subject.outputs[0],
    )  # fmt: skip


# what is measured


def triton_config(task: OutsideTask, config: Config) -> triton.Config:
    options = {name: config[name] for name in ("num_warps", "num_stages") if name in config}
    return triton.Config({n: v for n, v in config.items() if n not in options}, **options)


def tune_cold(
    task: OutsideTask, args: dict[str, Any], search: str, budget: int, **options: Any
) -> TritonTuned:
    """Tune with an empty cache: what a user waits for the first time."""
    task.kernel.device_caches.clear()
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = f"{folder}/cache"
        return tune_triton(
            task.kernel, task.grid, (), args, budget=budget, search=search,
            configs=[triton_config(task, each) for each in task.configs], flops=task.flops,
            trips=task.trips, log=f"{folder}/log", **options,
        )  # fmt: skip


def measure(task: OutsideTask, device: str, **options: Any) -> dict[str, Any]:
    """Tune one task three times; `options` are for `tune_triton`: a clock of a test."""
    torch.manual_seed(0)
    args = task.make(device)
    model = tune_cold(task, args, "model", _FEW, **options)
    some = tune_cold(task, args, "pattern", _SOME, **options)
    whole = tune_cold(task, args, "exhaustive", len(task.configs), **options)
    times = {str(c): t for c, t in whole.times if t is not None}
    best = min(times.values())
    found = {
        "task": task.name,
        "configs": len(task.configs),
        "timed": len(times),
        "best_ms": best,
        "worst_over_best": max(times.values()) / best,
        "by_model": model.by_model,
        "relative_error": _wrong_by(task, args, whole, device),
    }
    for name, tuned in (("model", model), ("pattern", some), ("exhaustive", whole)):
        asked = [times.get(str(config), math.inf) / best for config, _ in tuned.times]
        found[name] = {"seconds": tuned.seconds, "measured": tuned.tried, "over_best": min(asked),
                       "until_near": steps_until(asked), "compiled": tuned.compiled}  # fmt: skip
    found["pattern_replayed"] = _replayed(task, times)
    return found


def steps_until(asked: Sequence[float]) -> int | None:
    """Return how many measurements it took until one was near the best; None if none was."""
    near = [number for number, ratio in enumerate(asked, start=1) if ratio <= NEAR]
    return near[0] if near else None


def _replayed(task: OutsideTask, times: dict[str, float]) -> float:
    """Return the median over seeds of the pattern search's measurements until one is near."""
    fields = list(task.configs[0])
    made = dataclasses.make_dataclass("Recorded", fields, frozen=True)
    points = {
        made(**config): times.get(str(triton_config(task, config))) for config in task.configs
    }
    best, counts = min(times.values()), []
    for seed in range(_SEEDS):
        configs = random.Random(seed).sample(list(points), len(points))
        asked: list[float] = []

        def evaluate(wanted: list[Any], generation: int, asked: list[float] = asked) -> list[Any]:
            asked += [(points[point] or math.inf) / best for point in wanted]
            return [points[point] for point in wanted]

        pattern(Space(tuple(configs)), evaluate, len(configs), random.Random(seed))
        counts.append(steps_until(asked) or len(configs))
    return float(statistics.median(counts))


def _wrong_by(
    task: OutsideTask, args: dict[str, Any], tuned: TritonTuned, device: str
) -> float | None:
    """Return the relative error of the best config's result; None where nothing ran."""
    if device == "cpu" or tuned.config is None:
        return None
    given = {**args, **tuned.config.all_kwargs()}
    x, y, z = (*task.grid(given), 1, 1)[:3]
    task.kernel[(x, y, z)](**given)
    wanted, result = task.reference(args).float(), args[task.out].float()
    return float((result - wanted).norm() / wanted.norm())


def measure_all(out: Path, device: str, seconds: float) -> None:
    """Measure as many tasks as the time allows; write them as they come, and print a table.

    What the file has is not measured again.
    """
    begin, found = time.monotonic(), json.loads(out.read_text()) if out.exists() else []
    known = {each["task"] for each in found}
    for task in outside_tasks():
        if task.name in known:
            continue
        if time.monotonic() - begin > seconds:
            print(f"the time is over: {task.name} and those after it were not measured")
            break
        found.append(measure(task, device))
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{time.monotonic() - begin:5.1f} s  {_line(found[-1])}", flush=True)
    print(table(found))


def table(found: list[dict[str, Any]]) -> str:
    head = (
        f"{'':34}{'model, 5':^24}{'pattern, 20':^24}{'all':^14}\n{'task':34}"
        + f"{'until':>6}{'ends at':>9}{'s':>7}  " * 2
        + f"{'configs':>8}{'s':>7}"
    )
    lines = [_line(each) for each in found]
    near = {
        n: sum(each[n]["until_near"] is not None for each in found) for n in ("model", "pattern")
    }
    replayed = statistics.median(each["pattern_replayed"] for each in found)
    lines.append(
        f"within 2 %: model {near['model']} of {len(found)} tasks, pattern {near['pattern']}; "
        f"replayed on all times the pattern search needs {replayed:g} measurements (median)"
    )
    names = ("model", "pattern", "exhaustive")
    took = [f"{n} {statistics.mean(each[n]['seconds'] for each in found):.2f}" for n in names]
    return "\n".join([head, *lines, "mean seconds: " + ", ".join(took)])


def _line(each: dict[str, Any]) -> str:
    line = f"{each['task']:34}"
    for name in ("model", "pattern"):
        part = each[name]
        until = part["until_near"] or "-"
        line += f"{until:>6}{part['over_best']:9.3f}{part['seconds']:7.2f}  "
    return f"{line}{each['configs']:8}{each['exhaustive']['seconds']:7.2f}"
