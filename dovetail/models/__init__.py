"""Models: one forward (decoder), one small file per family, and adapters."""
