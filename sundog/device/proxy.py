"""The proxy fence: the one line of assembly that descriptors (TMA) need.

A descriptor reads global memory through the async proxy. Without a fence that proxy does not see
what ordinary stores wrote in the same kernel, or what a peer wrote while it runs. Between an
acquire and the bulk copy Triton emits only a fence for shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The simulator knows this text (interpreter/builder.py). Triton asks for the dummy register.
FENCE = tl.constexpr("fence.proxy.async.global; mov.u32 $0, 0;")


@triton.jit
def fence():
    """Order what this program has learnt (by a wait) before its later descriptor loads.

    Orders: ordinary writes that happened before this point, also by peers, before later descriptor
    loads of this program. Does not order anything between programs; signal and wait do that. Only
    NVIDIA GPUs have a second proxy.
    """
    tl.inline_asm_elementwise(FENCE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()  # every thread has fenced before one of them issues the copy
