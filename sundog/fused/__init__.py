"""GEMM and communication in one kernel. One algorithm, one file; `_gemm` is their main loop."""
