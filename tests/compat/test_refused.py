"""What cannot be checked on a CPU ends with a sentence that names the line, and status 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sundog.cli import app

PROGRAMS = Path(__file__).with_name("gpu_only.py")
REFUSED = {
    "unknown_driver_call": "gpu_only.py:24: cuda.bindings.driver.cuMemHostRegister is not simul",
    "unknown_runtime_call": "gpu_only.py:29: torch.cuda.cudart is not simulated: run this program",
    "shared_by_cuda": "gpu_only.py:34: RuntimeError: CUDA is not available: this needs a GPU, and",
    "graph": "gpu_only.py:39: torch.cuda.CUDAGraph is not simulated: call the kernels without",
    "time": "gpu_only.py:44: Event.elapsed_time: the simulator keeps no time; measure on a GPU",
    "missing_import": "gpu_only.py:48: No module named 'a_library_that_nobody_has'. Install it",
    "without_rendezvous": "gpu_only.py:19: load of symm_mem0 of rank 1 by a kernel of rank 0, wh",
    "ordinary_tensor": "load of a tensor of rank 1 by a kernel of rank 0, which has no rendezvous",
    "profiler": "torch.profiler is not simulated, since there is no time here: leave it out, or",
    "benchmark": "0 active drivers ([]). There should only be one.: this needs a GPU, and is not",
    "spawned": "torch.multiprocessing.spawn: sundog runs main() in every rank already: name the",
    "started": "a process that main() starts: sundog runs main() in every rank already",
    "store": "a store of torch.distributed is not simulated: exchange values by all_gather_object",
    "file_store": "a store of torch.distributed is not simulated: exchange values by all_gather",
    "a_gpu_too_many": "device cuda:2: this world has 2 ranks, each with one GPU, cuda:0 to cuda:1",
    "a_gpu_too_many_by_number": "device cuda:2: this world has 2 ranks, each with one GPU, cuda:0",
    "a_gpu_too_many_for_this_rank": "device cuda:17: this world has 2 ranks",
    "allocator": "torch.cuda.caching_allocator_alloc is not simulated: run this program on a GPU",
    "shared_with_a_process": "reduce_tensor: memory is not shared between processes by CUDA here",
    "a_kernel_in_cuda": "torch.cuda._compile_kernel is not simulated: run this program on a GPU",
    "a_function_in_cuda": "Jiterator is only supported on CUDA and ROCm GPUs, none are available",
    "a_message": "torch.distributed.send (messages with tags) is not simulated: use a GPU",
    "with_an_argument": "main() is called without arguments, as by torchrun: missing a required",
    "a_generator": "main() returned a generator, and has run nothing: make it a function",
    "a_coroutine": "main() returned a coroutine, and has run nothing: make it a function",
    "an_operator_of_nvshmem": "'symm_mem::nvshmem_put' with arguments from the 'CPU' backend: this",
    "an_operator_of_a_missing_library": "153: no imported library defines torch.ops.a_library_tha",
    "rendezvous_of_an_ordinary_tensor": "158: rendezvous of a tensor of shape (4,) that is not sy",
    "several_gpus": "gpu_only.py:162: ",  # another sentence once torch.cuda.comm was imported
    "several_gpus_by_another_name": "166: torch.cuda.comm.gather: each rank has one GPU here; use",
    "several_gpus_by_a_name_of_its_own": "torch.cuda.comm.reduce_add: each rank has one GPU here;",
    "nccl_itself": "has no attribute '_nccl_all_reduce': this needs a GPU, and is not simulated",
}
CLEAN = ("with_rendezvous", "notes_for_a_profiler", "any_accelerator", "devices", "compiled")


def checked(name: str) -> tuple[int, str]:
    target = f"{PROGRAMS}:{name}"
    found = CliRunner().invoke(app, ["check", target, "--torch", "--world", "2", "--schedules=1"])
    return found.exit_code, found.output.replace("\n", " ")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence_and_status_2(name: str) -> None:
    status, output = checked(name)
    assert REFUSED[name] in output
    assert status == 2


@pytest.mark.parametrize("name", CLEAN)
def test_what_has_a_meaning_here_is_clean(name: str) -> None:
    status, output = checked(name)
    assert status == 0, output


def test_a_script_finds_its_neighbours_and_no_arguments_of_ours(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("NUMBER = 3\n")
    path = tmp_path / "with_arguments.py"
    lines = ["import argparse", "import sys", "from beside_the_script import NUMBER", "def main():",
             "    given = argparse.ArgumentParser().parse_args()",
             "    assert sys.argv[0].endswith('with_arguments.py') and NUMBER == 3"]  # fmt: skip
    path.write_text("\n".join(lines))
    before = sys.argv
    found = CliRunner().invoke(app, ["check", f"{path}:main", "--torch", "--schedules=1"])
    assert found.exit_code == 0, found.output
    assert sys.argv is before
    sys.path.remove(str(tmp_path))


def test_a_missing_import_of_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import a_library_that_nobody_has\ndef main(): pass\n")
    found = CliRunner().invoke(app, ["check", f"{path}:main", "--torch"])
    assert "script.py:1: ModuleNotFoundError: No module named 'a_library" in found.output
    assert found.exit_code == 2
