"""A function that is named by where it lies: `rewards.py:my_reward`, or `package.module:name`."""

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
from dovetail.core.errors import UserError


@dataclass(frozen=True)
class Imported:
    """Travels to another process by its name, and is loaded there."""

    module: str  # of a file, its whole path
    name: str

    @classmethod
    def of(cls, where: str) -> Imported:
        module, colon, name = where.rpartition(":")
        if not (colon and module and name):
            raise UserError(
                f"function must be 'file.py:name' or 'package.module:name', the name after a colon; got {where!r}"
            )
        return cls(str(Path(module).resolve()) if module.endswith(".py") else module, name)

    @cached_property
    def function(self) -> Callable[..., Any]:
        module = _of_file(Path(self.module)) if self.module.endswith(".py") else _of_name(self.module)
        found = getattr(module, self.name, None)
        if not callable(found):
            known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            what = "is no function" if found is not None else "is not there"
            raise UserError(f"{self.name!r} {what} in {self.module}.{did_you_mean(self.name, known)}")
        return found

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        return self.function(*arguments, **columns)

    def __reduce__(self) -> tuple:
        return Imported, (self.module, self.name)


def _of_name(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"the module {module} was not found ({error}); name one that can be imported here, or a file as "
            "'file.py:name'"
        ) from None


def _of_file(path: Path) -> ModuleType:
    """Loaded once a process, under a name that two files of one name do not share."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UserError(f"the file of functions {path} does not exist; a path is taken from the working folder")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import its neighbours
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
