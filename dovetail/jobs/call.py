"""The process of a remote function: every process runs the function, and the first one returns its value.

    python -m dovetail.jobs.call FOLDER

Arguments and results are files: cloudpickle, with a MAC beside it. Loading a pickle runs the code in it, and the file
may come from a machine or a bucket that others can write, so it is loaded only if its MAC is right. The key is made
with the job, kept in a file that only its user can read, and passed to the job's processes in their environment
(secrets.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import inspect
import io
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.core.files import read_own, write_atomic
from dovetail.jobs import files

CALL, RESULT = "call.pkl", "result.pkl"
KEY = "key"  # a file beside them
VARIABLE = "DOVETAIL_CALL_KEY"  # of the job's processes
FAILED = 1


def main(folder: Path) -> int:
    """Run the function of `folder` and write its value or its exception there; return the exit code."""
    import cloudpickle

    for stream in (sys.stdout, sys.stderr):  # they are log files that others follow
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    key = os.environ.pop(VARIABLE, "")  # not for the programs that the function starts
    function, args, kwargs = cloudpickle.loads(read(folder / CALL, key))
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        _write_result(folder, key, {"error": error, "traceback": traceback.format_exc()})
        return FAILED
    if _rank() == "0":
        _write_result(folder, key, {"value": value})
    return 0


def _write_result(folder: Path, key: str, answer: dict[str, Any]) -> None:
    """Write a value or an exception; one that cannot be pickled becomes a TypeError that says so."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(answer)
    except Exception as error:
        what = "exception" if "error" in answer else "return value"
        kind = type(answer.get("error", answer.get("value"))).__name__
        refused = TypeError(f"the {what} of the remote function ({kind}) cannot be sent back: {error}")
        data = cloudpickle.dumps({"error": refused, "traceback": answer.get("traceback", str(refused))})
    # The attempt's number is in the name, so that a retry does not return an earlier result.
    number, rank = os.environ.get("DOVETAIL_ATTEMPT", "1"), _rank()
    write(folder / (f"{number}.{RESULT}" if rank == "0" else f"{number}.{rank}.{RESULT}"), data, key)


def _rank() -> str:
    names = ("DOVETAIL_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID")
    return next((os.environ[name] for name in names if name in os.environ), "0")


# --- signed files -----------------------------------------------------------------------------------------------------


def make_key(folder: Path) -> str:
    """Make the key of a call whose files are in `folder`."""
    files.make_folder(folder)
    key = secrets.token_hex(32)
    with open(folder / KEY, "x", opener=files.opener) as file:
        (folder / KEY).chmod(0o600)
        file.write(key)
    return key


def read_key(folder: Path) -> str:
    """Return the key that `make_key` made."""
    try:
        return read_own(folder / KEY).decode()
    except OSError as error:
        raise UserError(f"the key of the call cannot be read ({error}): submit it again") from None


def write(path: Path, data: bytes, key: str) -> None:
    """Write `data` and its MAC, the MAC first, each atomically."""
    files.make_folder(path.parent)
    for target, contents in ((_mac_file(path), _mac(path, data, key).encode()), (path, data)):
        write_atomic(target, contents, opener=files.opener)


def read(path: Path, key: str) -> bytes:
    """Return what `write` wrote with the same key and name; raise UserError for anything else."""
    data = path.read_bytes()
    try:
        expected = _mac_file(path).read_bytes()
    except FileNotFoundError:
        expected = b""
    if not hmac.compare_digest(_mac(path, data, key).encode(), expected):
        raise UserError(f"{path} was not written by the job: its MAC is wrong, so it is not loaded", code="wrong_mac")
    return data


def _mac(path: Path, data: bytes, key: str) -> str:
    """Return the MAC of the file's name and contents."""
    if not key:
        raise UserError(f"there is no key for {path.name}: ${VARIABLE} is not set; submit the call again")
    return hmac.new(key.encode(), path.name.encode() + b"\0" + data, hashlib.sha256).hexdigest()


def _mac_file(path: Path) -> Path:
    return path.with_suffix(path.suffix + ".mac")


# --- pickling a call --------------------------------------------------------------------------------------------------


def packed(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call; raise UserError with the name of the argument or variable that cannot be pickled."""
    cloudpickle = _cloudpickle()
    with _by_value(function):
        try:
            return cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            raise UserError(_unpicklable(function, args, kwargs, error)) from error


@contextlib.contextmanager
def _by_value(function: Callable) -> Iterator[None]:
    """Pickle the user's own module by value, since it need not exist there; installed ones by name."""
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


def _unpicklable(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    """Name the argument, or the variable that the function refers to, that cannot be pickled."""
    name = getattr(function, "__name__", "the function")
    for argument, value in _named(function, args, kwargs).items():
        if why := _pickle_error(value):
            return f"argument {argument!r} of {name} cannot be sent to another process ({why}): make it there"
    inner = inspect.unwrap(function)
    if inspect.isfunction(inner):
        outer = inspect.getclosurevars(inner)
        for variable, value in {**outer.nonlocals, **outer.globals}.items():
            if not inspect.ismodule(value) and (why := _pickle_error(value)):
                return f"{name} refers to {variable!r}, which cannot be sent to another process ({why}): make it there"
    return f"{name} cannot be sent to another process: {type(error).__name__}: {error}"


def _named(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def _pickle_error(value: Any) -> str:
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
