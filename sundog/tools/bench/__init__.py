"""`sundog bench`: an op against the hardware limit and the PyTorch equivalent."""
