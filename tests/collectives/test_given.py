"""What else collectives take: ReduceOp, complex numbers, unequal parts, strided inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sundog
from sundog import testing
from sundog.collectives._copy import Config
from sundog.errors import RankMismatch
from sundog.ops.dispatch import check_contiguous
from sundog.tools.check.mutation import find_mutants, mutate

Run = Callable[..., list]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    """Random, other values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 7), dtype=dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_complex_sums_and_averages(run: Run, size: int) -> None:
    shape = (4 * size, 3)

    def main(world: sundog.World) -> list[Any]:
        x = part(world.rank, shape).to(world.device)
        out = torch.empty_like(x)
        assert world.all_reduce(x, "avg", out) is out
        later = world.all_reduce(x, async_op=True).wait()
        scattered = world.reduce_scatter(x)
        reduced = world.reduce(x, size - 1)
        found = [world.all_reduce(x), out, later, scattered, reduced]
        return [None if each is None else each.cpu() for each in found]

    results = run(main, size)
    total = torch.stack([part(rank, shape).to(torch.complex128) for rank in range(size)]).sum(0)
    for rank, (summed, mean, later, scattered, reduced) in enumerate(results):
        assert summed.dtype == torch.complex64
        torch.testing.assert_close(summed, total.to(torch.complex64))
        torch.testing.assert_close(mean, (total / size).to(torch.complex64))
        assert torch.equal(later, summed)
        assert torch.equal(scattered, summed.chunk(size)[rank])
        assert (reduced is None) == (rank != size - 1)
    assert torch.equal(results[-1][-1], results[-1][0])


def test_complex_numbers_that_cannot_be_reduced(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = part(0, (4,)).to(world.device)
        with pytest.raises(ValueError, match=r"no reduction of torch\.complex64"):
            world.all_reduce(x, "max")
        with pytest.raises(ValueError, match=r"all_reduce: x is of torch\.complex64 and out of"):
            world.all_reduce(x, out=torch.zeros(4, device=world.device))
        with pytest.raises(ValueError, match="resolve_conj"):
            world.all_reduce(x.conj())

    run(main, 2)


def test_values_of_reduce_op(run: Run) -> None:
    named = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}

    def main(world: sundog.World) -> None:
        x = part(world.rank, (12,), torch.float32).to(world.device)
        for name, value in named.items():
            op = getattr(dist.ReduceOp, value)
            wanted = world.all_reduce(x, name)
            assert torch.equal(world.all_reduce(x, op), wanted), name
            assert torch.equal(world.all_reduce(x, dist.ReduceOp(op)), wanted), name
            assert torch.equal(world.reduce_scatter(x, op), wanted.chunk(2)[world.rank]), name
            reduced = world.reduce(x, 0, op)
            assert reduced is None or torch.equal(reduced, wanted), name
        with pytest.raises(ValueError, match="op 'bxor' is not known"):
            world.all_reduce(x, dist.ReduceOp.BXOR)

    run(main, 2)


SPLITS = {1: [3], 2: [0, 5], 3: [2, 0, 7], 4: [1, 4, 0, 2], 8: [1, 0, 2, 3, 0, 1, 1, 4]}


@pytest.mark.parametrize("size", SPLITS)
def test_unequal_parts_are_gathered(run: Run, size: int) -> None:
    splits = SPLITS[size]
    kinds = (torch.float32, torch.uint8) if size < 8 else (torch.bfloat16,)

    def rows(rank: int, dtype: torch.dtype) -> torch.Tensor:
        return (100 * part(rank, (splits[rank], 3), torch.float32)).abs().to(dtype)

    def main(world: sundog.World) -> list[torch.Tensor]:
        made = [rows(world.rank, dtype).to(world.device) for dtype in kinds]
        found = [world.all_gather(x, splits=splits) for x in made]
        out = torch.empty_like(found[0])
        assert world.all_gather(made[0], out, splits=splits) is out
        later = world.all_gather(made[0], splits=splits, async_op=True).wait()
        assert torch.equal(out, found[0])
        assert torch.equal(later, found[0])
        return [each.cpu() for each in found]

    for result in run(main, size):
        for dtype, out in zip(kinds, result, strict=True):
            assert torch.equal(out, torch.cat([rows(rank, dtype) for rank in range(size)]))


@pytest.mark.sim_only
def test_unequal_parts_are_clean() -> None:
    """New sizes through the same boxes, with nothing between the calls."""

    def main(world: sundog.World) -> list[int]:
        found = []
        for splits in ([1, 3], [4, 0], [2, 2]):
            x = torch.full((splits[world.rank],), world.rank + 1)
            found.append(world.all_gather(x, splits=splits))
        return [int(each.sum()) for each in found]

    assert testing.check(main, 2, schedules=4).results == [[7, 4, 6]] * 2


