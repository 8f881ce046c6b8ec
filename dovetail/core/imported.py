"""Import a function or class that a recipe names by its location: `file.py:name` or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import RecipeError


@dataclass(frozen=True)
class ImportedFunction:
    """A function or class named by its location: `rewards.py:my_reward` or `package.module:name`.

    It is pickled by its location and imported in the other process.

    Attributes:
        module: A module's name, or the absolute path of a file.
        name: The name in the module.
    """

    module: str
    name: str

    @classmethod
    def parse(cls, location: str) -> ImportedFunction:
        """Return the function at a location, without importing it."""
        module, colon, name = location.rpartition(":")
        if not (colon and module and name):
            raise RecipeError(
                f"function must be 'file.py:name' or 'package.module:name'; got {location!r}", param="function"
            )
        return cls(str(Path(module).resolve()) if module.endswith(".py") else module, name)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function or class, imported."""
        module = _import_file(Path(self.module)) if self.module.endswith(".py") else _import_module(self.module)
        value = getattr(module, self.name, None)
        if not callable(value):
            known = [name for name, each in vars(module).items() if callable(each) and not name.startswith("_")]
            problem = (
                f"{self.module} has no function {self.name!r}" if value is None else f"{self.name!r} is not callable"
            )
            raise RecipeError(f"function must exist: {problem}.{did_you_mean(self.name, known)}", param="function")
        return value

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        """Import and call the function."""
        return self.function(*arguments, **columns)

    def __reduce__(self) -> tuple:
        return ImportedFunction, (self.module, self.name)


def _import_module(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"function must be in a module that can be imported; {module} cannot ({error}): name another, or a file as "
            "'file.py:name'",
            param="function",
        ) from None


def _import_file(path: Path) -> ModuleType:
    """Import a file once per process, under a module name that depends on its path."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise RecipeError(f"function must be in a file that exists; there is no {path}", param="function")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import files of its folder
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
