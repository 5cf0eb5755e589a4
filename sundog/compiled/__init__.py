"""What a compiler made of a launch, read from TTIR, TTGIR and assembly, without a GPU."""
