"""Quantised weights: what their arrays mean (unpack, blocks), rounding to them (pack), and their products (weight)."""
