"""sundog: multi-GPU Triton kernels that you can prove on a laptop."""
