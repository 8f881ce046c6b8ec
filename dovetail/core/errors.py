"""UserError: what a user can correct. Every other exception is a fault of Dovetail.

The command line prints a UserError as one line and exits with 2, and the server answers it with a status below 500.
Anything else is logged with its traceback: exit code 1, or HTTP 500.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping


class UserError(ValueError):
    """Report input, settings or a machine that the user can correct.

    Args:
        message: What was expected, what came, and what to do.
        param: The option, key or request field at fault, such as `top_k` or `optimizer.lr`.
        code: A short identifier that programs may compare, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class RequestError(UserError):
    """Refuse one request to the engine; its neighbours go on."""


class RecipeError(UserError):
    """Refuse a recipe, an override or a settings object; `param` is the key's dotted path."""


class CheckpointError(UserError):
    """Refuse a checkpoint, an adapter or a weight file that does not match what was asked for."""


class OutOfMemoryError(UserError):
    """Report that a plan, a model or a step does not fit in memory."""


class UnsupportedError(UserError):
    """Refuse what this platform, this jax or this build cannot do."""


class MissingPackageError(UserError, ImportError):
    """Name an optional package that must be installed, and how."""


class FileError(UserError, OSError):
    """Report a file, a folder or a port that the operating system does not give."""


class MissingFileError(FileError, FileNotFoundError):
    """Report a file or a folder that is not there."""


class NotPermittedError(FileError, PermissionError):
    """Report a file or a folder that this user may not use."""


_SENTENCES: Mapping[int, tuple[type[FileError], str]] = {
    errno.ENOENT: (MissingFileError, "there is no file or folder {name}"),
    errno.ENOTDIR: (FileError, "{name} is not a folder"),
    errno.EISDIR: (FileError, "{name} is a folder, not a file"),
    errno.EEXIST: (FileError, "{name} already exists"),
    errno.EACCES: (NotPermittedError, "permission denied: {name}"),
    errno.EPERM: (NotPermittedError, "permission denied: {name}"),
    errno.EROFS: (NotPermittedError, "{name} is on a read-only file system"),
    errno.ENOSPC: (FileError, "no space is left on the device for {name}"),
    errno.EDQUOT: (FileError, "the disk quota is used up: {name}"),
    errno.EADDRINUSE: (FileError, "the address is already in use: choose another port"),
}


def from_os(error: OSError) -> FileError | None:
    """Return the operating system's error as a sentence; None where only a traceback explains it.

    An error without a file's name (a closed pipe, a lost connection) is not the user's, except a full disk or a port
    that is taken.
    """
    if isinstance(error, FileError):
        return error
    kind, sentence = _SENTENCES.get(error.errno or 0, (None, ""))
    if kind is None or (error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE)):
        return None
    name = "this file" if error.filename is None else str(error.filename)
    return kind(sentence.format(name=name))


def outcome(error: BaseException) -> tuple[int, str]:
    """Return (exit code, line) of an error that ends a process: 2 for a user's error, 1 for ours, 130 for ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped"
    if isinstance(error, SystemExit):  # train.guard.stop.Stopped
        return error.code if isinstance(error.code, int) else 1, str(error)
    if (known := as_user_error(error)) is not None:
        return 2, f"error: {known}"
    return 1, f"internal error: {type(error).__name__}: {error}. The traceback shows where; please report it."


def report_failure(error: BaseException) -> tuple[int, str]:
    """Return `outcome(error)`, and print the traceback of an internal error."""
    code, line = outcome(error)
    if code == 1 or os.environ.get("DOVETAIL_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(error)
    return code, line


def as_user_error(error: BaseException) -> UserError | None:
    """Return the error if the user can correct it, with the operating system's errors as sentences; else None."""
    if isinstance(error, UserError):
        return error
    return from_os(error) if isinstance(error, OSError) else None
