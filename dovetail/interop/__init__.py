"""Interop: models of other frameworks. Nothing here is imported until it is asked for by name."""
