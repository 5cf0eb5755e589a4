"""Triton's own race detector, GSan: its tests with the checker in its place.

The test files are imported from a temporary copy that makes tensors on the CPU. What they take
from GSan is replaced: its poll by one of ours, and its look into shadow memory by values that agree
with anything. A case that must fail names the kind of race and a line; one that must not must be
clean.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

from sundog.tools.check.schedules import CANNOT_INTERPRET, check

from .verdicts import Case

SUITE = "Triton GSan"
FOLDER = Path("python/test/gsan")
SCHEDULES = 20
REPLACED = {
    'device="cuda"': 'device="cpu"',
    "torch.cuda.synchronize()": "None",
    "torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count": "2",
    "tl.atomic_poll(": "atomic_poll(",  # Triton 3.7 does not have it
}
KNOWN = {
    "test_programmatic_dependent_launch_requires_wait": (
        "GSan asks every kernel that is launched early to wait; we report an access that comes too "
        "early, and this kernel touches nothing of the one before it"
    ),
    "test_mixed_scope_release_rmw_accumulation": (
        "GSan stops at what it does not support; PTX allows releases of two scopes on one counter, "
        "and both reach both programs"
    ),
}
STUBBED = (
    "triton._internal_testing",
    "triton.experimental.gsan",
    "triton.experimental.gsan._testing_utils",
    "triton._C.libtriton.gsan_testing",
)
NO_VERDICT = "looks at GSan's own shadow memory or allocator, and asks for no verdict on a kernel"


@triton.jit
def atomic_poll(  # type: ignore[no-untyped-def]
    ptr, expect, sem: tl.constexpr = "relaxed", scope: tl.constexpr = "gpu"
):
    """Poll as GSan's tests do, without a pause."""
    while tl.atomic_add(ptr, 0, sem=sem, scope=scope) != expect:
        pass


class Anything:
    """A value of GSan that agrees with whatever a test asserts of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *words: Any, **named: Any) -> Any:
        return False

    def __getitem__(self, index: Any) -> Anything:
        return Anything()

    def __eq__(self, other: object) -> bool:
        return True

    def __ge__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__
    __add__ = __mul__ = __mod__ = __radd__ = __getitem__


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "atomic_poll":
            return atomic_poll
        found = name.startswith(("shadow_cell", "thread_state", "Scalar"))
        return (lambda *words, **named: Anything()) if found else Anything()


@contextmanager
def _stubs() -> Iterator[None]:
    old = {name: sys.modules.get(name) for name in STUBBED}
    sys.modules.update({name: _Stub(name) for name in STUBBED})
    try:
        yield
    finally:
        for name, module in old.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def cases(checkout: Path) -> Iterator[Case]:
    """Yield every case of GSan's tests; those without a verdict are not expressible."""
    folder = tempfile.TemporaryDirectory()
    for name in ("test_gsan_failures", "test_gsan", "test_symmetric_memory", "test_allocator"):
        path = Path(folder.name) / f"{name}.py"
        text = (checkout / FOLDER / path.name).read_text()
        for old, new in REPLACED.items():
            text = text.replace(old, new)
        path.write_text(text)
        if name.startswith("test_gsan"):
            yield from _of_module(_import(path), folder)
        else:
            yield from (_unasked(line) for line in text.splitlines() if line.startswith("def test"))


def _unasked(line: str) -> Case:
    name = line.removeprefix("def ").split("(")[0]
    reason = NO_VERDICT
    if "no_atomic_sync" in name or "single_cta_atomic" in name or "triton_kernels" in name:
        reason = "starts processes that share memory of GPUs through GSan's allocator"
    return Case(SUITE, name, "", partial(_refuse, reason))


def _refuse(reason: str) -> str:
    raise ValueError(reason)


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"suite_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _stubs():
        spec.loader.exec_module(module)
    for name in vars(module):
        if name.startswith("_assert_"):
            setattr(module, name, lambda *words, **named: None)
    return module


def _of_module(module: Any, keep: object) -> Iterator[Case]:
    tests = {n: f for n, f in vars(module).items() if n.startswith("test_")}
    for name, test in tests.items():
        for words in _parameters(test):
            plain = [str(v) for v in words.values() if not isinstance(v, Anything)]
            shown = f"{name}[{'-'.join(plain)}]" if words else name
            yield _case(module, shown, test, words, keep)


def _parameters(test: Any) -> Iterator[dict[str, Any]]:
    """Expand pytest's marks."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    choices = []
    for mark in marks:
        names = [n.strip() for n in mark.args[0].split(",")]
        values = [getattr(v, "values", None) or v for v in mark.args[1]]
        rows = [v if isinstance(v, tuple) and len(v) == len(names) else (v,) for v in values]
        choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in product(*choices):
        yield {name: value for each in chosen for name, value in each.items()}


def _case(
    module: Any, name: str, test: Callable[..., Any], words: dict[str, Any], keep: object
) -> Case:
    """Ask a failing case what it wants; run a passing one whole."""
    if hasattr(module, "_run_failure_case"):
        wanted: dict[str, Any] = {}
        module._run_failure_case = lambda case, **named: wanted.update(named)
        test(**words)
        lines, first = inspect.getsourcelines(wanted["source_function"])
        line = first + next(i for i, text in enumerate(lines) if wanted["marker"] in text)
        kind = wanted["error"].removesuffix(" race detected")
        arguments = wanted.get("runner_args", ())
        body = partial(wanted["runner"].__wrapped__, *arguments)
        find = partial(_race, body, line, keep)
        return Case(SUITE, name, f"{kind} at line {line}", find, KNOWN.get(name, ""))
    if "capfd" not in inspect.signature(test).parameters:
        return Case(SUITE, name, "no race", partial(_refuse, NO_VERDICT))
    stubs = {n: Anything() for n in inspect.signature(test).parameters if n not in words}
    return Case(SUITE, name, "no race", partial(_race, partial(test, **words, **stubs), 0, keep))


def _race(body: Callable[[], None], line: int, keep: object) -> str:
    """Check a case; describe the race at this line, or any."""
    report = check(lambda world: body(), 1, SCHEDULES)
    for finding in report.findings:
        if finding.rule == CANNOT_INTERPRET or finding.kind == "error":
            raise ValueError(f"the simulator does not run it: {finding.why.splitlines()[0]}")
    races = [f for f in report.findings if f.kind == "race"]
    here = [f for f in races if line in (f.first.line, f.second.line)]  # type: ignore[union-attr]
    if not races:
        others = {finding.kind for finding in report.findings}
        return ", ".join(sorted(others)) or "no race"
    if not here:
        return f"a race at other lines: {sorted({f.key()[1:] for f in races})}"
    sides = [here[0].first, here[0].second]
    later = next(side for side in reversed(sides) if side is not None and side.line == line)
    other = next((s for s in sides if s is not later), later)
    return f"{_kind(later.verb, other.verb)} at line {line}"  # type: ignore[union-attr]


def _kind(later: str, earlier: str) -> str:
    """Name a race as GSan does; it looks at the read of an atomic first."""
    reads = "load" in later or later.startswith("atomic")
    if reads:
        return "Read after write"
    return f"Write after {'read' if 'load' in earlier else 'write'}"
