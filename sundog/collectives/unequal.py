"""All-to-all of unequal parts, as a rank calls it: it knows its own splits and nobody else's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RankMismatch
from .call import ASYNC_STREAM, Options, check_out, on_stream
from .mail import Mail, Message, default_mail
from .spans import wrong_programs
from .words import Config

if TYPE_CHECKING:
    from ..world import World

__all__ = ["by_mail", "messages"]

_USUAL = 1 << 20  # bytes of a message that the boxes are made for; any others go through them too


def messages(sent: Sequence[int], received: Sequence[int], nbytes: int) -> tuple[Message, ...]:
    """One per peer, from the splits, in units of `nbytes`."""
    starts = [nbytes * n for n in accumulate(sent, initial=0)]
    places = [nbytes * n for n in accumulate(received, initial=0)]
    return tuple(
        (starts[peer], nbytes * sent[peer], places[peer], nbytes * received[peer])
        for peer in range(len(sent))
    )


def by_mail(
    world: World, x: torch.Tensor, out: torch.Tensor | None, in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None, options: Options,
) -> Any:  # fmt: skip
    if in_splits is None or out_splits is None:
        raise ValueError("all_to_all: give in_splits and out_splits, or neither")
    rows, row = (x.shape[0], math.prod(x.shape[1:])) if x.dim() else (1, 1)
    _check_splits(world, "in_splits", in_splits, rows, "x")
    num_out = sum(out_splits)
    if out is None:
        out = torch.empty((num_out, *x.shape[1:]), dtype=x.dtype, device=x.device)
    _check_splits(world, "out_splits", out_splits, out.shape[0] if out.dim() else 1, "out")
    check_out("all_to_all", x, out, num_out * row)
    told = messages(in_splits, out_splits, row * x.itemsize)
    result = out

    def run() -> torch.Tensor:
        mail = _mail(world, options, told)
        mail.launch(x.view(-1), result.view(-1), told)
        return result

    return on_stream(world, ASYNC_STREAM, run, x) if options.async_op else run()


def _mail(world: World, options: Options, told: tuple[Message, ...]) -> Mail:
    """The boxes of this stream: any splits go through them."""
    if options.algo not in ("auto", "mail"):
        raise ValueError(f"all_to_all: algo {options.algo!r} takes equal parts only; use mail")
    config = options.config
    if config is None:
        config = default_mail(_USUAL, world.size, world.num_sms)
    elif not isinstance(config, Config):
        raise ValueError(f"all_to_all: config {config!r} is not a {Config.__module__}.Config")
    key = ("all_to_all.mail", config, world.stream_number)
    mail: Mail = world.cached_plan(key, lambda: _make(world, config, told))
    if options.explain and world.rank == 0:
        print(f"all_to_all: mail, since the parts are not equal, with {config}")
    return mail


def _make(world: World, config: Config, told: tuple[Message, ...]) -> Mail:
    """A collective on the host. The first splits are compared here, later ones by the kernel."""
    refused = wrong_programs(config, world.size)
    if refused is not None:
        raise ValueError(f"all_to_all: {refused}")
    everyone = world.exchange((config, told), "plan of all_to_all")
    if len({each for each, _ in everyone}) > 1:
        raise RankMismatch(f"all_to_all: ranks gave different configs: {[c for c, _ in everyone]}")
    for i, (_, ours) in enumerate(everyone):
        for j, (_, theirs) in enumerate(everyone):
            if ours[j][1] != theirs[i][3]:
                raise RankMismatch(
                    f"all_to_all: rank {i} sends {ours[j][1]} bytes to rank {j}, which expects "
                    f"{theirs[i][3]}: in_splits[{j}] here must be out_splits[{i}] there"
                )
    mail = Mail(world, "all_to_all", config)
    world.barrier()  # everybody's flags are zero before the first signal
    return mail


def _check_splits(world: World, name: str, splits: Sequence[int], rows: int, tensor: str) -> None:
    if len(splits) != world.size or any(n < 0 for n in splits):
        raise ValueError(
            f"all_to_all: {name} {list(splits)} must be {world.size} numbers, 0 or more"
        )
    if sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {name} {list(splits)} add up to {sum(splits)}, but {tensor} has {rows} "
            "rows"
        )
