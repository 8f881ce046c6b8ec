"""Train a model: steps, loop, optimizers, checkpoints, guards and reports."""
