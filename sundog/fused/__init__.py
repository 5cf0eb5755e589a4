"""GEMM and communication in one kernel. One algorithm, one file; `gemm` is the shared main loop."""
