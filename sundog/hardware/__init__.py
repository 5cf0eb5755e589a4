"""What a machine is: GPUs, their memory, and the links between them, in one file for each."""
