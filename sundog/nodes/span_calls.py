"""The collectives of a world over machines, with the arguments of World's.

`algo` is "hierarchical" or, for reductions, "chain" (hierarchical.py says what their bits are);
"auto" is hierarchical, its config by the machine's description (pipeline.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..collectives import _given, _reduce
from ..collectives._reduce import accumulated
from ..collectives._unequal import check_pair, check_sums
from ..errors import RankMismatch
from ..fused._call import by_rows, check_matrices, check_tensors
from ..ops.dispatch import (
    ASYNC_STREAM,
    CallOptions,
    check_contiguous,
    check_out,
    is_same,
    on_stream,
    packed,
)
from . import hierarchical
from .pipeline import Levels, NodesConfig, SpanProblem, chosen

if TYPE_CHECKING:
    from .spanning import SpanningWorld

Algorithm = Callable[..., None]


def all_reduce(
    world: SpanningWorld, x: torch.Tensor, op: Any = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, async_op: bool = False,
    explain: bool = False,
) -> Any:  # fmt: skip
    """Reduce as World.all_reduce does, over all machines."""
    options = CallOptions(algo, config, async_op, explain)
    if _reduce.is_unusual(x, op):
        op = _given.name_of(op)
        if _given.has_views(x, op):
            return _given.by_views(all_reduce, world, x, out, op=op, **options._asdict())
    return _reduced("all_reduce", world, x, op, out, options)


def reduce(
    world: SpanningWorld, x: torch.Tensor, dst: int, op: Any = "sum",
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, async_op: bool = False,
    explain: bool = False,
) -> Any:  # fmt: skip
    """Reduce as World.reduce does, by an all_reduce; only rank `dst` keeps the result."""
    dst = world._check_rank(dst)
    target = out if world.rank == dst else None
    options = CallOptions(algo, config, async_op, explain)
    if _reduce.is_unusual(x, op):
        op = _given.name_of(op)
        if _given.has_views(x, op):
            more = options._asdict()
            return _given.by_views(reduce, world, x, target, dst=dst, op=op, **more)
    result = _reduced("reduce", world, x, op, target, options, ("reduce to rank", dst))
    return result if async_op or world.rank == dst else None


def _reduced(
    name: str, world: SpanningWorld, x: torch.Tensor, op: str, out: torch.Tensor | None,
    options: CallOptions, what: tuple = (),
) -> Any:  # fmt: skip
    """Check and reduce; every rank gets the result. `what`: more that ranks must agree on."""
    x = _checked(name, world, x, out, options.explain)
    _reduce.check(name, op, x.dtype)
    if out is None:
        out = torch.empty_like(x)
    if not is_same(x, out):
        check_out(name, x, out, x.numel())
    known = {"hierarchical": hierarchical.all_reduce, "chain": hierarchical.all_reduce_chain}
    return _call(world, "all_reduce", known, options, x, out, (op,), what)


def reduce_scatter(
    world: SpanningWorld, x: torch.Tensor, op: Any = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, async_op: bool = False,
    explain: bool = False,
) -> Any:  # fmt: skip
    """Reduce as World.reduce_scatter does, over all machines."""
    options = CallOptions(algo, config, async_op, explain)
    if _reduce.is_unusual(x, op):
        op = _given.name_of(op)
        if _given.has_views(x, op) and x.dim():
            return _given.by_views(reduce_scatter, world, x, out, op=op, **options._asdict())
    x = _checked("reduce_scatter", world, x, out, explain)
    _reduce.check("reduce_scatter", op, x.dtype)
    length = x.shape[0] if out is None and x.dim() else x.numel()
    _check_divides(world, "reduce_scatter", x, length)
    if out is None:
        out = x.new_empty((length // world.size, *x.shape[1:]))
    check_out("reduce_scatter", x, out, x.numel() // world.size)
    known = {
        "hierarchical": hierarchical.reduce_scatter,
        "chain": hierarchical.reduce_scatter_chain,
    }
    return _call(world, "reduce_scatter", known, options, x, out, (op,))


def all_gather(
    world: SpanningWorld, x: torch.Tensor, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, async_op: bool = False,
    explain: bool = False, splits: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """Gather as World.all_gather does, over all machines."""
    if splits is not None:
        raise ValueError(
            "all_gather: splits do not span machines yet. Pad every rank's tensor to the longest "
            "one, or use all_to_all with in_splits and out_splits."
        )
    x = _checked("all_gather", world, x, out, explain)
    if out is None:
        shape = (world.size * x.shape[0], *x.shape[1:]) if x.dim() else (world.size,)
        out = x.new_empty(shape)
    check_out("all_gather", x, out, world.size * x.numel())
    options = CallOptions(algo, config, async_op, explain)
    return _call(world, "all_gather", {"hierarchical": hierarchical.all_gather}, options, x, out)


def broadcast(
    world: SpanningWorld, x: torch.Tensor, src: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, async_op: bool = False,
    explain: bool = False,
) -> Any:  # fmt: skip
    """Send as World.broadcast does, over all machines."""
    src = world._check_rank(src)
    x = _checked("broadcast", world, x, out, explain)
    if out is None:
        out = torch.empty_like(x)
    if not is_same(x, out):
        check_out("broadcast", x, out, x.numel())
    options = CallOptions(algo, config, async_op, explain)
    return _call(
        world, "broadcast", {"hierarchical": hierarchical.broadcast}, options, x, out, (src,)
    )


def all_to_all(
    world: SpanningWorld, x: torch.Tensor, out: torch.Tensor | None = None,
    in_splits: Sequence[int] | None = None, out_splits: Sequence[int] | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, async_op: bool = False,
    explain: bool = False,
) -> Any:  # fmt: skip
    """Exchange as World.all_to_all does, over all machines."""
    x = _checked("all_to_all", world, x, out, explain)
    options = CallOptions(algo, config, async_op, explain)
    if in_splits is not None or out_splits is not None:
        return _all_to_all_uneven(world, x, out, in_splits, out_splits, options)
    _check_divides(world, "all_to_all", x, x.shape[0] if x.dim() else 1)
    if out is None:
        out = torch.empty_like(x)
    check_out("all_to_all", x, out, x.numel())
    return _call(world, "all_to_all", {"hierarchical": hierarchical.all_to_all}, options, x, out)


def _all_to_all_uneven(
    world: SpanningWorld, x: torch.Tensor, out: torch.Tensor | None,
    in_splits: Sequence[int] | None, out_splits: Sequence[int] | None, options: CallOptions,
) -> Any:  # fmt: skip
    in_splits, out_splits = check_pair(world.size, in_splits, out_splits)
    rows, row = (x.shape[0], x.numel() // max(x.shape[0], 1)) if x.dim() else (1, 1)
    check_sums("in_splits", in_splits, rows, "x")
    target = x.new_empty((sum(out_splits), *x.shape[1:])) if out is None else out
    check_out("all_to_all", x, target, sum(out_splits) * row)
    _check_options(world, "all_to_all", ("hierarchical",), options)
    matrix = _matrix(world, in_splits, out_splits, row)

    def run() -> torch.Tensor:
        with world._naming("all_to_all"):
            hierarchical.all_to_all_uneven(world._levels, x, target, matrix, world.rank)
        return target

    world._refuse_in_capture("all_to_all", may_order=False)
    return on_stream(world.local, ASYNC_STREAM, run, x) if options.async_op else run()


def _matrix(
    world: SpanningWorld, in_splits: list[int], out_splits: list[int], row: int
) -> list[list[int]]:
    """Return all ranks' splits, in elements; raise RankMismatch where two ranks differ."""
    everyone = world.exchange((in_splits, out_splits), "splits")
    for i, (sent, _) in enumerate(everyone):
        for j, (_, expected) in enumerate(everyone):
            if sent[j] != expected[i]:
                raise RankMismatch(
                    f"all_to_all: rank {i} sends {sent[j]} rows to rank {j}, which expects "
                    f"{expected[i]}: in_splits[{j}] here must be out_splits[{i}] there"
                )
    return [[n * row for n in sent] for sent, _ in everyone]


