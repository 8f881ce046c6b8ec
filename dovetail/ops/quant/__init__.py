"""Weights in fewer bits: one file per scheme, each with its way to pack a weight and to give it back."""
