"""Turn Triton's TTIR and TTGIR into graph records, and back. Importing this imports no Triton."""
