"""`world.num_sms` on a GPU that ranks share: as many programs of all ranks run at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sundog import World, target
from sundog.backends._measured import FILL, WARPS, count_resident, words

ROOT = Path(__file__).parent.parent.parent


def count_together(world: World) -> list[int]:
    """How many of the num_sms programs of each rank ran together, each filling an SM."""
    counts = world.zeros((words(world.size),), torch.int64)
    scratch = torch.zeros(FILL, device=world.device)
    world.barrier()
    count_resident[(world.num_sms,)](
        world.peer(counts, 0), scratch, world.rank, world.num_sms * world.size, world.ctx,
        SIZE=world.size, FILL=FILL, num_warps=WARPS,
    )  # fmt: skip
    world.barrier()
    return world.peer(counts, 0)[: world.size].tolist()


@pytest.mark.gpu("virtual", "symm")
@pytest.mark.parametrize("size", [2, 4])
def test_num_sms_programs_of_every_rank_run_at_once(run, size):
    def main(world: World) -> tuple[int, list]:
        return world.num_sms, [count_together(world) for _ in range(5)]

    results = run(main, size)
    sms = {num_sms for num_sms, _ in results}
    assert len(sms) == 1, "the same on all ranks"
    for num_sms, counts in results:
        assert counts == [[num_sms] * size] * 5


@pytest.fixture
def mps(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A daemon of its own, for processes that this test starts."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    folder = f"/tmp/sundog-mps-{os.getpid()}"  # a socket's path must be short
    os.makedirs(folder, exist_ok=True)
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    environment = {**os.environ, **variables}
    subprocess.run([control, "-d"], env=environment, check=True)
    try:
        yield variables
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input="quit\n", text=True, env=environment, timeout=20)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.alone
@pytest.mark.gpu("virtual")  # it starts its own processes, so not in a rank
@pytest.mark.parametrize(("size", "percent"), [(2, ""), (4, ""), (2, "50"), (4, "25")])
def test_under_mps_with_and_without_a_percentage(mps, size, percent):
    """With a percentage SM sets overlap: num_sms is less than CUDA reports, and nothing hangs."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SUNDOG_", "PYTEST_"))}
    own |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "SUNDOG_TIMEOUT": "10", **mps}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), own.get("PYTHONPATH", "")])
    if percent:
        own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, str(size)], env=own, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    print(f"{size} ranks, {percent or 'no'} %: {answer}, {time.monotonic() - begin:.1f} s")
    whole = target.of(torch.device("cuda")).num_sms
    assert answer["together"] == [[answer["num_sms"]] * size] * size
    assert answer["wrong"] == [0] * size
    if percent:
        assert 1 <= answer["num_sms"] <= whole * int(percent) // 100
    else:
        assert answer["num_sms"] == whole // size


def _rank(world: World) -> tuple[int, list[int], int]:
    together = count_together(world)
    a = torch.ones(256, 512, dtype=torch.bfloat16, device=world.device)
    b = torch.ones(512, 256, dtype=torch.bfloat16, device=world.device)
    out = world.matmul_reduce_scatter(a, b)  # its programs wait for each other
    world.barrier()
    return world.num_sms, together, int((out != 512 * world.size).sum().item())


if __name__ == "__main__":
    import sundog

    answers = sundog.run(_rank, int(sys.argv[1]), "symm", heap_size=64 << 20)
    print(
        json.dumps(
            {
                "num_sms": min(num_sms for num_sms, _, _ in answers),
                "together": [together for _, together, _ in answers],
                "wrong": [wrong for _, _, wrong in answers],
            }
        )
    )
