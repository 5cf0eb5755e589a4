"""Worlds over several machines: our kernels inside each, torch.distributed between them."""
