"""Protect a run: step health, hangs, signals and lost processes."""
