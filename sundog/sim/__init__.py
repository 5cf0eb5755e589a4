"""The CPU machine: runs unmodified `@triton.jit` kernels, all programs of all ranks interleaved."""
