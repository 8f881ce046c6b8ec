"""Lazy imports of packages that take seconds: every worker collects all modules and runs a third of them."""

from __future__ import annotations

import importlib
from typing import Any


class later:
    """Stands for the package of that name, which is imported when something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for wrapped fixtures in everything that it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
