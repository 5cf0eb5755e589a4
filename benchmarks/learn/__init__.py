"""Measure many kernels in many configs, and learn from the times: see README.md in this folder."""
