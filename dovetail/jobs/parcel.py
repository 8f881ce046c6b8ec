"""Values that travel between machines as files: cloudpickle, and beside it a MAC made with the key of the job.

To load a pickle is to run what is in it. It may come from a machine or a bucket that others reach, so it is loaded only
where its MAC is right. The key is made with the job, is kept in a file that only its user can read, and reaches the
job's processes as a secret does (secrets.py): in their environment and in no file.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import inspect
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.core.files import read_own, write_atomic
from dovetail.jobs import modes

KEY = "key"  # a file beside the call
VARIABLE = "DOVETAIL_CALL_KEY"  # of the job's processes


def make_key(folder: Path) -> str:
    """Make the key of a call whose files are in `folder`."""
    modes.make_folder(folder)
    key = secrets.token_hex(32)
    with open(folder / KEY, "x", opener=modes.opener) as file:
        (folder / KEY).chmod(0o600)
        file.write(key)
    return key


def key_of(folder: Path) -> str:
    """Return the key that `make_key` made there."""
    try:
        return read_own(folder / KEY).decode()
    except OSError as error:
        raise UserError(f"the key of the call cannot be read ({error}): submit it again") from None


def write(path: Path, data: bytes, key: str) -> None:
    """The MAC first: a parcel that is there can be checked."""
    modes.make_folder(path.parent)
    for target, contents in ((_mac_of(path), _mac(path, data, key).encode()), (path, data)):
        write_atomic(target, contents, opener=modes.opener)


def read(path: Path, key: str) -> bytes:
    """Return what `write` wrote with the same key and name. ValueError for anything else."""
    data = path.read_bytes()
    try:
        expected = _mac_of(path).read_bytes()
    except FileNotFoundError:
        expected = b""
    if not hmac.compare_digest(_mac(path, data, key).encode(), expected):
        raise UserError(f"{path} is not what the job wrote: its MAC is wrong, so it is not loaded")
    return data


def _mac(path: Path, data: bytes, key: str) -> str:
    """Of the name too, which has the attempt's number: an earlier result does not pass for a later one."""
    if not key:
        raise UserError(f"there is no key for {path.name}: ${VARIABLE} is not set; submit the call again")
    return hmac.new(key.encode(), path.name.encode() + b"\0" + data, hashlib.sha256).hexdigest()


def _mac_of(path: Path) -> Path:
    return path.with_suffix(path.suffix + ".mac")


def packed(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes; ValueError names what cannot travel."""
    cloudpickle = _cloudpickle()
    with _by_value(function):
        try:
            return cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            raise UserError(_culprit(function, args, kwargs, error)) from error


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
        raise MissingPackageError("remote functions need cloudpickle: pip install cloudpickle") from None
    return cloudpickle
