"""Training of drafters for speculative decoding."""
