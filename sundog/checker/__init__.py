"""docs/memory_model.md as code."""
