"""Vision towers: one file per kind, each with its description, its weights and its forward pass."""
