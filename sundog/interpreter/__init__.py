"""Triton and Gluon kernels on numpy."""
