"""all_gather_matmul over several machines: the local part is multiplied while the rest comes.

Inside a machine it is the fused op. With shard "m" every machine's part gives rows of the output.
With shard "k" it gives a partial product in float32, and these are added in the order of machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..fused._call import check_matrices
from ..ops.op import check_grad
from .pipeline import Levels, NodesConfig

__all__ = ["Product"]


@dataclass(frozen=True)
class Product:
    """The arguments of one call."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    out_dtype: torch.dtype
    shard: str

    def checked(self, size: int, out: torch.Tensor | None) -> torch.Tensor:
        """ValueError if these can't be multiplied; else the output."""
        op, a = "all_gather_matmul", self.a
        for name in ("a", "b", "bias"):
            check_grad(op, getattr(self, name), name=name)
        if self.shard not in ("k", "m") or a.dim() != 2:
            raise ValueError(
                f"{op}: shard {self.shard!r}, a of shape {tuple(a.shape)}: expected 'k' or 'm', "
                "and two dimensions"
            )
        rows, k = a.shape
        rows, k = (rows, k * size) if self.shard == "k" else (rows * size, k)
        return check_matrices(
            op, a, self.b, k, self.bias, self.activation, out, rows, self.out_dtype
        )

    def run(self, levels: Levels, a: torch.Tensor, out: torch.Tensor, config: NodesConfig) -> None:
        """This machine's product first; then the others', which have come meanwhile."""
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
        rows = (
            self.b.view(levels.between.count, -1, self.b.shape[1])
            if (self.b.is_contiguous())
            else torch.stack(self.b.chunk(levels.between.count))
        )
        result: torch.Tensor = levels.local.all_gather_matmul(
            a, rows[node], None, None, torch.float32, "k"
        )
        return result

    def _finished(self, total: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            total = total + self.bias.float()
        return torch.nn.functional.silu(total) if self.activation == "silu" else total
