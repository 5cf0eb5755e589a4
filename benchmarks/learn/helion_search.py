"""Helion's own search, LFBO, on recorded times: from the installed package, without a GPU.

It may ask for any config of the space, of which a part was recorded. What was not recorded is not
offered to it, and costs it nothing. Its first population is half of the budget; of the rest it
chooses by its random forest, as on a GPU.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy
import torch


class _Spent(Exception):
    """The budget is."""


def lfbo(times: dict[str, float], count: int, seed: int) -> list[float]:
    """Return the times that the search asked for, in its order: `count` of them at most."""
    os.environ.setdefault("HELION_AUTOTUNE_LOG_LEVEL", "CRITICAL")
    from helion.autotuner import search_algorithms
    from helion.autotuner.config_fragment import EnumFragment
    from helion.autotuner.external import _ExternalKernelAdapter, create_user_config_spec

    random.seed(seed)
    numpy.random.seed(seed)
    configs = {text: json.loads(text) for text in times}
    fields = {
        name: EnumFragment(tuple(sorted({config[name] for config in configs.values()})))
        for name in next(iter(configs.values()))
    }
    known = {_text(config): times[text] for text, config in configs.items()}
    asked: dict[str, float] = {}
    search = _recorded(search_algorithms["LFBOTreeSearch"], known)(
        _ExternalKernelAdapter(
            create_user_config_spec(fields), lambda config: lambda: None, (), lambda: None,
            torch.device("cpu"), autotune_log_level=50, autotune_progress_bar=False,
            autotune_random_seed=seed,
        ),
        (), initial_population=max(count // 2, 2), copies=2,
    )  # fmt: skip
    search._benchmark_provider_cls = _provider(known, asked, count)
    try:
        search._prepare()
        search._autotune()
    except _Spent:
        pass
    return list(asked.values())


def _text(config: Any) -> str:
    return json.dumps(dict(config), sort_keys=True)


def _recorded(search: Any, known: dict[str, float]) -> Any:
    """Offer what was recorded alone, and leave out measuring again: times do not change."""

    class Recorded(search):
        def _generate_initial_population_flat(self) -> list[Any]:
            drawn = random.sample(sorted(known), min(self.initial_population, len(known)))
            make = type(self.config_gen.unflatten(self.config_gen.default_flat()))
            return [self.config_gen.flatten(make.from_dict(json.loads(t))) for t in drawn]

        def make_unbenchmarked(self, flat: Any) -> Any:
            member = super().make_unbenchmarked(flat)
            inside = member is not None and _text(member.config.config) in known
            return member if inside else None

        def rebenchmark_population(self, *args: Any, **options: Any) -> None:
            return None

        def _finalize(self) -> Any:
            return self.best.config

    return Recorded


def _provider(known: dict[str, float], asked: dict[str, float], count: int) -> Any:
    from helion.autotuner.base_search import BenchmarkResult
    from helion.autotuner.benchmark_provider import BenchmarkProvider

    class Provider(BenchmarkProvider):
        def __init__(self, **given: Any) -> None:
            self.mutated_arg_indices: list[int] = []

        def setup(self) -> None: ...

        def cleanup(self) -> None: ...

        def benchmark(self, configs: list[Any], **options: Any) -> list[Any]:
            found = []
            for config in configs:
                text = _text(config.config)
                if len(asked) == count and text not in asked:
                    raise _Spent
                asked[text] = known[text]
                found.append(BenchmarkResult(config, lambda: None, known[text], "ok", 0.0))
            return found

    return Provider
