"""What a rank holds: memory, streams, graphs, and the ops as methods."""
