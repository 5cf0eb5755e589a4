"""Programs that a CPU cannot run as they are: each asks for something that only a GPU has."""

from __future__ import annotations

import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from cuda.bindings import driver  # type: ignore[import-not-found]


@triton.jit
def read_the_peer(table, out):
    theirs = tl.load(table + 1).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(theirs))


def unknown_driver_call() -> None:
    dist.init_process_group("nccl")
    driver.cuMemHostRegister(1, 2, 3)


def unknown_runtime_call() -> None:
    dist.init_process_group("nccl")
    torch.cuda.cudart()


def shared_by_cuda() -> None:
    dist.init_process_group("nccl")
    torch.ones(3, device="cuda").untyped_storage()._share_cuda_()


def graph() -> None:
    dist.init_process_group("nccl")
    torch.cuda.CUDAGraph()


def time() -> None:
    dist.init_process_group("nccl")
    torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True))


def missing_import() -> None:
    import a_library_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401


def without_rendezvous() -> None:
    """Exchange addresses by hand: on GPUs they mean nothing in another process."""
    dist.init_process_group("nccl")
    x = symm_mem.empty(4, dtype=torch.float32, device="cuda").fill_(1)
    addresses = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, x.data_ptr())
    read_the_peer[(1,)](torch.tensor(addresses), torch.empty(1))
    dist.barrier()


def ordinary_tensor() -> None:
    """Do the same with a tensor that is not symmetric at all."""
    dist.init_process_group("nccl")
    x = torch.ones(4, device="cuda")
    addresses = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, x.data_ptr())
    read_the_peer[(1,)](torch.tensor(addresses), torch.empty(1))
    dist.barrier()


def with_rendezvous() -> None:
    dist.init_process_group("nccl")
    x = symm_mem.empty(4, dtype=torch.float32, device="cuda").fill_(1)
    handle = symm_mem.rendezvous(x, dist.group.WORLD)
    dist.barrier()
    read_the_peer[(1,)](torch.tensor(handle.buffer_ptrs), torch.empty(1))
    dist.barrier()


def notes_for_a_profiler() -> None:
    """Note ranges, and define a kind of graph that is never made: torch's compiler does."""
    dist.init_process_group("nccl")
    assert issubclass(type("Graph", (torch.cuda.CUDAGraph,), {}), torch.cuda.CUDAGraph)
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()


def profiler() -> None:
    """Note times. torch's profiler crashes where another thread has begun one."""
    dist.init_process_group("nccl")
    with torch.profiler.profile():
        torch.ones(3, device="cuda")


def benchmark() -> None:
    triton.testing.do_bench(lambda: None)


def spawned() -> None:
    torch.multiprocessing.spawn(print, nprocs=2)


def started() -> None:
    multiprocessing.Process(target=print).start()


def store() -> None:
    """Meet at a store: the first rank would wait for the others, and nobody would run them."""
    dist.TCPStore("localhost", 29511, 2, True)


def file_store() -> None:
    """Wait for what another rank writes to a file: nobody would run that rank."""
    dist.FileStore("/dev/null", 2).get("nobody's")


def nccl_itself() -> None:
    torch.cuda.nccl.all_reduce([torch.ones(3, device="cuda")])


def a_kernel_in_cuda() -> None:
    torch.cuda._compile_kernel("__global__ void k() {}", "k")


def a_function_in_cuda() -> None:
    twice = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return 2 * x; }")
    twice(torch.ones(3, device="cuda"))


def a_message() -> None:
    dist.init_process_group("nccl")
    dist.isend(torch.ones(2, device="cuda"), 1 - dist.get_rank())


def with_an_argument(world: object) -> None:
    pass


def a_generator() -> object:
    yield 1


async def a_coroutine() -> None:
    pass


def an_operator_of_nvshmem() -> None:
    dist.init_process_group("nccl")
    torch.ops.symm_mem.nvshmem_put(torch.ones(3, device="cuda"), 1)


def an_operator_of_a_missing_library() -> None:
    torch.ops.a_library_that_nobody_has.reduce(torch.ones(3, device="cuda"))


def rendezvous_of_an_ordinary_tensor() -> None:
    dist.init_process_group("nccl")
    symm_mem.rendezvous(torch.ones(4, device="cuda"), dist.group.WORLD)


def several_gpus() -> None:
    torch.cuda.comm.broadcast(torch.ones(3, device="cuda"), [0, 1])


def several_gpus_by_another_name() -> None:
    torch.nn.parallel.comm.gather([torch.ones(3, device="cuda")])


def several_gpus_by_a_name_of_its_own() -> None:
    from torch.cuda.comm import reduce_add

    reduce_add([torch.ones(3, device="cuda"), torch.ones(3, device="cuda")])


def any_accelerator() -> None:
    """Name the device as programs do that are for every kind of GPU, and use autocast."""
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert device.type == "cuda"
    assert torch.accelerator.device_count() == int(os.environ["WORLD_SIZE"])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = torch.ones(4, 4, device=device) @ torch.ones(4, 4, device=device)
    assert product.dtype == torch.bfloat16
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()


def a_gpu_too_many() -> None:
    torch.ones(3, device="cuda:2")


def a_gpu_too_many_by_number() -> None:
    torch.ones(3).to(2)


def a_gpu_too_many_for_this_rank() -> None:
    torch.cuda.set_device(17)


def devices() -> None:
    """Name devices, and ask tensors for theirs, as programs assert it before a kernel."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    assert (device.type, device.index, str(device)) == ("cuda", rank, f"cuda:{rank}")
    assert torch.device("cuda").type == "cuda"
    assert torch.device(f"cuda:{rank}") == device != torch.device("cpu")
    x = torch.ones(3, device=device)
    assert x.is_cuda
    assert x.device == device
    assert x.device.type == "cuda"
    copy = x.cpu()
    assert copy.device.type == x.to("cpu").device.type == "cpu"
    assert (copy.is_cpu, copy.is_cuda, x.is_cpu) == (True, False, False)
    assert (copy.get_device(), x.get_device()) == (-1, rank)
    assert copy.to(device).is_cuda
    assert copy.cuda().is_cuda
    assert not copy.is_cuda
    assert torch.device(rank) == device
    assert torch.ones(3, device=rank).to(rank).is_cuda
    assert torch.ones(3, device="cpu").device.type == x.to(torch.ones(1, device="cpu")).device.type
    assert torch.ones(3, device="cpu").pin_memory().is_cpu
    assert not torch.as_tensor(x, device="cpu").is_cuda
    assert x.is_cuda
    assert torch.ones(3, device="meta").device.type == "meta"
    with device:
        assert torch.ones(3).device == device
    torch.set_default_device(device)
    assert torch.ones(3).device == device
    torch.set_default_device(None)
    torch.manual_seed(3)
    expected = torch.rand(3)
    generator = torch.Generator(device=device).manual_seed(3)
    assert torch.equal(torch.rand(3, generator=generator, device=device), expected)
    assert torch.nn.Linear(2, 2).to(device)(torch.ones(2, device=device)).device == device


def allocator() -> None:
    torch.cuda.caching_allocator_alloc(16)


def shared_with_a_process() -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    reduce_tensor(torch.ones(3, device="cuda"))


def compiled() -> None:
    """Leave functions as they are: torch's first call of compile is not made for threads."""
    assert torch.compile(triton.cdiv) is triton.cdiv
    assert torch.compile(fullgraph=True)(triton.cdiv) is triton.cdiv
