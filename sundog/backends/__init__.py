"""Where ranks and memory come from. One backend, one file."""
