"""Speculative decoding: drafters that propose tokens, and how many of them a step verifies."""
