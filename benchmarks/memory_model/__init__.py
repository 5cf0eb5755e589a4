"""The axioms of docs/memory_model.md, to hold the checker to; the package does not need them."""
