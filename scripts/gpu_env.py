"""Run a command on a machine that can install nothing: scripts/gpu_env.py [--mps] COMMAND ...

The command gets this source tree and what wheels/ holds on its PYTHONPATH (`make gpu-wheels` fills
wheels/; what the machine has itself comes first). With --mps a daemon lets processes run at the
same time on one GPU, as ranks of `symm` need.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["mps_folder", "prepare"]

ROOT = Path(__file__).resolve().parent.parent


def prepare() -> dict[str, str]:
    """Return an environment with this source tree and the wheels that the machine lacks."""
    unpacked = Path(tempfile.mkdtemp(prefix="sundog-wheels-"))
    for wheel in sorted((ROOT / "wheels").glob("*.whl")):
        if importlib.util.find_spec(wheel.name.split("-")[0]) is not None:
            continue  # the machine's own comes first
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1")
    environment.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks share a GPU
    # What was set comes last: the machine's own packages may be there.
    given = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(unpacked), *given])
    return environment


@contextlib.contextmanager
def mps_folder(environment: dict[str, str]) -> Iterator[str]:
    """Run the daemon of MPS and yield the folder of its pipes; empty if it is not installed."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="sundog-mps-")
    own = dict(environment, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    subprocess.run([program, "-d"], env=own, check=True, timeout=30)
    try:
        yield folder
    finally:
        subprocess.run([program], input="quit\n", text=True, env=own, timeout=30)


def main(words: list[str]) -> int:
    environment = prepare()
    if words[:1] != ["--mps"]:
        return subprocess.run(words, env=environment).returncode
    with mps_folder(environment) as folder:
        if folder:
            environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        return subprocess.run(words[1:], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
