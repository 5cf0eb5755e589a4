"""What scripts/gpu-check runs, in which order, and what may run at the same time."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["BENCHMARKS", "STAGES", "Part", "names_of"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Part:
    """One run of pytest."""

    name: str
    backend: str
    paths: list[str]
    processes: int = 1  # pytest processes that are the ranks, under MPS where it is installed
    link: str = ""
    share: str = "0/1"
    sms: int = 0  # of each rank, so that the worlds of a stage fit beside each other; 0: no limit
    marks: str = "not alone"
    outcomes: dict[str, dict] = field(default_factory=dict)
    seconds: float = 0.0

    def shared(self, count: int) -> list[Part]:
        """Split the same tests over several runs."""
        return [
            dataclasses.replace(self, name=f"{self.name}{n}", share=f"{n}/{count}", outcomes={})
            for n in range(count)
        ]

    def count(self, outcome: str) -> int:
        return sum(record["outcome"] == outcome for record in self.outcomes.values())


def _tests(names: str) -> list[str]:
    return [f"tests/{name}.py" for name in names.split()]


def _others(*folders: str) -> list[str]:
    """Return the test files of these folders that no list here names, so that new ones run."""
    known = {*WORLD, *GRAPHS, *MOVES, *SUMS, *GATHERED, *FUSED, *STRESS, *GLUON}
    known.add("tests/world/test_heap.py")
    known.add("tests/world/test_expired.py")  # sim and shm alone; tests/gpu has its twin
    known.update(_tests("fused/test_fused_mutants fused/test_gpu_limits fused/test_valid"))  # CPU
    files = (path for folder in folders for path in sorted((ROOT / folder).glob("test_*.py")))
    return [name for path in files if (name := str(path.relative_to(ROOT))) not in known]


WORLD = _tests(
    "device/test_device_signal machine/test_torch_state world/test_bad_input test_examples "
    "world/test_world world/test_groups device/test_device_memory world/test_leaving"
)
MOVES = _tests(
    "collectives/test_all_gather collectives/test_all_to_all collectives/test_moves "
    "collectives/test_barrier collectives/test_call backends/test_relaunch"
)
SUMS = _tests(
    "collectives/test_all_reduce collectives/test_reduce collectives/test_reduce_scatter "
    "collectives/test_reduction"
)
GATHERED = _tests("fused/test_all_gather_matmul")
FUSED = _tests("fused/test_gemm fused/test_matmul_reduce fused/test_tile_views")
GRAPHS = _tests("world/test_capture world/test_streams backends/test_cuda_graph test_tutorials")
STRESS = ["tests/collectives/test_stress.py"]
GLUON = _tests("collectives/test_gluon_all_gather device/test_gluon_device")
OTHERS = _others("tests/world", "tests/ops")

_FUSED2 = Part("fused2_", "symm", [*GATHERED, *FUSED], 2, sms=16).shared(2)

# Stages run one after the other, the parts of a stage at the same time. Processes that share a GPU
# without MPS take turns, which is slow for kernels and hardly seen where hosts do most of the work.
STAGES = [
    [
        *Part("gpu", "virtual", ["tests/gpu", "tests/world/test_heap.py"]).shared(6),
        *Part("world", "virtual", WORLD).shared(2),
        *Part("moves", "virtual", MOVES).shared(2),
        *Part("sums", "virtual", SUMS).shared(2),
        *Part("gathered", "virtual", GATHERED).shared(2),
        Part("fused", "virtual", FUSED),
        Part("graphs", "virtual", [*GRAPHS, "tests/backends/test_seam.py"]),
        Part("gluon", "virtual", [*GLUON, "tests/tools/tune"]),
        *Part("newer", "virtual", _others("tests/collectives", "tests/fused")).shared(3),
        Part("probe", "virtual", ["tests/tools/probe"]),
        Part("pcie", "virtual", [*WORLD, "tests/backends/test_link.py"], link="pcie"),
        Part("stress", "virtual", STRESS),
        Part("others", "virtual", OTHERS),
        Part("inside", "virtual", ["tests/inside_torch"]),
        Part("sim", "sim", [*STRESS, "tests/gpu", "tests/tools/trace"]),
    ],
    # What reads how much memory of the GPU is free, takes most of it, or looks at the clock.
    [Part("alone", "virtual", ["tests/gpu"], marks="alone")],
    [Part("alone2", "symm", ["tests/gpu"], 2, marks="alone")],
    # Worlds of processes one after the other: each measures how many SMs its ranks can fill.
    [Part("symm2", "symm", ["tests/gpu", *WORLD, *STRESS, *GRAPHS, *OTHERS], 2)],
    [Part("symm4", "symm", ["tests/gpu", *WORLD, *STRESS], 4)],
    # Worlds beside each other: together their ranks take at most 128 of the 132 SMs of an H200, and
    # each has the 16 SMs that tests ask for, or more.
    [
        Part("inside2", "symm", ["tests/inside_torch"], 2, sms=26),
        Part("moves2", "symm", [*MOVES, *SUMS], 2, sms=16),
        _FUSED2[0],
    ],
    [
        Part("inside4", "symm", ["tests/inside_torch/test_training.py"], 4, sms=16),
        Part("fused3", "symm", [*GATHERED, *FUSED], 3, sms=16),
    ],
    [
        *Part("moves3_", "symm", [*MOVES, *SUMS], 3, sms=16).shared(2),
        _FUSED2[1],
    ],
]
SECONDS = (150, 60, 15, 65, 35, 80, 45, 50, 60)  # of each stage, about; last: the benchmarks


def names_of(share: str) -> list[str]:
    """Return what belongs to a share of all, such as 1/2: whole stages, about as long each."""
    number, count = map(int, share.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"--part {share}: expected 1/2, 2/2 and the like")
    stages = [*[[part.name for part in stage] for stage in STAGES], ["bench"]]
    starts = itertools.accumulate(SECONDS, initial=0)
    chosen = []
    for names, start, seconds in zip(stages, starts, SECONDS, strict=False):
        middle = (start + seconds / 2) / sum(SECONDS)
        if int(middle * count) == number - 1:
            chosen += names
    return chosen


AXES = ["--axis", "dtype=bfloat16", "--axis", "numel=4096,65536,1048576,16777216"]
BENCHMARKS = {  # file in the folder, and the words after `python -m`
    "bound": ["benchmarks", "bound", "--world", "2,8"],
    "capture": ["benchmarks", "capture", "--world", "8"],
    "all-gather-8": ["sundog", "bench", "all_gather", "--world", "8", *AXES],
    "trace": [
        "benchmarks",
        "trace",
        "all_gather_matmul.hbm_buffer",
        "--problem",
        "m=4096,n=3584,k=8192",
    ],
}
