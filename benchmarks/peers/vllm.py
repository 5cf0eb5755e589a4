"""vllm-project/vllm: the Lamport kernels of its Inkling models, NVIDIA's and AMD's.

One call runs the four kernels one after the other: publish, reduce, convolve and publish, gather
and normalise. What vLLM itself provides around them (its group, its logger) is stood for here.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .case import Case, alone, device, group, start

PACKAGE = "vllm/models/inkling"
_HIDDEN, _WINDOW, _HEAD, _BLOCK = 64, 4, 16, 4


class _Group:
    """vLLM's tensor-parallel group, as far as the kernels' host code uses it."""

    def __init__(self) -> None:
        self.device_group = self.cpu_group = group()
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()
        self.device = device()

    def barrier(self) -> None:
        dist.barrier()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def _provide() -> None:
    names = ("vllm", "vllm.distributed", "vllm.distributed.parallel_state", "vllm.logger",
             "vllm.triton_utils")  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    modules["vllm.distributed"].get_tp_group = _Group  # type: ignore[attr-defined]
    modules["vllm.distributed.parallel_state"].in_the_same_node_as = (  # type: ignore[attr-defined]
        lambda pg: [True] * dist.get_world_size()
    )
    logger = SimpleNamespace(info=print, exception=print, warning=print)
    modules["vllm.logger"].init_logger = lambda name: logger  # type: ignore[attr-defined]
    vars(modules["vllm.triton_utils"]).update(HAS_TRITON=True, tl=tl, triton=triton)
    sys.modules |= modules
    if not hasattr(torch, "accelerator"):
        raise RuntimeError("vLLM's host code needs torch.accelerator")
    torch.accelerator.synchronize = lambda device=None: torch.cuda.synchronize()


def _wanted(x: Any, residual: Any, weight: Any, norm: Any, tokens: int) -> Any:
    """Return what the four kernels compute, by torch: each rank convolves its share of channels."""
    size, rank = dist.get_world_size(), dist.get_rank()
    share = _HIDDEN // size
    total = x.float().clone()
    dist.all_reduce(total)
    mine = total[:, rank * share : (rank + 1) * share].to(torch.bfloat16).float()
    taps = torch.cat([torch.zeros(_WINDOW - 1, share), mine])
    conv = sum(taps[n : n + tokens] * weight.float()[:, n] for n in range(_WINDOW))
    skip = (conv + mine).to(torch.bfloat16).float()
    own = residual[:, rank * share : (rank + 1) * share].float()
    parts = [torch.empty(tokens, share, dtype=torch.bfloat16) for _ in range(size)]
    dist.all_gather(parts, (own + skip).to(torch.bfloat16))
    row = torch.cat(parts, 1)
    wide = row.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * scale * norm.float()).to(torch.bfloat16), row


def _call(vendor: str, tokens: int, calls: int = 4) -> None:
    _provide()
    module = alone(f"{PACKAGE}/{vendor}/ops/lamport.py")
    start()
    size = dist.get_world_size()
    share = _HIDDEN // size
    state = module.LamportRSConv(_HIDDEN, _WINDOW, max_tokens=tokens)
    small = functools.partial(torch.randint, -3, 4)
    residual = torch.randint(-3, 4, (tokens, _HIDDEN), generator=torch.manual_seed(5)).bfloat16()
    weight = small((share, _WINDOW)).to(torch.bfloat16)
    norm = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    ids = torch.arange(tokens)
    blocks = -(-tokens // _BLOCK)
    table = torch.arange(blocks).view(1, blocks)
    given, results = [small((tokens, _HIDDEN)).to(torch.bfloat16) for _ in range(calls)], []
    for x in given:  # one after the other: slots are written again with no barrier of the hosts
        cache = torch.zeros(blocks, share // _HEAD, _BLOCK, _HEAD, dtype=torch.bfloat16)
        results.append(state.rs_sconv_ag_add_norm(
            x, residual, weight, norm, 1e-5, cache, ids, table, torch.zeros_like(ids), ids,
            0, _HEAD, _BLOCK,
        ))  # fmt: skip
    for x, found in zip(given, results, strict=True):
        wanted = _wanted(x, residual, weight, norm, tokens)
        for each, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, other, rtol=2e-2, atol=2e-2)


def _validate(vendor: str) -> None:
    _provide()
    module = alone(f"{PACKAGE}/{vendor}/ops/lamport.py")
    start()
    state = module.LamportRSConv(_HIDDEN, _WINDOW, max_tokens=2)
    bad = torch.zeros((), dtype=torch.int32, device=device())
    pairs = state.buf_in.numel() // 2
    module._validate_lamport_init_kernel[(-(-pairs // 256),)](
        state.input_peer_ptrs, state.output_peer_ptrs, bad, pairs, RANK=state.rank, BLOCK=256
    )
    assert bad.item() == 0


def _cases(vendor: str) -> list[Case]:
    path = f"{PACKAGE}/{vendor}/ops/lamport.py"
    kernels = (
        "_publish_input_kernel",
        "_reduce_insert_kernel",
        "_sconv_publish_kernel",
        "_gather_norm_kernel",
    )
    found = [
        Case(f"{', '.join(kernels)} ({vendor}, {tokens} tokens)", path,
             functools.partial(_call, vendor, tokens), world=2, kernels=count)
        for tokens, count in ((3, 4), (1, 0))
    ]  # fmt: skip
    name = f"_validate_lamport_init_kernel ({vendor})"
    return [*found, Case(name, path, functools.partial(_validate, vendor), world=2)]


CASES = [*_cases("nvidia"), *_cases("amd")]
