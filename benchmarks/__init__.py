"""Measures sundog itself and makes docs/measured.md. Not part of the package that is installed."""

import os

# To ask whether there is a GPU must not start CUDA: a fault campaign forks its cases.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
