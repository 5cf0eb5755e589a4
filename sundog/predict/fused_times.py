"""The time of every fused op's algorithm, composed of parts.py and collectives' models."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from .collective_times import Model, all_reduce_two_shot, reduce_scatter_direct
from .parts import (
    Part,
    Ranks,
    Round,
    Traffic,
    barrier,
    beside,
    copied,
    launch,
    product,
    resources,
    waves,
    words,
)

_GATHER = 32768  # bytes of a tile of a gather or of a sum
_AHEAD = 8  # tiles that a fetcher has in flight
_BLOCK = 8192  # elements of a tile of a collective after a product, and its warps
# A product's time in a kernel's loop, relative to _gemm.py's: fitted to docs/measured.
_DIRECT = 0.95  # all ranks read one A
_CROWDED = 3.0  # ranks with the same order of peers drift apart: fitted to simulated time
_FLAGGED = 1.03  # flags between the blocks of a row, and a ticket per tile
_CUBLAS_TILES = ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64), (64, 32))
_COPY_S = 3.4e-6  # added by a copy and its words to the bytes' time: measured, docs/fused.md
_PUSHED = 1.02  # the output goes to its owner by plain stores


def _item(problem: Any) -> int:
    return int(problem.dtype.itemsize)


def _product(problem: Any, config: Any, ranks: Ranks, programs: int, factor: float = 1.0) -> Part:
    part = product(
        ranks, (problem.m, problem.n, problem.k), (config.tile_m, config.tile_n), programs
    )
    return part._replace(seconds=part.seconds * factor)


def _gathered(problem: Any, ranks: Ranks, programs: int, own: bool, ahead: int = 1) -> Part:
    """Copy all of A to one place on each rank; with `own`, its own part too. A program has `ahead`
    tiles in flight at once."""
    whole = problem.m * problem.k * _item(problem)
    far = whole * (ranks.size - 1) / ranks.size
    moved = whole if own else far
    block = min(_GATHER, max(moved / programs, 1))
    first = moved / ranks.per_gpu  # ranks that share a GPU read the same tiles together
    traffic = Traffic(first, moved, moved - first, far)
    tile = Round(block, block, 1 / ahead, is_there=True)
    return copied(ranks, "gather", traffic, tile, waves(moved, programs * block))


def all_gather_matmul_barrier(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Expect a kernel that gathers A between two barriers; a plain product follows."""
    gather = _gathered(problem, ranks, config.programs, own=True)
    return [
        launch(ranks), barrier(ranks), gather, barrier(ranks), launch(ranks),
        _product(problem, config, ranks, config.programs),
    ]  # fmt: skip


