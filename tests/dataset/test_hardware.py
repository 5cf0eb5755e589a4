"""Values without addresses or paths, and the machine, also one without torch or a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sundog
from sundog.dataset.hardware import HARDWARE_FIELDS, _parse_smi, hardware, versions
from sundog.dataset.kernel_source import kernel_source
from sundog.dataset.plain import plain, relative_path, relative_text

torch = pytest.importorskip("torch")

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_like)
def test_plain_is_always_json(value: object) -> None:
    once = plain(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert plain(once) == once


def test_no_address_in_plain_values() -> None:
    assert plain(object()) == "<object object>"
    assert "0x" not in json.dumps(plain({"f": kernel_source, "o": [object()], "l": lambda: 0}))


def test_relative_paths() -> None:
    assert relative_path(kernel_source.__code__.co_filename) == "sundog/dataset/kernel_source.py"
    assert relative_path("<stdin>") == "<stdin>"
    for text in ("a/b/c", "1 / 2", "https://x.org/a/b", "x//y", "and/or"):
        assert relative_text(text) == text
    assert relative_text("at /tmp/a/k.py:3, (/usr/x.py)") == "at k.py:3, (x.py)"


def test_the_version_of_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert versions()["sundog"] == sundog.__version__
    monkeypatch.delitem(sys.modules, "helion", raising=False)
    assert versions()["helion"] is None


def test_hardware_and_versions_here() -> None:
    assert set(hardware()) == set(HARDWARE_FIELDS)
    assert versions()["torch"] == torch.__version__
    if not torch.cuda.is_available():
        assert hardware()["kind"] == "cpu"
        assert hardware()["driver"] is None
    line = "1755, 1980, 2619, [N/A], 570.86.15\n"
    assert _parse_smi(line) == {
        "sm_clock_mhz": 1755,
        "max_sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "max_memory_clock_mhz": None,
        "driver": "570.86.15",
    }
    assert _parse_smi("no devices were found") == {}


# The package alone: what sundog/__init__.py imports is not its business.
ALONE = f"""
import sys, types
package = types.ModuleType("sundog")
package.__path__ = [{str(Path(__file__).parents[2] / "sundog")!r}]
sys.modules["sundog"] = package
"""


def test_works_without_torch() -> None:
    """torch made unimportable: everything is still described, with nulls."""
    code = ALONE + (
        "sys.modules['torch'] = None\n"
        "from sundog.dataset import describe_run\n"
        "info = describe_run(len, [1])\n"
        "assert info.hardware['kind'] == 'cpu' and info.versions['cuda'] is None\n"
        "print(info.run_id)\n"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert len(out.strip()) == 64


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = ["torch", "triton", "helion", "pandas", "pyarrow", "numpy", "networkx", "matplotlib"]
    code = f"{ALONE}\nimport sundog.dataset\nprint([m for m in {heavy} if m in sys.modules])"
    out = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert out.strip() == "[]"
