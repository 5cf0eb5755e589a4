"""torch.distributed, symmetric memory and torch.cuda as a rank's program sees them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symm_mem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import Stream
from torch.cuda import current_stream as stream_of_now
from torch.cuda import synchronize as wait_for_gpu
from torch.distributed import init_process_group as begin_group
from torch.distributed.device_mesh import init_device_mesh

import sundog
from sundog.compat.rank import as_rank
from sundog.errors import SundogError
from sundog.tools.check.schedules import check


def ranks(main: Callable[[int], Any], size: int = 3, backend: str = "sim") -> list[Any]:
    def program() -> Any:
        dist.init_process_group("nccl")
        return main(dist.get_rank())

    return sundog.run(program, size, backend, torch=True)


BACKENDS = pytest.mark.parametrize("backend", ["sim", "shm"])  # threads, and processes


@BACKENDS
def test_collectives_are_torchs(backend: str) -> None:
    def main(rank: int) -> list[Any]:
        x = torch.arange(6.0, device="cuda") + rank
        total = x.clone()
        dist.all_reduce(total)
        whole = torch.empty(18, device="cuda")
        dist.all_gather_into_tensor(whole, x)
        parts = [torch.empty(6, device="cuda") for _ in range(3)]
        dist.all_gather(parts, x)
        assert torch.equal(torch.cat(parts), whole)
        part = torch.empty(2, device="cuda")
        dist.reduce_scatter_tensor(part, x)
        dist.broadcast(x, 1)
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        return [total.tolist(), whole.tolist(), part.tolist(), x.tolist(), objects]

    base = [float(n) for n in range(6)]
    total = [3 * n + 3 for n in base]
    whole = [n + r for r in range(3) for n in base]
    for rank, found in enumerate(ranks(main, 3, backend)):
        assert found[0] == total
        assert found[1] == whole
        assert found[2] == total[2 * rank : 2 * rank + 2]
        assert found[3] == [n + 1 for n in base]
        assert found[4] == [{"rank": r} for r in range(3)]


def test_reduce_scatter_rounds_in_the_order_of_a_ring() -> None:
    def main(rank: int) -> float:
        x = torch.full((3,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16, device="cuda")
        part = torch.empty(1, dtype=torch.bfloat16, device="cuda")
        dist.reduce_scatter_tensor(part, x)
        return part.item()

    # 1 + 1 + 256, and 1 + 256 + 1, whose first sum is rounded to 256
    assert ranks(main) == [258.0, 256.0, 256.0]


def test_functional_collectives_are_torchs() -> None:
    def main(rank: int) -> list[Any]:
        x = torch.arange(3.0, device="cuda") + rank
        group = dist.group.WORLD
        whole = functional.all_gather_tensor(x, 0, group)
        part = functional.reduce_scatter_tensor(x, "sum", 0, group)
        return [functional.all_reduce(x, "sum", group).tolist(), whole.tolist(), part.tolist()]

    total = [3.0, 6.0, 9.0]
    whole = [0.0, 1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
    assert ranks(main) == [[total, whole, [total[r]]] for r in range(3)]


@pytest.mark.parametrize("kind", ["HashStore", "FileStore"])
def test_group_takes_torchs_keywords(kind: str, tmp_path: Path) -> None:
    def main() -> tuple[int, int]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        file = (str(tmp_path / "store"), size) if kind == "FileStore" else ()
        store = getattr(dist, kind)(*file)
        dist.init_process_group(
            backend="nccl", init_method=None, rank=rank, world_size=size, store=store
        )
        store.set(f"mine{rank}", "here")
        assert store.get(f"mine{rank}") == b"here"
        return dist.get_rank(), dist.get_world_size()

    assert sundog.run(main, 2, "sim", torch=True) == [(0, 2), (1, 2)]


@BACKENDS
def test_groups_are_each_ranks_own(backend: str) -> None:
    def main(rank: int) -> Any:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[rank // 2]
        x = torch.tensor([rank])
        dist.all_reduce(x, group=mine)
        return x.item(), dist.get_rank(mine), dist.get_world_size(mine), mine.group_name

    assert ranks(main, 4, backend) == [
        (1, 0, 2, "1"),
        (1, 1, 2, "1"),
        (5, 0, 2, "2"),
        (5, 1, 2, "2"),
    ]


@BACKENDS
def test_handle_reaches_the_peers_memory(backend: str) -> None:
    def main(rank: int) -> Any:
        x = symm_mem.empty(4, 2, dtype=torch.int32, device="cuda").fill_(rank)
        assert symm_mem.is_symm_mem_tensor(x)
        assert symm_mem.is_symm_mem_enabled_for_group(dist.group.WORLD.group_name)
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        handle.barrier()
        after = (rank + 1) % 3
        seen = handle.get_buffer(after, (4, 2), torch.int32).sum().item()
        assert handle.get_remote_tensor(after, (8,), torch.int32).sum().item() == seen
        dist.barrier()  # every rank has taken its signals
        assert handle.get_signal_pad(after).eq(0).all()
        assert handle.buffer_ptrs[rank] == x.data_ptr()
        workspace = symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, 64)
        assert workspace is symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, 32)
        return seen, handle.rank, handle.world_size

    assert ranks(main, 3, backend) == [(8, 0, 3), (16, 1, 3), (0, 2, 3)]


@BACKENDS
def test_signals_order_two_ranks(backend: str) -> None:
    def main(rank: int) -> Any:
        x = symm_mem.empty(4, dtype=torch.int32, device="cuda").zero_()
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        handle.barrier()
        if rank == 0:
            handle.get_buffer(1, (4,), torch.int32).fill_(7)
            handle.put_signal(1)
        if rank == 1:
            handle.wait_signal(0)
        return x.tolist()

    assert ranks(main, 2, backend) == [[0] * 4, [7] * 4]


@BACKENDS
def test_streams_and_events_order_work(backend: str) -> None:
    def main(rank: int) -> Any:
        flag = torch.zeros(2, dtype=torch.int32, device="cuda")
        x = symm_mem.empty(4, dtype=torch.int32, device="cuda").fill_(rank)
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        side = torch.cuda.Stream(priority=-1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            handle.stream_write_value32(flag, offset=1, val=5)
            event = side.record_event()
        torch.cuda.current_stream().wait_event(event)
        torch.cuda.synchronize()
        return flag.tolist()

    assert ranks(main, 2, backend) == [[0, 5]] * 2


def test_a_program_may_have_torchs_functions_by_name() -> None:
    """A script that says `from torch.cuda import Stream` has it before its ranks begin."""

    def main() -> Any:
        begin_group("nccl")
        side = Stream()
        side.wait_stream(stream_of_now())
        torch.cuda.set_stream(side)
        assert stream_of_now() == side
        wait_for_gpu()
        return dist.get_rank()

    assert sundog.run(main, 2, "sim", torch=True) == [0, 1]
    assert begin_group is dist.init_process_group
    assert Stream is torch.cuda.Stream


def test_polls_of_torchs_own_barrier_explain_nothing() -> None:
    """A wrong result has its cause in the program, not in what stands for torch's kernels."""

    def main() -> None:
        dist.init_process_group("nccl")
        x = symm_mem.empty(4, dtype=torch.int32, device="cuda")
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        for step in range(2):
            x.fill_(step)
            theirs = handle.get_buffer((handle.rank + 1) % 2, (4,), torch.int32).clone()
            handle.barrier()
            if theirs.tolist() != [step] * 4:
                raise AssertionError

    report = check(as_rank(main), 2, schedules=6)
    assert any(each.kind == "wrong result" for each in report.findings), report
    assert "stream_kernels.py" not in str(report)
    assert ": raise AssertionError" in str(report)  # the line, where there is no message


