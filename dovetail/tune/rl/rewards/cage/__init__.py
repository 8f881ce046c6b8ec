"""What a sandboxed program runs in. Loaded by its process alone, with the standard library alone: see `sandbox.py`."""
