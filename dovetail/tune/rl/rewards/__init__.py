"""Rewards of completions: the functions of the user and the built-in kinds, called in worker processes."""