def test_a_mesh_gives_groups() -> None:
    def main() -> Any:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
        x = torch.full((1,), float(dist.get_rank()), device="cuda")
        dist.all_reduce(x, group=mesh.get_group("columns"))
        return x.item()

    assert sundog.run(main, 4, "sim", torch=True) == [1.0, 1.0, 5.0, 5.0]


def test_the_current_device_is_the_ranks() -> None:
    def main(rank: int) -> Any:
        with torch.cuda.device(rank):
            x = torch.ones(2, device="cuda")
        x.record_stream(torch.cuda.current_stream())
        return x.get_device(), torch.cuda.current_device()

    assert ranks(main, 2) == [(0, 0), (1, 1)]


def test_a_tensor_is_on_the_ranks_device() -> None:
    def main(rank: int) -> Any:
        x = torch.ones(2).cuda().to("cuda:0")
        y = torch.zeros(2, device=x.device)
        kept = y.cpu()
        y += 1
        assert torch.cuda.device_count() == 2
        return x.is_cuda, str(x.device), kept.tolist()

    assert ranks(main, 2) == [(True, f"cuda:{r}", [0.0, 0.0]) for r in range(2)]


def test_views_of_peers_and_fake_tensors_access_nothing() -> None:
    def main() -> None:
        dist.init_process_group("nccl")
        x = symm_mem.empty(4, dtype=torch.float32, device="cuda").fill_(1)
        group: Any = dist.group.WORLD
        theirs = torch.ops.symm_mem.get_remote_tensors(x, group.group_name)
        assert len(theirs) == 2
        with FakeTensorMode() as mode:
            assert (torch.empty(2) + 1).shape == (2,)
            fake = mode.from_tensor(x)
            imagined = torch.ops.symm_mem.get_remote_tensors(fake, group.group_name)
            assert [type(each) for each in imagined] == [type(fake)] * 2

    report = check(as_rank(main), 2, schedules=2)
    assert not report.findings + report.remarks, report


