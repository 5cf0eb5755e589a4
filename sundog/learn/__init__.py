"""A cost model of Triton kernels: which configs of a kernel are fast, before any is measured.

Inference needs numpy alone. The model is trained by `python -m benchmarks.learn train`.
"""
