"""What the tests of Triton's graph records share: the kernels, and when two modules are equal."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sundog.dataset.plain import relative_path
from sundog.dataset.triton.compile import lower
from sundog.dataset.triton.triton_module import generic_text, load_module

KERNELS = Path(__file__).parent / "kernels.py"
ARCHS = ("sm_90", "gfx942")
STAGES = ("ttir", "ttgir")

_FILE = re.compile(r'"([^"]*)"(:\d+:\d+)')


@cache
def load_kernels(path: Path = KERNELS) -> ModuleType:
    """The kernels' module from its file, which a test may have copied."""
    spec = importlib.util.spec_from_file_location("dataset_kernels", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lower_case(name: str, arch: str, stage: str, path: Path = KERNELS) -> Any:
    case = load_kernels(path).CASES[name]
    return lower(case.kernel, case.args, case.options, arch=arch, stage=stage)


def prints(module: Any) -> tuple[str, str]:
    """All that Triton says of a module: pretty and generic form, locations included.

    The generic form has what the pretty one leaves out (locations of a loop's variables,
    properties with their default). Files of locations get the record's names; a module rebuilt
    from a record has them already, and they stay as they are.
    """
    both = (str(module), generic_text(module))
    pretty, generic = (_FILE.sub(lambda m: f'"{relative_path(m[1])}"{m[2]}', text) for text in both)
    return pretty, generic


def prints_of_text(text: str) -> tuple[str, str]:
    return prints(load_module(text))
