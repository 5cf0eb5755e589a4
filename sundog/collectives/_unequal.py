"""Parts of different sizes, by mail (_mailbox.py): all_to_all with splits, all_gather with splits.

They go in chunks through boxes that do not depend on the sizes, from and to any tensor, so new
sizes need no new plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as is_tracing

from ..errors import RankMismatch
from ..ops.dispatch import ASYNC_STREAM, CallOptions, check_out, on_stream, packed
from ..ops.op import Plan, World
from ._copy import Config, wrong_programs
from ._mailbox import Mail, default_mail, messages

_USUAL = 1 << 20  # bytes of a part that the boxes are sized for; others go through them too


def gather_unequal(
    world: World, x: torch.Tensor, out: torch.Tensor | None, splits: Sequence[int],
    options: CallOptions,
) -> Any:  # fmt: skip
    """Gather the ranks' tensors along the first dimension; rank r has splits[r] rows."""
    x = packed(world, "all_gather", x, options.explain)
    rows, row = (x.shape[0], math.prod(x.shape[1:])) if x.dim() else (1, 1)
    splits = check_splits(world, splits, rows)
    if out is None:
        out = torch.empty((sum(splits), *x.shape[1:]), dtype=x.dtype, device=x.device)
    check_out("all_gather", x, out, sum(splits) * row)
    nbytes = [each * row * x.itemsize for each in splits]
    places = accumulate(nbytes, initial=0)
    mine = nbytes[world.rank]
    told = tuple((0, mine, place, each) for place, each in zip(places, nbytes, strict=False))
    result = out

    def run() -> torch.Tensor:
        plan = _mail_plan(world, "all_gather", options, splits, _compare_splits)
        plan.launch(x.view(-1), result.view(-1), told)
        return result

    return on_stream(world, ASYNC_STREAM, run, x) if options.async_op else run()


def send_unequal(
    world: World, x: torch.Tensor, out: torch.Tensor | None, in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None, options: CallOptions,
) -> Any:  # fmt: skip
    """Send part i of x to rank i. A rank knows only its own splits."""
    in_splits, out_splits = check_pair(world.size, in_splits, out_splits)
    rows, row = (x.shape[0], math.prod(x.shape[1:])) if x.dim() else (1, 1)
    check_sums("in_splits", in_splits, rows, "x")
    num_out = sum(out_splits)
    if out is None:
        out = torch.empty((num_out, *x.shape[1:]), dtype=x.dtype, device=x.device)
    check_sums("out_splits", out_splits, out.shape[0] if out.dim() else 1, "out")
    check_out("all_to_all", x, out, num_out * row)
    told = messages(in_splits, out_splits, row * x.itemsize)
    result = out

    def run() -> torch.Tensor:
        plan = _mail_plan(world, "all_to_all", options, told, _compare_sent)
        plan.launch(x.view(-1), result.view(-1), told)
        return result

    return on_stream(world, ASYNC_STREAM, run, x) if options.async_op else run()


def _mail_plan(
    world: World, op: str, options: CallOptions, mine: Any, compare: Callable[[list[Any]], None]
) -> Plan:
    """Return a plan with this stream's boxes, for any sizes. `compare` gets every rank's `mine`."""
    if options.algo not in ("auto", "mail"):
        raise ValueError(f"{op}: algo {options.algo!r} takes equal parts only; use mail")
    config = options.config
    if config is None:
        config = default_mail(_USUAL, world.size, world.num_sms)
    elif not isinstance(config, Config):
        raise ValueError(f"{op}: config {config!r} is not a {Config.__module__}.Config")
    refused = wrong_programs(config, world.size)
    if refused is not None:
        raise ValueError(f"{op}: {refused}")
    plan = world._plans.plan(
        (f"{op}.mail", config, world.stream_number), op, f"unequal parts by mail, {config}",
        lambda: _make(world, op, config), mine, compare,
    )  # fmt: skip
    if options.explain and world.rank == 0:
        print(f"{op}: mail, since the parts are not equal, with {config}")
    return plan


def _make(world: World, op: str, config: Config) -> Plan:
    mail = Mail(world, op, config)
    world.barrier()  # every rank's flags are zero before the first signal
    return Plan(world, "unequal parts", config, mail.workspaces, mail.launch)


def _compare_splits(everyone: list[Any]) -> None:
    """Compare the first call's splits; the kernel compares later ones, by their lengths."""
    for rank, splits in enumerate(everyone):
        if list(splits) != list(everyone[0]):
            raise RankMismatch(
                f"all_gather: rank 0 passed splits {list(everyone[0])} and rank {rank} "
                f"{list(splits)}; pass the same on all ranks"
            )


def check_splits(world: World, splits: Sequence[int], rows: int) -> list[int]:
    counts = check_counts(world.size, "all_gather: splits", splits)
    if counts[world.rank] != rows:
        raise ValueError(
            f"all_gather: x has {rows} rows, but splits {counts} says {counts[world.rank]} for "
            f"rank {world.rank}"
        )
    return counts


def _compare_sent(everyone: list[Any]) -> None:
    """Compare the first call's splits; the kernel compares those of later calls."""
    for i, ours in enumerate(everyone):
        for j, theirs in enumerate(everyone):
            if ours[j][1] != theirs[i][3]:
                raise RankMismatch(
                    f"all_to_all: rank {i} sends {ours[j][1]} bytes to rank {j}, which expects "
                    f"{theirs[i][3]}: in_splits[{j}] here must be out_splits[{i}] there"
                )


def check_counts(size: int, name: str, splits: Any, kind: str = " from 0 on") -> list[int]:
    """Return a number per rank; raise ValueError if these are none. Dynamo traces this too.

    Numbers of numpy would overflow when they are multiplied. Dynamo may not know a number's sign.
    """
    # Dynamo of torch 2.11 lets a TypeError through this try, so most are found before it.
    is_list = isinstance(splits, Sequence) and len(splits) == size and all(map(_is_whole, splits))
    try:
        counts = [n if isinstance(n, int) else operator.index(n) for n in splits] if is_list else []
    except TypeError:
        counts = []
    if not counts or not (is_tracing() or all(n >= 0 for n in counts)):
        raise ValueError(f"{name} {splits!r} must be {size} numbers{kind}")
    return counts


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) or hasattr(number, "__index__")


def check_pair(size: int, in_splits: Any, out_splits: Any) -> tuple[list[int], list[int]]:
    """Check both splits of all_to_all, and return them."""
    if in_splits is None or out_splits is None:
        raise ValueError("all_to_all: give in_splits and out_splits, or neither")
    return (
        check_counts(size, "all_to_all: in_splits", in_splits, ", 0 or more"),
        check_counts(size, "all_to_all: out_splits", out_splits, ", 0 or more"),
    )


def check_sums(name: str, splits: Sequence[int], rows: int, tensor: str) -> None:
    if sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {name} {list(splits)} add up to {sum(splits)}, but {tensor} has {rows} "
            "rows"
        )