def test_torchs_compiler_asks_the_rank_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    interface: Any = ModuleType("torch._dynamo.device_interface")
    original = staticmethod(torch.cuda.get_device_properties)
    interface.CudaInterface = type("CudaInterface", (), {"get_device_properties": original})
    monkeypatch.setitem(sys.modules, interface.__name__, interface)

    def main(rank: int) -> Any:
        return interface.CudaInterface.get_device_properties("cuda").major

    assert ranks(main, 1) == [9]
    assert interface.CudaInterface.get_device_properties is torch.cuda.get_device_properties


def test_what_has_no_meaning_is_said() -> None:
    def timing(rank: int) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        end.record()
        begin.elapsed_time(end)

    with pytest.raises(SundogError, match="keeps no time"):
        ranks(timing, 1)

    def not_symmetric(rank: int) -> None:
        symm_mem.rendezvous(torch.zeros(4, device="cuda"), dist.group.WORLD)

    with pytest.raises(RuntimeError, match="that is not symmetric: allocate it with"):
        ranks(not_symmetric, 1)

    def other_size() -> None:
        dist.init_process_group("nccl", world_size=8)

    with pytest.raises(SundogError, match="run it with --world 8"):
        sundog.run(other_size, 2, "sim", torch=True)

    with pytest.raises(ValueError, match="this world is on cuda:1: use backend 'sim' or 'shm'"):
        as_rank(other_size)(SimpleNamespace(device=torch.device("cuda", 1)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda handle: handle.get_buffer(2, (1,), torch.float32), "rank 2: the group of this han"),
        (
            lambda handle: handle.put_signal(-1),
            "rank -1: the group of this handle has ranks 0 to 1",
        ),
        (lambda handle: handle.wait_signal(0, channel=-1), "channel -1: a signal pad of"),
        (lambda handle: handle.barrier(channel=10**6), "has channels 0 to"),
    ],
)
def test_ranks_and_channels_that_are_not_there(call: Any, said: str) -> None:
    def main() -> None:
        dist.init_process_group("nccl")
        assert dist.group.WORLD is not None
        x = symm_mem.empty(4, dtype=torch.float32, device=torch.device("cuda"))
        with pytest.raises(ValueError, match=said):
            call(symm_mem.rendezvous(x, dist.group.WORLD))

    report = check(as_rank(main), 2, schedules=1)
    assert not report.findings, report


def test_a_group_of_ranks_that_are_not_there() -> None:
    def main() -> None:
        dist.init_process_group("nccl")
        with pytest.raises(ValueError, match=r"new_group.*ranks 0 to 1; run it with --world 6"):
            dist.new_group([0, 5])

    report = check(as_rank(main), 2, schedules=1)
    assert not report.findings, report