def test_wrong_splits(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.zeros(2, device=world.device)
        with pytest.raises(ValueError, match=r"x has 2 rows, but splits \[3, 3\] says 3"):
            world.all_gather(x, splits=[3, 3])
        with pytest.raises(ValueError, match="must be 2 numbers from 0 on"):
            world.all_gather(x, splits=[2])
        with pytest.raises(ValueError, match="algo 'push' takes equal parts"):
            world.all_gather(x, splits=[2, 2], algo="push")
        with pytest.raises(
            RankMismatch, match=r"rank 0 passed splits \[2, 3\] and rank 1 \[9, 2\]"
        ):
            world.all_gather(x, splits=[9, 2] if world.rank else [2, 3])

    run(main, 2)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "a column": lambda x: x[:, 1],
    "every other": lambda x: x[::2, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3),
    "reversed twice": lambda x: x.flip(0).t()[:, 2:],
}
CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all_reduce": lambda world, x: world.all_reduce(x),
    "all_gather": lambda world, x: world.all_gather(x),
    "all_gather of parts": lambda world, x: world.all_gather(x, splits=[x.shape[0]] * world.size),
    "reduce_scatter": lambda world, x: world.reduce_scatter(torch.cat([x] * world.size, -1).t()),
    "all_to_all": lambda world, x: world.all_to_all(torch.cat([x] * world.size, -1).t()),
    "broadcast": lambda world, x: world.broadcast(x, world.size - 1),
    "reduce": lambda world, x: world.reduce(x, 0),
    "gather": lambda world, x: world.gather(x, 0),
    "scatter": lambda world, x: world.scatter(torch.cat([x] * world.size, -1).t()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_strided_input_has_the_result_of_its_contiguous_copy(run: Run, name: str) -> None:
    def main(world: sundog.World) -> None:
        for view in STRIDED.values():
            for dtype in (torch.float32, torch.complex64):
                if dtype.is_complex and name != "all_reduce":
                    continue
                x = view(part(world.rank, (6, 8), dtype).to(world.device))
                x = x if x.dim() == 2 else x[:, None].expand(-1, 2)
                found, wanted = CALLS[name](world, x), CALLS[name](world, x.contiguous())
                assert (found is None) == (wanted is None)
                if found is not None:
                    assert found.is_contiguous()
                    assert torch.equal(found, wanted)

    run(main, 3)


def test_an_input_that_is_missing_is_named() -> None:
    """Worlds over several machines ask this way; an output may be missing."""
    with pytest.raises(ValueError, match="all_reduce: x is a NoneType, expected a tensor"):
        check_contiguous("all_reduce", x=None, out=None)
    check_contiguous("all_reduce", x=torch.zeros(2), out=None)


def test_explain_names_the_copy_of_a_strided_input(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(6, 8, device=world.device)
        world.all_reduce(x.t(), explain=True)
        world.all_reduce(x, explain=True)
        world.matmul_all_reduce(x.view(2, 3, 8).transpose(0, 1), x.t(), explain=True)

    run(main, 2)
    told = capfd.readouterr().out
    copied = "x of shape (8, 6) and strides (1, 8) is not contiguous and goes through a copy of 192"
    assert told.count("is not contiguous") == 2
    assert f"all_reduce: {copied} bytes" in told
    assert "matmul_all_reduce: a of shape (3, 2, 8) and strides (8, 24, 1) is not" in told


def test_strided_tensors_are_sent_and_differentiated(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = part(world.rank, (4, 6), torch.float32).to(world.device)
        sent = world.send(x.t(), 1 - world.rank, async_op=True)
        found = world.recv(torch.empty(6, 4, device=world.device), 1 - world.rank)
        sent.wait()
        assert torch.equal(found.cpu(), part(1 - world.rank, (4, 6), torch.float32).t())
        x.requires_grad_()
        (world.all_reduce(x.t()) * 3).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))

    run(main, 2)


def _unequal(world: sundog.World) -> None:
    """One part is longer than all slots of its mail: only its sender waits for an empty one."""
    for splits in ((30, 0), (0, 3)):
        parts = [torch.arange(37.0 * n).view(n, 37) + 1000 * r for r, n in enumerate(splits)]
        config = Config(512, world.size, 1)
        out = world.all_gather(parts[world.rank], splits=list(splits), config=config)
        assert torch.equal(out, torch.cat(parts))


@pytest.mark.sim_only
def test_no_mutant_of_an_unequal_gathers_slots_survives() -> None:
    found, report = find_mutants(_unequal, 2)
    assert report.findings == []
    slots = [m for m in found if m.owner == "_mail_kernel" and "-" in m.diff and "slot," in m.diff]
    assert len(slots) >= 5
    survived = [o for o in mutate(_unequal, 2, slots, schedules=10) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)


def awkward(kind: str, rank: int) -> torch.Tensor:
    """Contiguous to torch, which yet refuses to view it as words: by its stride or its offset."""
    if kind == "one element with a stride":
        return torch.tensor([[rank + 0.5, 9.0]], dtype=torch.float64)[:, 0]
    if kind == "an empty part of bytes":
        return torch.full((4 * rank + 3,), rank, dtype=torch.int8)[3:]
    base = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=1)
    shift = -base.data_ptr() % 4  # the address is a multiple of 4, its place in the storage is not
    return base[shift or 4 :][:8].fill_(rank + 1)


@pytest.mark.sim_only
@pytest.mark.parametrize(
    "kind", ["one element with a stride", "an empty part of bytes", "a storage at an odd address"]
)
def test_tensors_that_torch_does_not_view_as_words(run: Run, kind: str) -> None:
    def main(world: sundog.World) -> None:
        parts = [awkward(kind, rank) for rank in range(world.size)]
        splits = [len(each) for each in parts]
        given = {"splits": splits} if "empty" in kind else {}
        found = world.all_gather(parts[world.rank], **given)
        assert found.tolist() == torch.cat(parts).tolist()

    run(main, 2)
