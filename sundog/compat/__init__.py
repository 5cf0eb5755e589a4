"""Run programs written for torch symmetric memory and CUDA as ranks of a simulated world.

    sundog.run(main, 4, torch=True)          # main() as under torchrun, on a CPU
    sundog check script.py:main --torch --world 4

Inside such a rank `torch.distributed`, its `_symmetric_memory` and `torch.cuda` answer as they do
on a GPU: device `cuda` is the rank's CPU memory, backend `nccl` is the simulated group. When the
last rank has ended, torch is as it was before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

_LIBRARIES = ("iris", "triton_dist")  # each with a module here of the same name
_NVSHMEM = "torch.distributed._symmetric_memory._nvshmem_triton"


def provide(script: str = "") -> None:
    """Make stand-ins importable for what programs import and this machine lacks.

    These are cuda-python, Iris and Triton-distributed, each unless it is installed, NVSHMEM for
    torch, and, as in Python, the files beside a script (`script.py` or `script.py:main`). They stay
    until the process ends. Call it before the program is imported; `sundog check --torch` does.
    """
    from . import cuda

    path = script.partition(".py:")[0].removesuffix(".py") + ".py"
    if os.path.exists(path):
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    cuda.provide()
    _provide_nvshmem()
    for name in _LIBRARIES:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            importlib.import_module(f"{__name__}.{name}").provide()


def _provide_nvshmem() -> None:
    """Import torch's module for NVSHMEM, which is empty where torch finds no GPU for Triton.

    Its functions call the library by symbols, which the simulator knows (see `shmem`).
    """
    import torch.utils._triton as torchs_triton

    module: Any = sys.modules.get(_NVSHMEM)
    if not hasattr(module, "put"):
        original = torchs_triton.has_triton
        torchs_triton.has_triton = lambda: True  # type: ignore[assignment]
        try:
            module = importlib.reload(module) if module else importlib.import_module(_NVSHMEM)
        finally:
            torchs_triton.has_triton = original
    finder = module.NvshmemLibFinder
    finder.found_device_lib_path = finder.found_device_lib_path or "a stand-in of sundog's"
