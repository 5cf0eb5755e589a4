"""Run by test_language in a process of its own: simulate, compile for two GPUs, simulate again.

Triton is imported first, and no environment variable is set. Every attribute of the language is
compared with what it was before anything ran.
"""

import os
import sys

import triton
import triton.language as tl
import triton.language.semantic
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

assert "TRITON_INTERPRET" not in os.environ

OWNERS = [tl, tl.core, tl.math, tl.standard, triton.language.semantic, JITFunction]
OWNERS += [member for member in vars(tl.core).values() if isinstance(member, type)]
BEFORE = [dict(vars(owner)) for owner in OWNERS]


@triton.jit
def _square(x):
    return x * x


@triton.jit
def kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    y = tl.zeros((BLOCK,), tl.float32) + _square(x) + tl.max(x) + x.sum()
    for _ in tl.range(0, 2):
        y += tl.cumsum(x, 0)
    tl.store(out_ptr + at, y, mask=at < N)


def changed() -> list[str]:
    found = []
    for owner, before in zip(OWNERS, BEFORE, strict=True):
        now = dict(vars(owner))
        names = [n for n in {**before, **now} if before.get(n) is not now.get(n)]
        found += [f"{owner.__name__}.{name}" for name in names]
    return found


def compile_for_gpus() -> list[str]:
    signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "N": "i32", "BLOCK": "constexpr"}
    source = ASTSource(kernel, signature, {"BLOCK": 64})
    cuda = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    hip = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
    return [cuda.asm["ptx"], hip.asm["amdgcn"]]


def main() -> None:
    import torch

    import sundog

    x = torch.randn(50)
    wanted = x * x + max(x.max(), torch.zeros(())) + x.sum() + 2 * x.cumsum(0)

    def simulate(world: sundog.World, between: bool = False) -> torch.Tensor:
        out = world.empty(50)
        kernel[(1,)](x, out, 50, BLOCK=64)
        torch.testing.assert_close(out, wanted)
        if between:
            assert changed() == ["JITFunction.run"], changed()  # a launch is simulated, no more
            assert compile_for_gpus() == before
            kernel[(1,)](x, out.zero_(), 50, BLOCK=64)
            torch.testing.assert_close(out, wanted)
        return out

    before = compile_for_gpus()
    sundog.run(simulate, 2, backend="sim")
    assert not changed(), changed()
    assert compile_for_gpus() == before
    sundog.run(simulate, 3, backend="sim")
    sundog.run(lambda world: simulate(world, between=world.rank == 0), 2, backend="sim")
    assert not changed(), changed()
    assert isinstance(kernel, JITFunction)
    assert "TRITON_INTERPRET" not in os.environ
    print("as it was")


if __name__ == "__main__":
    sys.exit(main())