def all_gather_matmul_direct(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Read blocks of A in place, once for every column of tiles.

    Along K, ranks that all begin with rank 0's shard crowd at one GPU's link.
    """
    part = _product(problem, config, ranks, config.programs, _DIRECT)
    if ranks.is_linked:
        far = problem.m * problem.k * _item(problem) * (ranks.size - 1) / ranks.size
        crowd = 1.0 if config.own_first or problem.shard == "m" else (ranks.size + 1) / _CROWDED
        crossed = Traffic(far, 0, read_there=crowd * far * math.ceil(problem.n / config.tile_n))
        tiles = math.ceil(problem.m / config.tile_m) * math.ceil(problem.n / config.tile_n)
        shards = ranks.size if problem.shard == "k" else 1  # each has its own blocks
        blocks = shards * math.ceil(problem.k / shards / config.tile_k)
        rounds = waves(tiles, config.programs) * blocks
        read = copied(ranks, "A over the link", crossed, Round(0, 0, is_there=True), rounds)
        part = beside("product", [part, read])
    return [launch(ranks), barrier(ranks), part, barrier(ranks)]


def all_gather_matmul_hbm_buffer(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Let some programs fetch and the others multiply what has arrived; or let all fetch first.

    A fetcher sets a flag after each of its rounds. Nothing is multiplied before the first flags (a
    rank's own part could be), and a round's share of the product is left when the last ones come.
    Then fetchers multiply as well.
    """
    fetchers = min(max(config.fetchers, config.first_fetchers), config.programs)
    workers = config.programs - fetchers
    rounds = _fetch_rounds(problem, config, ranks.size, fetchers) if workers else 1.0
    fetch = _gathered(problem, ranks, fetchers, own=False, ahead=_AHEAD)
    multiply = _product(problem, config, ranks, workers or config.programs, _FLAGGED)
    both = [part._replace(seconds=part.seconds * (1 - 1 / rounds)) for part in (fetch, multiply)]
    last = _product(problem, config, ranks, config.programs, _FLAGGED)
    return [
        launch(ranks), barrier(ranks), fetch._replace(seconds=fetch.seconds / rounds),
        beside("fetch and multiply", both), last._replace(seconds=last.seconds / rounds),
    ]  # fmt: skip


def _fetch_rounds(problem: Any, config: Any, size: int, fetchers: int) -> float:
    """Return how many flags a fetcher sets: each is for some blocks of a row of tiles."""
    m, k = problem.shard_shape
    rows, blocks, peers = math.ceil(m / config.tile_m), math.ceil(k / config.tile_k), size - 1
    rows, blocks = (rows, peers * blocks) if problem.shard == "k" else (peers * rows, blocks)
    return max(rows * waves(blocks, config.k_per_flag or blocks) / fetchers, 1.0)


def all_gather_matmul_copy_engine(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Let the copy engine fetch run by run; all programs multiply what has arrived."""
    others = ranks.size - 1
    rows, at_once = math.ceil(problem.shard_shape[0] / config.tile_m), others
    if problem.shard == "m":
        rows, at_once = rows * others, 1
    wave = max(config.programs // math.ceil(problem.n / config.tile_n), 1)  # rows of tiles
    runs = rows / config.run + 2 * math.log2(max(config.run / wave, 1))  # they grow and get shorter
    far = problem.m * problem.k * _item(problem) * others / ranks.size
    link, bound = ranks.hardware.link, "link" if ranks.is_linked else "memory"
    rate = ranks.hardware.gpu.copy_rate / 2 / ranks.per_gpu
    rate = (link.copy_rate or link.rate) if ranks.is_linked else rate
    copies = Part("copies", bound, far / rate + _COPY_S * runs * at_once)
    workers = _product(problem, config, ranks, config.programs, _FLAGGED)
    share = min(wave / math.ceil(problem.m / config.tile_m), 1.0)
    last = Part("last wave", workers.bound, workers.seconds * share)
    before = workers._replace(seconds=workers.seconds - last.seconds)
    both = beside("copy and multiply", [copies, before])
    return [launch(ranks), barrier(ranks), launch(ranks), both, last]


def _added(problem: Any, config: Any, ranks: Ranks, rows: float, copies: int) -> Part:
    """Read and add all ranks' partials of `rows` rows, and store the sum `copies` times."""
    n = rows * problem.n * _item(problem)
    block = min(_GATHER // 4, max(n / config.programs, 1))
    traffic = Traffic(n * ranks.size, n * copies, written_there=n * (copies - 1))
    tile = Round(block * ranks.size, block * copies)
    return copied(ranks, "sum", traffic, tile, waves(n, config.programs * block))


def _pushed(problem: Any, config: Any, ranks: Ranks, copies: int) -> Part:
    """Expect a product whose tiles go to their owners, or `copies` ranks, under the next one."""
    n = problem.m * problem.n * _item(problem)
    far = n * (ranks.size - 1) * (copies if copies > 1 else 1) / ranks.size
    # A program that stores does not multiply: only what its tile's stores take is added.
    tiles = math.ceil(problem.m / config.tile_m) * math.ceil(problem.n / config.tile_n)
    nbytes = config.tile_m * config.tile_n * _item(problem)
    rounds = waves(tiles, config.programs)
    traffic = Traffic(0, n * copies, written_there=far)
    tile = Round(0, nbytes * copies, 0.0)
    multiplied = _product(problem, config, ranks, config.programs, _PUSHED)
    if copies > 1:
        # Programs multiply for as long, so they all store at once; but links go on meanwhile.
        here = copied(ranks, "stores", Traffic(0, n * copies), tile, rounds)
        own = multiplied._replace(seconds=multiplied.seconds + here.seconds)
        links = [each for each in resources(ranks, traffic) if each.bound == "link"]
        first = multiplied.seconds / rounds
        busy = [each._replace(seconds=first + each.seconds) for each in links]
        return beside("product and stores", [own, *busy])
    stores = copied(ranks, "stores", traffic, tile, rounds)
    both = _stored_meanwhile(problem, config, multiplied, stores)
    return Part("product and stores", multiplied.bound, sum(p.seconds for p in both))


def matmul_reduce_scatter_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    rows = problem.m / ranks.size
    return [
        launch(ranks),
        _pushed(problem, config, ranks, 1),
        barrier(ranks),
        _added(problem, config, ranks, rows, 1),
    ]


def matmul_all_reduce_one_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    return [
        launch(ranks),
        _pushed(problem, config, ranks, ranks.size),
        barrier(ranks),
        _added(problem, config, ranks, problem.m, 1),
    ]


def matmul_all_reduce_two_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    rows = problem.m / ranks.size
    return [
        launch(ranks), _pushed(problem, config, ranks, 1), barrier(ranks),
        _added(problem, config, ranks, rows, ranks.size), barrier(ranks),
    ]  # fmt: skip


def _then(problem: Any, config: Any, ranks: Ranks, model: Model, numel: float) -> list[Part]:
    """Expect a plain product, then a collective with the config of large tensors."""
    inner = SimpleNamespace(numel=numel, dtype=problem.dtype, size=ranks.size)
    tiles = SimpleNamespace(block=_BLOCK, programs=ranks.num_sms, num_warps=16)
    multiplied = _product(problem, config, ranks, config.programs)
    return [launch(ranks), multiplied, *model(inner, tiles, ranks)]


def matmul_reduce_scatter_barrier(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    numel = problem.m * problem.n / ranks.size
    return _then(problem, config, ranks, reduce_scatter_direct, numel)


def matmul_all_reduce_barrier(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    numel = problem.m * problem.n
    return _then(problem, config, ranks, all_reduce_two_shot, numel)


def _by_cublas(model: Model) -> Model:
    """Expect the same with cuBLAS's product: of these tiles those that take the least time."""

    def parts(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
        def seconds(tile: tuple[int, int]) -> float:
            return product(ranks, (problem.m, problem.n, problem.k), tile, ranks.num_sms).seconds

        rows, cols = min(_CUBLAS_TILES, key=seconds)
        return model(
            problem, SimpleNamespace(tile_m=rows, tile_n=cols, programs=ranks.num_sms), ranks
        )

    return parts


def matmul_all_gather_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; products, each stored to all ranks under the next one; barrier."""
    stored = _stored_to_all(problem, config, ranks)
    multiplied = _product(problem, config, ranks, config.programs, _PUSHED)
    both = _stored_meanwhile(problem, config, multiplied, stored)
    return [launch(ranks), barrier(ranks), *both, barrier(ranks)]


def _stored_meanwhile(problem: Any, config: Any, multiplied: Part, stored: Part) -> list[Part]:
    """Expect a wave of tiles to be stored under the next one's product: the first comes alone."""
    tiles = math.ceil(problem.m / config.tile_m) * math.ceil(problem.n / config.tile_n)
    first = multiplied.seconds / waves(tiles, config.programs)
    rest = multiplied._replace(seconds=multiplied.seconds - first)
    return [multiplied._replace(seconds=first), beside("product and stores", [rest, stored])]


def matmul_all_gather_barrier(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Expect a plain product, then a gather between two barriers."""
    stored = _stored_to_all(problem, config, ranks)
    part = _product(problem, config, ranks, config.programs)
    return [launch(ranks), part, launch(ranks), barrier(ranks), stored, barrier(ranks)]


def _stored_to_all(problem: Any, config: Any, ranks: Ranks) -> Part:
    """Charge the stores of a rank's product to every rank."""
    size, product_bytes = ranks.size, float(problem.m * problem.n * _item(problem))
    block = min(_GATHER, max(product_bytes / config.programs, 1))
    traffic = Traffic(product_bytes, size * product_bytes, 0, 0, (size - 1) * product_bytes)
    rounds = waves(product_bytes, config.programs * block)
    return copied(ranks, "stores", traffic, Round(block, size * block), rounds)


# all-reduce and norm: a program has a row at a time


def _row(problem: Any) -> tuple[float, float]:
    """Return the bytes of a row of x, and of all outputs' rows."""
    kept = 1 + (not problem.quant or problem.both)
    row = float(problem.hidden * _item(problem))
    return row, kept * row + bool(problem.quant) * problem.hidden


def all_reduce_rms_norm_one_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Copy my rows to where all see them; barrier; read all, and the residual; normalise."""
    (row, out), size, tokens = _row(problem), ranks.size, problem.tokens
    rounds = waves(tokens, config.programs)
    shown = copied(ranks, "copy", Traffic(tokens * row, tokens * row), Round(row, row), rounds)
    far = tokens * row * (size - 1)
    traffic = Traffic(2 * tokens * row, tokens * out, far, far)
    tile = Round(row * (size + 1), out, is_there=True)
    normed = copied(ranks, "sum and norm", traffic, tile, rounds)
    return [launch(ranks), shown, barrier(ranks), normed]


def all_reduce_rms_norm_two_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; add and normalise my rows and store them to all; barrier."""
    (row, out), size, tokens = _row(problem), ranks.size, problem.tokens
    rounds = waves(math.ceil(tokens / size), config.programs)
    share = (size - 1) / size
    traffic = Traffic(
        tokens * row * (1 + 1 / size), tokens * out, 0, tokens * row * share, tokens * out * share
    )
    tile = Round(row * (size + 1), out * size, is_there=True)
    normed = copied(ranks, "sum, norm and store", traffic, tile, rounds)
    return [launch(ranks), barrier(ranks), normed, barrier(ranks)]


def all_reduce_rms_norm_low_latency(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Send words with flags to the owners of a row's parts, and sums to all; normalise."""
    (row, out), tokens = _row(problem), problem.tokens
    sent = tokens * row / 4 * 2 * (ranks.size - 1) / ranks.size
    rounds = waves(tokens, config.programs)
    tile = Round(row / config.pieces, out / config.pieces, 0.0)  # loaded before the words went
    normed = copied(ranks, "norm", Traffic(tokens * row, tokens * out), tile, rounds)
    return [*words(ranks, sent, 2), normed]


def all_reduce_rms_norm_two_shot_sliced(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; add my columns of all rows and store them to all; barrier; normalise all rows."""
    (row, out), size, tokens = _row(problem), ranks.size, problem.tokens
    rounds, part, share = waves(tokens, config.programs), row / size, (size - 1) / size
    far = tokens * row * share
    traffic = Traffic(tokens * row * (1 + 1 / size), tokens * row, 0, far, far)
    tile = Round(part * (size + 1), row, is_there=True)
    added = copied(ranks, "sum and store", traffic, tile, rounds)
    fits = 2 * tokens * row * ranks.per_gpu <= ranks.hardware.gpu.cache_bytes  # beside x
    again = Traffic(tokens * row * (not fits), tokens * (out - row), tokens * row * fits)
    normed = copied(ranks, "norm", again, Round(row, out - row), rounds)
    return [launch(ranks), barrier(ranks), added, barrier(ranks), normed]


def moe_dispatch_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Count the tokens; barrier; store each to its experts' ranks; barrier."""
    return [launch(ranks), *_tokens(problem, config, ranks, is_push=True)]


def moe_dispatch_low_latency(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; store each token to its experts' ranks; barrier."""
    return _tokens(problem, config, ranks, is_push=True)


def moe_combine_pull(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; read each token's expert outputs and add them; barrier."""
    return _tokens(problem, config, ranks, is_push=False)


def _tokens(problem: Any, config: Any, ranks: Ranks, is_push: bool) -> list[Part]:
    """Count as if the tokens were spread evenly over the experts."""
    row, one, all_rows = problem.row, problem.max_tokens, problem.max_tokens * problem.topk
    far = all_rows * row * (ranks.size - 1) / ranks.size
    if is_push:
        traffic, read, written = Traffic(one * row, all_rows * row, 0, 0, far), 1, problem.topk
    else:
        traffic, read, written = Traffic(all_rows * row, one * row, 0, far), problem.topk, 1
    part, rounds = row / config.parts, waves(one * config.parts, config.programs)
    tile = Round(read * part, written * part, is_there=not is_push)
    copy = copied(ranks, "tokens", traffic, tile, rounds)
    return [launch(ranks), barrier(ranks), copy, barrier(ranks)]


FUSED: dict[str, Model] = {
    "moe_dispatch.push": moe_dispatch_push,
    "moe_dispatch.low_latency": moe_dispatch_low_latency,
    "moe_combine.pull": moe_combine_pull,
    "all_reduce_rms_norm.one_shot": all_reduce_rms_norm_one_shot,
    "all_reduce_rms_norm.low_latency": all_reduce_rms_norm_low_latency,
    "all_reduce_rms_norm.two_shot": all_reduce_rms_norm_two_shot,
    "all_reduce_rms_norm.two_shot_sliced": all_reduce_rms_norm_two_shot_sliced,
    "all_gather_matmul.barrier": all_gather_matmul_barrier,
    "scaled_all_gather_matmul.barrier": all_gather_matmul_barrier,
    "all_gather_matmul.hbm_buffer": all_gather_matmul_hbm_buffer,
    "all_gather_matmul.direct": all_gather_matmul_direct,
    "all_gather_matmul.copy_engine": all_gather_matmul_copy_engine,
    "matmul_all_gather.push": matmul_all_gather_push,
    "matmul_all_gather.barrier": matmul_all_gather_barrier,
    "matmul_reduce_scatter.push": matmul_reduce_scatter_push,
    "matmul_reduce_scatter.barrier": matmul_reduce_scatter_barrier,
    "scaled_matmul_reduce_scatter.barrier": matmul_reduce_scatter_barrier,
    "matmul_all_reduce.one_shot": matmul_all_reduce_one_shot,
    "matmul_all_reduce.two_shot": matmul_all_reduce_two_shot,
    "matmul_all_reduce.barrier": matmul_all_reduce_barrier,
    "scaled_matmul_all_reduce.barrier": matmul_all_reduce_barrier,
    "all_gather_matmul.cublas": _by_cublas(all_gather_matmul_barrier),
    "matmul_all_gather.cublas": _by_cublas(matmul_all_gather_barrier),
    "matmul_reduce_scatter.cublas": _by_cublas(matmul_reduce_scatter_barrier),
    "matmul_all_reduce.cublas": _by_cublas(matmul_all_reduce_barrier),
}
