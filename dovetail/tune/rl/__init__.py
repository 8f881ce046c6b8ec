"""Reinforcement learning: rollouts by the engine, steps by the trainer, on one set of weights in one process."""
