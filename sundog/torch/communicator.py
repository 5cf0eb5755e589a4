"""Communicators for serving engines: the methods that vLLM and SGLang ask for, on a world.

`WorldCommunicator` has what vLLM's DeviceCommunicatorBase offers to models (out of place, with a
dimension), and what the custom all-reduces of vLLM and SGLang offer to the engine:
`should_custom_ar`, `custom_all_reduce`, `fused_allreduce_rmsnorm`, `capture`,
`register_graph_buffers`. `dispatch` and `combine` are for layers of experts. docs/torch.md says how
to plug it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..collectives._reduce import DTYPES
from ..fused.all_reduce_rms_norm import DTYPES as NORM_DTYPES
from ..fused.all_reduce_rms_norm import LONGEST

if TYPE_CHECKING:
    from ..world.world import World


class WorldCommunicator:
    """The communicator of one rank. Tensors above `max_bytes` are left to the engine's own.

    `token_sizes` is the number of tokens of each rank, for `dispatch` and `combine`; None if all
    have the same number. The engine sets it before each step, from vLLM's dp_metadata.
    """

    def __init__(self, world: World, max_bytes: int = 8 << 20) -> None:
        self.world, self.max_bytes = world, max_bytes
        self.token_sizes: list[int] | None = None
        self.rank_in_group, self.world_size, self.device = world.rank, world.size, world.device

    @property
    def disabled(self) -> bool:
        """Whether the world is closed, or has no other rank."""
        return self.world_size == 1 or bool(self.world._closed)

    # what the engine expects of a custom all-reduce

    def should_custom_ar(self, inp: Tensor) -> bool:
        """Return whether `custom_all_reduce` takes this tensor. If not, the engine uses its own."""
        fits = inp.numel() * inp.itemsize <= self.max_bytes and inp.is_contiguous()
        on_device = inp.device.type == self.device.type
        return not self.disabled and fits and on_device and inp.dtype in DTYPES

    def custom_all_reduce(self, input: Tensor) -> Tensor | None:
        """Return the sum over ranks, or None if the engine should use its own all-reduce.

        The warm-up run inside `capture()` calls it too, and makes the plan that the capture then
        finds.
        """
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    def fused_allreduce_rmsnorm(
        self, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Return RMSNorm of the sum plus residual, and the new residual, by one kernel.

        Return None if the engine should reduce and normalise itself.
        """
        is_known = input_.dtype in NORM_DTYPES and input_.shape[-1] <= LONGEST
        if not (is_known and self.should_custom_ar(input_) and residual_inp_.is_contiguous()):
            return None
        call = self.world.all_reduce_rms_norm
        normed, residual = call(input_, residual_inp_, weight_, eps)
        return normed, residual

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Do nothing around the engine's CUDA graph capture, which needs no preparation."""
        yield

    def register_graph_buffers(self) -> None:
        """Do nothing: a captured op goes through the heap, which all ranks have mapped."""

    def close(self) -> None:
        self.world.close()

    destroy = close

    # what models call

    def all_reduce(self, input_: Tensor) -> Tensor:
        result: Tensor = self.world.all_reduce(input_.contiguous())
        return result

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        whole: Tensor = self.world.all_gather(input_.movedim(dim, 0).contiguous())
        return whole.movedim(0, dim).contiguous()

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Gather parts with `sizes[rank]` rows, of a tensor or of each tensor of a list."""
        if isinstance(input_, list | tuple):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        if sizes is None:
            return self.all_gather(input_, dim)
        self._check_sizes("all_gatherv", dim, sizes, input_.shape[0], sizes[self.rank_in_group])
        return self.world.all_gather(input_.contiguous(), splits=sizes)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        mine: Tensor = self.world.reduce_scatter(input_.movedim(dim, 0).contiguous())
        return mine.movedim(0, dim).contiguous()

    def reduce_scatterv(
        self, input_: Tensor, dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor:
        """Reduce slices with `sizes[rank]` rows."""
        if sizes is None:
            return self.reduce_scatter(input_, dim)
        self._check_sizes("reduce_scatterv", dim, sizes, input_.shape[0], sum(sizes))
        return self.all_reduce(input_).split(sizes)[self.rank_in_group].contiguous()

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        whole = self.world.gather(input_.movedim(dim, 0).contiguous(), dst)
        return None if whole is None else whole.movedim(0, dim).contiguous()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Send in place, as vLLM does."""
        return tensor.copy_(self.world.broadcast(tensor.contiguous(), src))

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send, to the next rank if none is named."""
        self.world.send(tensor.contiguous(), self._neighbour(1) if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive, from the previous rank if none is named."""
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.world.recv(tensor, self._neighbour(-1) if src is None else src)
        return tensor

    # layers of experts: every rank gets all tokens, and its experts add to their own

    def dispatch(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        is_sequence_parallel: bool = False, extra_tensors: list[Tensor] | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Gather all ranks' tokens and their experts. There is only one group."""
        given = [hidden_states, topk_weights, topk_ids, *(extra_tensors or [])]
        whole = self.all_gatherv(given, 0, self.token_sizes)
        return tuple(whole) if extra_tensors is None else (*whole[:3], whole[3:])

    def dispatch_router_logits(
        self, hidden_states: Tensor, router_logits: Tensor, is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        whole = self.all_gatherv(
            [hidden_states, router_logits, *(extra_tensors or [])], 0, self.token_sizes
        )
        return tuple(whole) if extra_tensors is None else (*whole[:2], whole[2:])

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Add up what all ranks' experts computed from the tokens, on the ranks of the tokens."""
        return self.reduce_scatterv(hidden_states, 0, self.token_sizes)

    def _neighbour(self, step: int) -> int:
        return (self.rank_in_group + step) % self.world_size

    def _check_sizes(self, name: str, dim: int, sizes: list[int], rows: int, expected: int) -> None:
        if dim != 0 or len(sizes) != self.world_size or rows != expected:
            raise ValueError(
                f"{name}: dim {dim}, sizes {sizes}, {rows} rows on rank {self.rank_in_group}: "
                f"expected dim 0, {self.world_size} sizes and {expected} rows"
            )
