"""The split layers against torch's whole ones, with and without sequence parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import sundog
from sundog.torch.modules import (
    ColumnParallelLinear,
    Colwise,
    RowParallelLinear,
    Rowwise,
    SequenceParallelNorm,
    VocabParallelEmbedding,
    replicated,
)

Run = Callable[..., list]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(self.words(tokens)))))


def _whole(device: torch.device) -> Whole:
    torch.manual_seed(0)
    return Whole().to(device)


@pytest.mark.parametrize("is_split", [True, False], ids=["sequence parallel", "all tokens"])
def test_a_split_model_has_the_whole_ones_gradients(run: Run, is_split: bool) -> None:
    """Of replicated weights on every rank alike; of the others each rank has a part."""

    def main(world: sundog.World) -> None:
        whole, model = _whole(world.device), _whole(world.device)
        tokens = torch.arange(8, device=world.device).view(4, 2).flip(0)  # rows are tokens' places
        whole(tokens).square().sum().backward()
        plan = {"up": Colwise(world, is_split), "down": Rowwise(world, is_split)}
        parallelize_module(model, _Mesh(), plan)
        words = VocabParallelEmbedding(8, 4, world, is_split, device=world.device)
        words.weight = nn.Parameter(whole.words.weight.detach().chunk(2)[world.rank].clone())
        model.words = words
        if is_split:
            model.norm = SequenceParallelNorm(model.norm, world)
        out = model(tokens)
        assert out.shape == (2 if is_split else 4, 2, 4)
        out.square().sum().backward()
        norm = model.norm.norm if is_split else model.norm
        rank = world.rank
        for found, expected in [
            (model.up.weight.grad, whole.up.weight.grad.chunk(2)[rank]),
            (model.up.bias.grad, whole.up.bias.grad.chunk(2)[rank]),
            (model.down.weight.grad, whole.down.weight.grad.chunk(2, 1)[rank]),
            (model.down.bias.grad, whole.down.bias.grad),
            (norm.weight.grad, whole.norm.weight.grad),
            (words.weight.grad, whole.words.weight.grad.chunk(2)[rank]),
        ]:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    run(main, 2)


class _Mesh:
    """parallelize_module asks a mesh for its dimensions alone; styles here know their world."""

    ndim = 1
    device_type = "cpu"
    mesh_dim_names = ("tp",)

    def _is_current_rank_part_of_mesh(self) -> bool:
        return True


@pytest.mark.parametrize("is_split", [True, False], ids=["sequence parallel", "all tokens"])
def test_autocast_converts_as_for_linear_layers(run: Run, is_split: bool) -> None:
    def main(world: sundog.World) -> None:
        up = ColumnParallelLinear(4, 8, world, True, is_split, device=world.device)
        down = RowParallelLinear(8, 4, world, True, is_split, device=world.device)
        before = nn.Linear(4, 4, device=world.device)
        x = torch.randn(4, 4, device=world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            out = down(up(before(x)))
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        for weight in (before.weight, up.weight, up.bias, down.weight, down.bias):
            assert weight.grad.dtype == torch.float32

    run(main, 2)


def test_a_padding_word_is_on_one_rank(run: Run) -> None:
    """Every rank left the gradient of its own word of that number out."""

    def main(world: sundog.World) -> None:
        for padding in (0, 5, -1):
            torch.manual_seed(0)
            whole = nn.Embedding(8, 4, padding_idx=padding, device=world.device)
            words = VocabParallelEmbedding(8, 4, world, padding_idx=padding, device=world.device)
            assert (words.weight == 0).all(1).sum() == (padding % 8 // 4 == world.rank)
            tokens = torch.arange(8, device=world.device)
            whole(tokens).sum().backward()
            words(tokens).sum().backward()
            assert torch.equal(words.weight.grad, whole.weight.grad.chunk(2)[world.rank])
        with pytest.raises(ValueError, match="max_norm looks at words that others have"):
            VocabParallelEmbedding(8, 4, world, max_norm=1.0)

    run(main, 2)


def test_what_can_not_be_split_is_named(run: Run) -> None:
    def main(world: sundog.World) -> None:
        layer = nn.Linear(5, 5)
        for style, name in ((Colwise(world), "out_features"), (Rowwise(world), "in_features")):
            with pytest.raises(ValueError, match=f"{name} 5 does not divide by 2 ranks"):
                style._apply(layer, None)
            assert type(layer) is nn.Linear  # as it was
        with pytest.raises(ValueError, match=r"is made of a nn\.Linear, not of ReLU"):
            Rowwise(world)._apply(nn.ReLU(), None)
        with pytest.raises(ValueError, match="first dimension of x, 3 does not divide by 2 ranks"):
            RowParallelLinear(4, 4, world, device=world.device)(
                torch.ones(3, 2, 2, device=world.device)
            )
        x = torch.ones(2, device=world.device, requires_grad=True)
        replicated(world, x * (world.rank + 1)).sum().backward()
        assert x.grad.tolist() == [2.0 * (world.rank + 1)] * 2

    run(main, 2)


def test_a_copy_of_a_layer_has_its_own_weights(run: Run) -> None:
    """And the same world, as a copy of torch's layers has the same process group."""

    def main(world: sundog.World) -> None:
        layer = ColumnParallelLinear(4, 8, world, device=world.device)
        twin = copy.deepcopy(layer)
        assert twin.world is world
        x = torch.randn(4, 4, device=world.device)
        assert torch.equal(twin(x), layer(x))
        nn.init.zeros_(twin.weight)
        assert layer.weight.any()

    run(main, 2)


def test_a_word_that_no_rank_has_is_named(run: Run) -> None:
    """It had a row of zeros."""

    def main(world: sundog.World) -> None:
        words = VocabParallelEmbedding(8, 4, world, device=world.device)
        for wrong in (-1, 8):
            tokens = torch.tensor([3, wrong], device=world.device)
            if world.device.type != "cpu":  # the host does not wait for the tokens
                assert words(tokens).any() == (world.rank == 0)
                continue
            with pytest.raises(ValueError, match=rf"go from .*{wrong}.* are 8 words \(0 to 7\)"):
                words(tokens)
        assert words(torch.tensor([0, 7], device=world.device)).shape == (1, 4)
        assert words(torch.zeros(0, 2, dtype=torch.int64, device=world.device)).shape == (0, 2, 4)

    run(main, 2)
