"""Dat3M's litmus tests for GPUs: outcomes and liveness in PTX, progress and races in Vulkan.

The expected results are in lists, a file's name and 0 or 1 per line. A line that Dat3M itself
cannot decide is commented out with `;`, but has a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ..memory_model.executions import outcomes
from ..memory_model.progress import find_stuck
from .litmus_files import read_litmus
from .progress_kernels import check_litmus
from .verdicts import Case

LISTS = Path("dartagnan/src/test/resources")
PROGRESS = {"fair": "Fair", "obe": "OBE", "hsa": "HSA", "hsa_obe": "HSA_OBE", "lobe": "LOBE"}
FOREVER = "can run for ever"
AS_KERNELS = "Dat3M CADP progress, Fair, as kernels"
SCHEDULES = 30  # of each kernel
# Why we differ, by the end of a case's name.
OUT_OF_SCOPE = (
    "a signal orders two atomics whose own scopes do not reach; Vulkan also asks for "
    "availability and visibility operations, which PTX does not have"
)
KNOWN = {
    **{f"mpnotinscope{i}-filter.litmus": OUT_OF_SCOPE for i in (2, 3, 5, 6)},
    "test16-filter.litmus": (
        "a plain read follows a relaxed read of the same word that saw the write; PTX's causality "
        "orders it by that observation, Vulkan asks for an availability operation"
    ),
}


def cases(checkout: Path) -> Iterator[Case]:
    """Yield every case of a checkout of Dat3M."""
    for path, one in _rows(checkout, "PTXv7_5-expected.csv"):
        expected = "holds" if one else "does not hold"
        yield Case("Dat3M PTX outcomes", path, expected, _finder(_outcome, checkout / path))
    for path, one in _rows(checkout, "PTXv7_5-Liveness-expected.csv"):
        yield _progress("Dat3M PTX liveness", checkout, path, one, "fair")
    for model, name in PROGRESS.items():
        for path, one in _rows(checkout, f"VULKAN-Liveness-{name}-expected.csv"):
            if "CADP" in path:
                yield _progress(f"Dat3M CADP progress, {name}", checkout, path, one, model)
    for path, one in _rows(checkout, "VULKAN-DR-expected.csv"):
        expected = "no race" if one else "race"
        find = _finder(_race, checkout / path)
        yield Case("Dat3M Vulkan races", path, expected, find, KNOWN.get(Path(path).name, ""))


def kernel_cases(checkout: Path) -> Iterator[Case]:
    """Yield the progress tests again, written as kernels and run by the checker."""

    def find(text: str) -> str:
        report = check_litmus(read_litmus(text).litmus, SCHEDULES)
        kinds = {finding.kind for finding in report.findings}
        others = sorted(kinds - {"deadlock", "livelock"})  # a poll of what never comes is either
        return ", ".join(others) or (FOREVER if kinds else "ends")

    for path, one in _rows(checkout, "VULKAN-Liveness-Fair-expected.csv"):
        if "CADP" in path:
            expected = "ends" if one else FOREVER
            yield Case(AS_KERNELS, path, expected, _finder(find, checkout / path))


def _rows(checkout: Path, name: str) -> Iterator[tuple[str, bool]]:
    for line in (checkout / LISTS / name).read_text().splitlines():
        if line.strip() and not line.startswith("//"):
            path, _, result = line.removeprefix(";").strip().rpartition(",")
            yield path, result == "1"


def _progress(suite: str, checkout: Path, path: str, one: bool, model: str) -> Case:
    def find(text: str) -> str:
        return "ends" if find_stuck(read_litmus(text).litmus, model) is None else FOREVER

    return Case(suite, path, "ends" if one else FOREVER, _finder(find, checkout / path))


def _finder(find: Callable[[str], str], path: Path) -> Callable[[], str]:
    def read() -> str:
        if not path.exists():
            raise ValueError("the list names a file that the checkout does not have")
        return find(path.read_text())

    return read


def _outcome(text: str) -> str:
    question = read_litmus(text)
    return "holds" if question.passes(outcomes(question.litmus)) else "does not hold"


def _race(text: str) -> str:
    question = read_litmus(text)
    kept = filter(question.keep, outcomes(question.litmus))
    return "race" if any(ending.races for ending in kept) else "no race"
