"""What a run is: its identity in the dataset, known before anything is compiled or measured."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...dataset.hardware import versions
from ...dataset.identity import RunInfo, describe_value
from ...dataset.kernel_source import kernel_source
from ...dataset.plain import relative_path
from .._launches import NUM_SMS
from .compile_configs import launches_of
from .measure import Where
from .space import Job, Space, fields_text, spaces

__all__ = ["Described", "describe_all", "warm_cache_keys"]


@dataclass(frozen=True)
class Described:
    """A job that is not refused."""

    number: int  # among all
    job: Job
    space: Space
    info: RunInfo


def warm_cache_keys(found: list[Job]) -> None:
    """Compute every kernel's key in Triton's cache, before the processes part.

    A key depends on which kernels already have one: a callee's globals count only if its own key
    was computed before (Triton 3.6 and 3.7, `DependenciesFinder`). The world that measures has
    kernels that the compilers have not. Without this it found nothing that they had compiled: 0.3 s
    and more for each.
    """
    for job in {each.module: each for each in found}.values():
        with suppress(ValueError):  # a problem that it refuses
            for launch in launches_of(job, job.module.default(job.problem, NUM_SMS)):
                launch.kernel.cache_key  # noqa: B018


def describe_all(
    found: list[Job], where: Where, backend: str, settings: dict[str, Any]
) -> list[Described]:
    """Describe every job, before the compilers are forked: they need the descriptions."""
    described = []
    for number, space in spaces(found, where.num_sms, where.warp_size).items():
        info = _describe(found[number], space, backend, where.hardware, settings)
        described.append(Described(number, found[number], space, info))
    return described


def _describe(
    job: Job, space: Space, backend: str, hardware: dict[str, Any], settings: dict[str, Any]
) -> RunInfo:
    """The run: all kernels that the op launches; algorithm and problem as their arguments."""
    kernels = dict.fromkeys(each.kernel for each in launches_of(job, space.configs[0]))
    source: list[dict[str, Any]] = []
    for kernel in kernels:
        source += [item for item in _source(kernel) if item not in source]
    # A broadcast and a scatter launch one kernel on equal problems: their file tells them apart.
    fields = {"algorithm": relative_path(str(job.module.__file__))}
    fields |= {name: getattr(job.problem, name) for name in job.problem.__dataclass_fields__}
    return RunInfo(
        kernel_name=relative_path(job.op),
        kernel_source=source,
        codegen_settings={},
        arguments=[{"name": name, **describe_value(value)} for name, value in fields.items()],
        settings={**settings, "space": len(space.configs),
                  "default": fields_text(space.configs[0])},
        world=job.size,
        backend=backend,
        hardware=hardware,
        versions=versions(),
    )  # fmt: skip


_source = functools.cache(kernel_source)  # the same for all problems, and takes 0.2 s
