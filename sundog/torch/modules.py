"""Layers that are split over the ranks of a world: thin modules on the fused ops.

    up = ColumnParallelLinear(512, 2048, world)      # each rank has 2048 / world.size outputs
    down = RowParallelLinear(2048, 512, world)       # and as many inputs
    y = down(torch.relu(up(x)))

With `sequence_parallel` (the default) x and y are this rank's part of the tokens, along the first
dimension. `up` is one all_gather_matmul, `down` one matmul_reduce_scatter, and each one's backward
is the other. Without it all ranks have all tokens.

`Colwise` and `Rowwise` split the linear layers of a model, as styles for torch's
parallelize_module. What is the same on all ranks (norm weights, a bias after a reduce-scatter) goes
through `replicated`, so that its gradient is the same on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel.style import ParallelStyle

from .calls import is_recorded
from .formulas import replicated, total

if TYPE_CHECKING:
    from ..world.world import World


def _share(world: World, features: int, what: str) -> int:
    if features % world.size:
        raise ValueError(f"{what} {features} does not divide by {world.size} ranks")
    return features // world.size


def _autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert as torch.autocast does for a linear layer; it only knows torch's own ops."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose outputs, the weight's rows, are split over the ranks."""

    def __init__(
        self, in_features: int, out_features: int, world: World, bias: bool = True,
        sequence_parallel: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, _share(world, out_features, "out_features"), bias, **options)
        self.world, self.sequence_parallel = world, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return nn.functional.linear(replicated(self.world, x), self.weight, self.bias)
        rows, weight, bias = _autocast(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        out = self.world.all_gather_matmul(rows, weight.t(), bias, shard="m")
        return out.view(self.world.size * x.shape[0], *x.shape[1:-1], out.shape[-1])


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs, the weight's columns, are split over the ranks."""

    def __init__(
        self, in_features: int, out_features: int, world: World, bias: bool = True,
        sequence_parallel: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(_share(world, in_features, "in_features"), out_features, bias, **options)
        self.world, self.sequence_parallel = world, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            whole = total(self.world, nn.functional.linear(x, self.weight))
            return whole if self.bias is None else whole + self.bias.to(whole.dtype)
        tokens = _share(self.world, x.shape[0], "the first dimension of x,")
        shared = None if self.bias is None else replicated(self.world, self.bias)
        rows, weight, bias = _autocast(x.reshape(-1, x.shape[-1]), self.weight, shared)
        out = self.world.matmul_reduce_scatter(rows, weight.t(), bias)
        return out.view(tokens, *x.shape[1:-1], out.shape[-1])


class SequenceParallelNorm(nn.Module):
    """A norm of this rank's tokens. Its weights and their gradients are the same on all ranks."""

    def __init__(self, norm: nn.Module, world: World) -> None:
        super().__init__()
        self.norm, self.world = norm, world

    def forward(self, x: Tensor) -> Tensor:
        own = {name: replicated(self.world, p) for name, p in self.norm.named_parameters()}
        result: Tensor = torch.func.functional_call(self.norm, own, (x,))
        return result


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose words are split over the ranks. Every rank gets all tokens.

    With `sequence_parallel` it returns this rank's part of the tokens, else all of them. A word
    that no rank has raises on a CPU. On a GPU and compiled it gives zeros, since the host would
    have to wait.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, world: World,
        sequence_parallel: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        for name in ("max_norm", "scale_grad_by_freq"):
            if options.get(name):
                raise ValueError(f"VocabParallelEmbedding: {name} looks at words that others have")
        words = _share(world, num_embeddings, "num_embeddings")
        if options.get("padding_idx") is not None:
            local = options["padding_idx"] % num_embeddings - world.rank * words
            options["padding_idx"] = local if 0 <= local < words else None
        super().__init__(words, embedding_dim, **options)
        self.world, self.sequence_parallel = world, sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        _check_words(tokens, self.num_embeddings * self.world.size)
        local = tokens - self.world.rank * self.num_embeddings
        is_here = (local >= 0) & (local < self.num_embeddings)
        found = super().forward(local.where(is_here, torch.zeros_like(local)))
        found = found * is_here.unsqueeze(-1)
        if not self.sequence_parallel:
            return total(self.world, found)
        result: Tensor = self.world.reduce_scatter(found)
        return result


def _check_words(tokens: Tensor, words: int) -> None:
    """Refuse a word that no rank has; not on a GPU, where the host would wait, nor in a graph."""
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    if torch.compiler.is_compiling() or is_recorded():
        return
    least, most = torch.aminmax(tokens)
    if least < 0 or most >= words:
        raise ValueError(
            f"VocabParallelEmbedding: the tokens go from {least} to {most}, but there are {words} "
            f"words (0 to {words - 1})"
        )


class Colwise(ParallelStyle):
    """Make a linear layer a ColumnParallelLinear that keeps this rank's outputs."""

    def __init__(self, world: World, sequence_parallel: bool = True) -> None:
        self.world, self.sequence_parallel = world, sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        linear = _become(module, ColumnParallelLinear, self, "out_features")
        linear.weight = _part(self.world, linear.weight, 0)
        if linear.bias is not None:
            linear.bias = _part(self.world, linear.bias, 0)
        return linear


class Rowwise(ParallelStyle):
    """Make a linear layer a RowParallelLinear that keeps this rank's inputs."""

    def __init__(self, world: World, sequence_parallel: bool = True) -> None:
        self.world, self.sequence_parallel = world, sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        linear = _become(module, RowParallelLinear, self, "in_features")
        linear.weight = _part(self.world, linear.weight, 1)
        return linear


def _become(module: Any, kind: type, style: Colwise | Rowwise, features: str) -> Any:
    """Change a linear layer in place: parallelize_module keeps the module that it has."""
    if type(module) is not nn.Linear:
        raise ValueError(f"{kind.__name__} is made of a nn.Linear, not of {type(module).__name__}")
    share = _share(style.world, getattr(module, features), features)  # raises before any change
    module.__class__ = kind
    module.world, module.sequence_parallel = style.world, style.sequence_parallel  # type: ignore[assignment]
    setattr(module, features, share)
    return module


def _part(world: World, weight: Tensor, dim: int) -> nn.Parameter:
    part = weight.detach().chunk(world.size, dim)[world.rank].contiguous().clone()
    return nn.Parameter(part, weight.requires_grad)
