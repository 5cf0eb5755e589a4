"""sundog: write multi-GPU Triton kernels; test and race-check them on a laptop.

    def main(world): ...                 # runs once per rank, on any backend
    sundog.run(main, world_size=8)       # results by rank
    world = sundog.init()                # or: this process is a rank, under torchrun

Names are imported when they are first used, so that `sundog.dataset` alone needs neither torch nor
Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import dataset
    from .backends.sim import Sim
    from .launch import init, run
    from .tools.probe.probe import probe
    from .tools.tune.tune import tune
    from .tools.tune.tune_helion import tune_helion
    from .tools.tune.tune_triton import tune_triton
    from .world.world import World

__all__ = ["Sim", "World", "dataset", "init", "probe", "run", "tune", "tune_helion", "tune_triton"]
__version__ = "0.1.0"

_HOMES = {
    "Sim": ".backends.sim",
    "World": ".world.world",
    "init": ".launch",
    "probe": ".tools.probe.probe",
    "run": ".launch",
    "tune": ".tools.tune.tune",
    "tune_helion": ".tools.tune.tune_helion",
    "tune_triton": ".tools.tune.tune_triton",
}


def __dir__() -> list[str]:  # so that a prompt can complete names before they are imported
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "dataset":  # a package; the others are names in a module
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'sundog' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name], __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}{_HOMES[name]}":
            raise
        raise ImportError(
            f"sundog.{name}: `sundog-dataset` contains sundog.dataset alone; install `sundog`"
        ) from None
    return getattr(home, name)
