"""Every example on the simulator and on the GPU, in one process, with the same inputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sundog

# Not the one that trains: torch's own products round differently, and it compares by itself.
EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples").glob("*.py")
    if path.stem != "train_llama_block"
)
IN_ANY_ORDER = ("counter",)  # what a rank draws depends on who came first


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn_on_the_cpu(
    world: sundog.World,
    shape: sundog.world.world.Shape,
    dtype: torch.dtype = torch.float32,
    name="",
) -> torch.Tensor:
    """As World.randn, but the same numbers on every backend."""
    made = world.empty(shape, dtype, name)
    return made.copy_(torch.randn(made.shape).to(dtype))


@pytest.mark.gpu("virtual")
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_simulator_and_gpu_agree(monkeypatch, path, size):
    monkeypatch.setattr(sundog.World, "randn", drawn_on_the_cpu)
    example = load(path)
    results = {}
    for backend in ("sim", "virtual"):
        made = sundog.run(lambda world: example.main(world).cpu(), size, backend)
        results[backend] = torch.stack(made)
    simulated, real = results["sim"], results["virtual"]
    if path.stem in IN_ANY_ORDER:
        simulated, real = (each.flatten().sort().values for each in (simulated, real))
    assert torch.equal(simulated, real)


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
