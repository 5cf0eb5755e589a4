"""Tune a Helion kernel with the model, through Helion's `autotuner_fn`.

    @helion.kernel(autotuner_fn=record_autotuning("runs/add", sundog.tune_helion(budget=5)))

Helion draws configs of the kernel's space and generates their code. A launch of each, which is only
recorded, shows its grid. The model orders them, processes compile the first few times `budget`, and
the model orders those again, as in `tune_triton`. Helion measures `budget` of them: the first five
together, the others one at a time, and each measurement updates the model. On a GPU that the model
does not know, Helion's own search runs.
"""

from __future__ import annotations

import dataclasses
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helion import exc
from helion.autotuner.finite_search import FiniteSearch
from helion.runtime.settings import default_autotuner_fn
from triton import knobs
from triton.runtime.jit import JITFunction

from ...compiled.recorded import RecordedLaunch, pointer
from ...learn.kernel_model import ORDERED, predict
from ...target import key_of, of
from .._pool import Failure
from .compile_configs import Built, build_all
from .space import Space, by_model, points_of

_DRAWN, _COMPILED = 8, 4  # times the budget: configs whose code is generated, and compiled
_BLOCKS = {1: ("BLOCK",), 2: ("BLOCK_M", "BLOCK_N"), 3: ("BLOCK_M", "BLOCK_N", "BLOCK_K")}


def tune_helion(budget: int = 20) -> Callable[..., Any]:
    """Return an `autotuner_fn` for `@helion.kernel` that measures at most `budget` configs."""
    if budget < 2:
        raise ValueError(f"budget {budget}: Helion compares at least two configs")

    def autotuner_fn(kernel: Any, args: Sequence[object], **options: object) -> Any:
        if predict([], key_of(kernel.env.device)) is None:
            return default_autotuner_fn(kernel, args, **options)
        return ModelSearch(kernel, args, budget)

    return autotuner_fn


class ModelSearch(FiniteSearch):
    """A search of Helion's that asks the model which of the drawn configs to measure."""

    def __init__(self, kernel: Any, args: Sequence[object], budget: int) -> None:
        drawn = kernel.config_spec.create_config_generation(
            overrides=kernel.settings.autotune_config_overrides or None,
            process_group_name=kernel.env.process_group_name,
        )
        super().__init__(kernel, args, configs=drawn.random_population(_DRAWN * budget))
        self.budget = budget
        self._refused: Exception | None = None

    def _autotune(self) -> Any:
        space = self._proposed()
        times: dict[Any, float] = {}

        def evaluate(points: list[Any], generation: int) -> list[float | None]:
            self.set_generation(generation)
            found = self.benchmark_batch(
                [point.config_ for point in points], raise_if_no_viable_config=False
            )
            times.update({p: r.perf for p, r in zip(points, found, strict=True)})
            return [r.perf if math.isfinite(r.perf) else None for r in found]

        by_model(space, evaluate, self.budget, random.Random(self.settings.autotune_random_seed))
        best = min(times, key=lambda point: times[point])
        if not math.isfinite(times[best]):
            raise exc.NoConfigFound
        return best.config_

    def _proposed(self) -> Space:
        """Return the configs that the model prefers, compiled, the best first."""
        points = points_of(self.configs, [_flat(dict(config)) for config in self.configs])
        launches = {point: self._launch(point.config_) for point in points}
        known = {point: launch for point, launch in launches.items() if launch is not None}
        if not known:
            raise exc.NoConfigFound from self._refused
        first = sorted(known, key=self._scores(known, {}).__getitem__)[: _COMPILED * self.budget]
        built = _built([known[point].recorded for point in first], _arch(self.kernel))
        good = {p: b for p, b in zip(first, built, strict=True) if isinstance(b, Built)}
        scores = self._scores({point: known[point] for point in good or first}, good)
        ordered = sorted(scores, key=scores.__getitem__)
        return Space(tuple(ordered), tuple(scores[point] for point in ordered), ORDERED)

    def _launch(self, config: Any) -> _Launch | None:
        """Generate a config's code and record its launch; None where that fails."""
        found: list[_Launch] = []

        def record(kernel: JITFunction, grid: Any, *args: Any, **options: Any) -> None:
            found.append(_Launch(kernel, grid, args, options))

        try:
            self.kernel.compile_config(config, allow_print=False)(*self.args, _launcher=record)
        except Exception as error:  # of this config only; if all fail, the last error is the reason
            self._refused = error
        return found[0] if found else None

    def _scores(self, launches: dict[Any, _Launch], built: dict[Any, Built]) -> dict[Any, float]:
        known = [
            {**launch.known(point.config_), **(built[point].facts if point in built else {})}
            for point, launch in launches.items()
        ]
        scores = predict(known, key_of(self.kernel.env.device))
        assert scores is not None, "tune_helion asked before"
        return dict(zip(launches, scores, strict=True))


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A launch of generated code that was recorded, not made."""

    kernel: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def recorded(self) -> RecordedLaunch:
        options = {n: v for n, v in self.options.items() if n in ("num_warps", "num_stages")}
        return RecordedLaunch(self.kernel, tuple(pointer(a, 0) for a in self.args), options, {})

    def known(self, config: Any) -> dict[str, Any]:
        """Return the model's input: see learn/features.py."""
        tensors = {a.data_ptr(): a for a in self.args if isinstance(a, torch.Tensor)}
        largest = max(tensors.values(), key=lambda tensor: tensor.nbytes)
        blocks = list(config.get("block_sizes", []))
        fields = dict(zip(_BLOCKS.get(len(blocks), ()), blocks, strict=False))
        fields |= {name: self.options[name] for name in ("num_warps", "num_stages")}
        x, y, z = (*self.grid, 1, 1)[:3]
        return {
            "kernel": "", "dtype": str(largest.dtype).removeprefix("torch."), "config": fields,
            "shape": {}, "grid": (x, y, z), "flops": math.nan, "trips": math.nan,
            "bytes": float(sum(tensor.nbytes for tensor in tensors.values())),
        }  # fmt: skip


def _built(launches: list[RecordedLaunch], arch: str) -> list[Built | Failure]:
    """Compile and keep all stages: while it tunes, Helion lets Triton keep only binaries."""
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.compilation.store_binary_only = folder, False
        return build_all(launches, arch)


def _arch(kernel: Any) -> str:
    device = kernel.env.device
    return of(device).arch if device.type == "cuda" else "sm_90"


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return a field for each number of a config, and a word for anything else."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, list) and all(type(each) in (int, bool, str) for each in value):
            found |= {f"{name}_{number}": each for number, each in enumerate(value)}
        else:
            found[name] = value if type(value) in (int, bool, str) else str(value)
    return found
