"""Kernel-artifact dataset: telemetry that joins, and the kernel's IR as a lossless graph."""
