"""Values that travel between machines as files: cloudpickle, and beside it the digest by which a torn one is known."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def write(path: Path, data: bytes) -> None:
    """The digest first: a parcel that is there can be checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, contents in ((_digest_of(path), hashlib.sha256(data).hexdigest().encode()), (path, data)):
        beside = target.with_suffix(target.suffix + ".part")
        beside.write_bytes(contents)
        beside.replace(target)


def read(path: Path) -> bytes:
    data = path.read_bytes()
    found, expected = hashlib.sha256(data).hexdigest(), _digest_of(path).read_text()
    if found != expected:
        raise ValueError(f"{path} is not what was written: its digest is {found[:12]}, and should be {expected[:12]}")
    return data


def _digest_of(path: Path) -> Path:
    return path.with_suffix(path.suffix + ".sha256")


def packed(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes; ValueError names what cannot travel."""
    cloudpickle = _cloudpickle()
    with _by_value(function):
        try:
            return cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            raise ValueError(_culprit(function, args, kwargs, error)) from error


@contextlib.contextmanager
def _by_value(function: Callable) -> Iterator[None]:
    """A module of the user's own need not be there: what the function needs of it travels along. One that is installed
    travels by its name."""
    cloudpickle, module = _cloudpickle(), sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None) or ""
    installed = not file or "site-packages" in file or function.__module__.partition(".")[0] in ("__main__", "dovetail")
    if module is None or installed:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _culprit(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    """Which argument, or which variable that the function refers to, cannot be pickled."""
    name = getattr(function, "__name__", "the function")
    for argument, value in _named(function, args, kwargs).items():
        if why := _refusal(value):
            return f"argument {argument!r} of {name} cannot be sent to another process ({why}): make it there"
    inner = inspect.unwrap(function)
    if inspect.isfunction(inner):
        outer = inspect.getclosurevars(inner)
        for variable, value in {**outer.nonlocals, **outer.globals}.items():
            if not inspect.ismodule(value) and (why := _refusal(value)):
                return f"{name} refers to {variable!r}, which cannot be sent to another process ({why}): make it there"
    return f"{name} cannot be sent to another process: {type(error).__name__}: {error}"


def _named(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def _refusal(value: Any) -> str:
    try:
        _cloudpickle().dumps(value)
    except Exception as error:
        return f"{type(value).__name__}: {error}"
    return ""


def _cloudpickle():
    try:
        import cloudpickle
    except ImportError:
        raise ImportError("remote functions need cloudpickle: pip install cloudpickle") from None
    return cloudpickle
