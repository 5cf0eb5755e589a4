"""What an op is, how it is found, chosen and called."""
