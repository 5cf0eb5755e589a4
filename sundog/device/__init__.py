"""Device primitives, to be called inside `@triton.jit` kernels. Plain `tl`, nothing else.

from sundog.device import memory, signal
"""
