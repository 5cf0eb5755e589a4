"""`sundog tune`: search for the best config and record every attempt."""