def all_gather_matmul(
    world: SpanningWorld, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None, shard: str = "k",
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply as World.all_gather_matmul does, this machine's part while the rest arrives."""
    op, options = "all_gather_matmul", CallOptions(algo, config, False, explain)
    if shard not in ("k", "m"):
        raise ValueError(f"{op}: shard {shard!r}: expected 'k' or 'm'")

    def run(rows: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        product = Product(rows, b, bias, activation, out_dtype or rows.dtype, shard)
        m, k = rows.shape
        shape = (m, k * world.size) if shard == "k" else (m * world.size, k)
        return product.call(world, op, product.run, shape, room, options)

    times = world.size if shard == "m" else 1
    return _rows(world, op, (a, b, bias, out), explain, run, times)


def matmul_reduce_scatter(
    world: SpanningWorld, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply and add as World.matmul_reduce_scatter does, other machines' rows first.

    While the network has those, this machine's own rows are multiplied.
    """
    op, options = "matmul_reduce_scatter", CallOptions(algo, config, False, explain)

    def run(rows: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        product = Product(rows, b, bias, activation, out_dtype or rows.dtype)
        _check_divides(world, op, rows, rows.shape[0], "a")
        shape = rows.shape[0] // world.size, rows.shape[1]
        return product.call(world, op, product.run_scattered, shape, room, options)

    return _rows(world, op, (a, b, bias, out), explain, run, 1, world.size)


def matmul_all_reduce(
    world: SpanningWorld, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: NodesConfig | None = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply and add as World.matmul_all_reduce does, by a matmul_reduce_scatter and a gather."""
    op, options = "matmul_all_reduce", CallOptions(algo, config, False, explain)

    def run(rows: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        product = Product(rows, b, bias, activation, out_dtype or rows.dtype)
        return product.call(world, op, product.run_reduced, tuple(rows.shape), room, options)

    return _rows(world, op, (a, b, bias, out), explain, run)


# one call


def _checked(
    op: str, world: SpanningWorld, x: torch.Tensor, out: torch.Tensor | None, explain: bool
) -> torch.Tensor:
    """Return the input as kernels and the network read it. An output must already be so."""
    check_contiguous(op, **({} if out is None else {"out": out}))
    return packed(world.local, op, x, explain and world.rank == 0)


def _call(
    world: SpanningWorld, op: str, known: dict[str, Algorithm], options: CallOptions,
    x: torch.Tensor, out: torch.Tensor, arguments: tuple = (), what: tuple = (),
) -> Any:  # fmt: skip
    """Choose, agree once, run. `arguments` are the algorithm's, between x and out."""
    algo = _check_options(world, op, known, options)
    world._refuse_in_capture(op, may_order=True)
    problem = SpanProblem(op, x.numel() * x.element_size(), *world._levels.shape)
    config, why = chosen(problem, world.local, options.config)
    if options.explain and world.rank == 0:
        print(f"{op}: {algo} over {world.num_nodes} machines of {world.local.size} ranks, {why}")
    world._agree((op, x.numel(), x.dtype, *arguments, algo, config, *what))

    def run() -> torch.Tensor:
        with world._naming(op):
            if x.numel() or out.numel():
                known[algo](world._levels, x, *arguments, out, config)
        return out

    return on_stream(world.local, ASYNC_STREAM, run, x) if options.async_op else run()


def _check_options(
    world: SpanningWorld, op: str, known: Collection[str], options: CallOptions
) -> str:
    """Return the algorithm that runs; raise ValueError for options that none takes."""
    world.local._check_open()
    algo = "hierarchical" if options.algo == "auto" else options.algo
    if algo not in known:
        raise ValueError(f"{op}: algo {algo!r} is not known; there are: auto, {', '.join(known)}")
    if not isinstance(options.config, NodesConfig | None):
        raise ValueError(f"{op}: config {options.config!r} is not a {NodesConfig.__name__}")
    return algo


def _check_divides(
    world: SpanningWorld, op: str, x: torch.Tensor, length: int, name: str = "x"
) -> None:
    if length % world.size:
        raise ValueError(
            f"{op}: {name} of shape {tuple(x.shape)} does not split into {world.size} equal parts; "
            f"pad it to {-(-length // world.size) * world.size}"
        )


def _rows(
    world: SpanningWorld, op: str, tensors: tuple, explain: bool,
    run: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor], times: int = 1,
    slices: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Check a, b, bias and out, and run a product on a of [..., k] as rows, as World's ops do."""
    a, b, bias, out = tensors
    check_tensors(world.local, op, a=a, b=b, bias=bias, out=out)
    if a.dim() < 2:
        raise ValueError(f"{op}: a of shape {tuple(a.shape)}: expected two dimensions")
    if a.dim() == 2:
        return run(a, out)
    return by_rows(world.local, op, a, out, explain and world.rank == 0, run, times, slices)


@dataclass(frozen=True)
class Product:
    """Products over machines: the local part is multiplied while the network has the others'.

    Inside a machine it is the fused op. With shard "m" every machine's part gives rows of the
    output. With shard "k" it gives a partial product in float32, and these are added in the order
    of machines.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    out_dtype: torch.dtype
    shard: str = ""  # of all_gather_matmul

    def call(
        self, world: SpanningWorld, op: str, run: Algorithm, shape: tuple[int, ...],
        out: torch.Tensor | None, options: CallOptions,
    ) -> torch.Tensor:  # fmt: skip
        """Check the matrices and run it. `shape` has the output's rows and the rows of b."""
        a, b, bias, activation = self.a, self.b, self.bias, self.activation
        rows, k = shape
        out = check_matrices(op, a, b, k, bias, activation, out, rows, self.out_dtype)
        shards = (self.shard,) if self.shard else ()
        what = (tuple(a.shape), tuple(b.shape), *shards, activation, bias is not None)
        result: torch.Tensor = _call(world, op, {"hierarchical": run}, options, a, out, (), what)
        return result

    def run_scattered(
        self, levels: Levels, a: torch.Tensor, out: torch.Tensor, config: NodesConfig
    ) -> None:
        """Add, on each machine, its ranks' products of the rows that each machine's ranks own."""
        fused, own = levels.local.matmul_reduce_scatter, levels.between.node
        by_node = a.chunk(levels.between.count)
        sums = [torch.zeros_like(out) for _ in by_node]
        for node, rows in enumerate(by_node):
            if node != own:
                fused(rows, self.b, None, None, self.out_dtype, sums[node])
        coming = levels.between.all_to_all(torch.stack(sums))
        fused(by_node[own], self.b, None, None, self.out_dtype, sums[own])
        parts = list(coming.wait())
        parts[own] = sums[own]
        out.copy_(self._finished(accumulated("sum", parts).view(out.shape)))

    def run_reduced(
        self, levels: Levels, a: torch.Tensor, out: torch.Tensor, config: NodesConfig
    ) -> None:
        """Finish each row on one rank, then gather all rows, which cross the network twice."""
        rows = F.pad(a, (0, 0, 0, -len(a) % levels.size))
        mine = out.new_empty((len(rows) // levels.size, out.shape[1]))
        self.run_scattered(levels, rows, mine, config)
        whole = out.new_empty((len(rows), out.shape[1]))
        hierarchical.all_gather(levels, mine, whole, config)
        out.copy_(whole[: len(out)])

    def run(self, levels: Levels, a: torch.Tensor, out: torch.Tensor, config: NodesConfig) -> None:
        """Multiply this machine's part first, then the others', which arrive meanwhile."""
        coming = levels.between.all_gather(a.contiguous())
        own = levels.between.node
        if self.shard == "m":
            blocks = out.view(levels.between.count, -1, out.shape[1])
            self._rows(levels, a, blocks[own])
            for node, part in enumerate(coming.wait()):
                if node != own:
                    self._rows(levels, part, blocks[node])
            return
        mine = self._partial(levels, a, own)
        parts = coming.wait()
        sums = [mine if n == own else self._partial(levels, p, n) for n, p in enumerate(parts)]
        out.copy_(self._finished(sum(sums[1:], sums[0])))

    def _rows(self, levels: Levels, a: torch.Tensor, out: torch.Tensor) -> None:
        fused = levels.local.all_gather_matmul
        fused(a, self.b, self.bias, self.activation, self.out_dtype, "m", out)

    def _partial(self, levels: Levels, a: torch.Tensor, node: int) -> torch.Tensor:
        rows = self.b.chunk(levels.between.count)
        result: torch.Tensor = levels.local.all_gather_matmul(
            a, rows[node], None, None, torch.float32, "k"
        )
        return result

    def _finished(self, total: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            total = total + self.bias.float()
        return F.silu(total) if self.activation == "silu" else total
