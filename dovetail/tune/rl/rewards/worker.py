"""Worker: a process that calls reward functions, one call at a time, and is killed when a call takes too long.

The first half is the parent's side, the second half the process itself. It is not a fork of its parent and does not
run its parent's script again, so nothing that the script does at its top (jax, a training run) happens there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any

from dovetail.tune.rl.failures import describe, traceback_of
from dovetail.tune.rl.rewards import user_code

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dovetail.tune.rl.rewards.worker import main; main(int(sys.argv[1]))"
)
LOAD_SECONDS = 120.0  # to start, and to import the modules of a function
EXIT_SECONDS = 1.0

Response = tuple[str, Any, str]  # ("ok", values, ""), or a failure's kind, message and traceback


class RewardFailure(Exception):
    """Report a call of a reward function that returned no values.

    Attributes:
        kind: raised, time, died, load, type or length.
        message: The reason.
        trace: The traceback, if the function raised.
    """

    def __init__(self, kind: str, message: str, trace: str = ""):
        super().__init__(message)
        self.kind, self.message, self.trace = kind, message, trace


class Worker:
    """A worker process. It imports a function's modules at the first call of the function.

    Args:
        functions: For each function its pickled forms: see `pickled_forms`.
    """

    def __init__(self, functions: Sequence[list[bytes]]):
        self._functions, self._loaded = functions, set[int]()
        ours, theirs = socket.socketpair()
        self._folder = tempfile.mkdtemp(prefix="dovetail-reward-")  # removed here: a killed worker cannot do it
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), paths],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                env=_environment(self._folder),
            )  # fmt: skip
        self._connection = Connection(ours.detach())

    def call(self, index: int, positional: list, named: dict[str, Any], seconds: float) -> Any:
        """Return the values of function `index`.

        Raises:
            RewardFailure: After the kinds `time` and `died` this worker must be replaced.
        """
        if index not in self._loaded:
            try:
                self._request(("load", index, self._functions[index]), LOAD_SECONDS)
            except RewardFailure as failure:
                kind = "load" if failure.kind == "raised" else failure.kind
                message = f"it cannot be loaded in a worker process: {failure.message}"
                raise RewardFailure(kind, message, failure.trace) from None
            self._loaded.add(index)
        return self._request(("call", index, positional, named, seconds), seconds)

    def _request(self, message: tuple, seconds: float) -> Any:
        try:
            data = pickle.dumps(message)
        except Exception as error:
            raise RewardFailure("raised", f"the rows cannot be sent to a worker process: {error}") from None
        try:
            self._connection.send_bytes(data)
            if not self._connection.poll(seconds):
                raise RewardFailure("time", f"it took more than {seconds:g} s and was stopped")
            kind, value, trace = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise RewardFailure("died", f"its process ended{self._exit()}") from None
        if kind != "ok":
            raise RewardFailure(kind, value, trace)
        return value

    def _exit(self) -> str:
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"

    def kill(self) -> None:
        """Kill the process at once, with every process that its functions have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Kill the process and close the connection, which no thread may be waiting for."""
        self.kill()
        self._connection.close()


def pickled_forms(function: Callable[..., Any]) -> list[bytes]:
    """Return a function pickled by its name, and by value if cloudpickle is installed; [] if it cannot be pickled."""
    forms = []
    with contextlib.suppress(Exception):
        forms.append(pickle.dumps(function))
    forms = [form for form in forms if b"__main__" not in form]  # the script, which a worker does not run again
    if importlib.util.find_spec("cloudpickle") is not None:
        with contextlib.suppress(Exception):
            forms.append(_pickled_by_value(function))
    return forms


def _pickled_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function with the names of its module that it uses: a worker may not find that module."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    if module is None or module.__name__ == "__main__" or module.__name__.partition(".")[0] == "dovetail":
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _environment(folder: str) -> dict[str, str]:
    """Return the worker's environment; if a function's module loads jax, it must not take the accelerator."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": folder}


# --- the process ------------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Answer requests from a socket until the parent closes it."""
    connection = Connection(fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    functions: dict[int, Any] = {}
    while True:
        connection.send_bytes(_pickled(_respond(inbox.get(), functions)))


def _pickled(response: Response) -> bytes:
    try:
        return pickle.dumps(response)
    except Exception as error:
        return pickle.dumps(("raised", f"its return value cannot be sent back: {describe(error)}", ""))


def _read(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Read requests on a thread, so that a function without end does not keep the process alive without its parent."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)  # its parent created it for this process alone
        os.killpg(0, signal.SIGKILL)  # this process, and those that its functions have started


def _respond(message: bytes, functions: dict[int, Any]) -> Response:
    try:
        what, index, *rest = pickle.loads(message)
        if what == "load":
            functions[index] = _load(rest[0])
            return "ok", None, ""
        positional, named, seconds = rest
        return "ok", call(functions[index], positional, named, seconds), ""
    except BaseException as error:  # a SystemExit too: this process goes on
        return "raised", describe(error), traceback_of(error, __file__, user_code.__file__)


def _load(forms: list[bytes]) -> Any:
    """Return the function from the first form that can be read here."""
    for form in forms[:-1]:
        try:
            return pickle.loads(form)
        except Exception:  # this process does not find its module, or finds another one
            continue
    return pickle.loads(forms[-1])


def call(function: Any, positional: list, named: dict[str, Any], seconds: float) -> Any:
    """Call a function, sync or async, and return its values as a list of plain numbers, which can be pickled."""
    with time_limit(seconds):
        values = function(*positional, **named)
        if inspect.isawaitable(values):
            values = asyncio.run(_await(values))
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if isinstance(values, tuple) else values


async def _await(values: Any) -> Any:
    return await values


# --- the time limit of a call -----------------------------------------------------------------------------------------

_END: ContextVar[float] = ContextVar("end of the call", default=math.inf)
SPARE = 0.1  # the share of the limit that is left for the response


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Set what `seconds_left` counts down from."""
    token = _END.set(time.monotonic() + seconds * (1 - SPARE))
    try:
        yield
    finally:
        _END.reset(token)


def seconds_left() -> float:
    """Return how long the current call may still take, so that it can return the finished rows; may be infinite."""
    return _END.get() - time.monotonic()
