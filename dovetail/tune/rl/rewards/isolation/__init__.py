"""The process of a sandboxed program. It imports the standard library alone: see `sandbox.py`."""
