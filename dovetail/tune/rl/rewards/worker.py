"""Worker: a process that calls reward functions, as its parent sees it. One that hangs is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dovetail.tune.rl.rewards.worker_process import main; main(int(sys.argv[1]))"
)
LOAD_SECONDS = 120.0  # to start, and to import the modules of a function
EXIT_SECONDS = 1.0


class Failed(Exception):
    """A call that brought no values. `kind`: raised, time, died, load."""

    def __init__(self, kind: str, message: str, trace: str = ""):
        super().__init__(message)
        self.kind, self.message, self.trace = kind, message, trace


class Worker:
    """Ready at once: what it needs is loaded with the first call of each function."""

    def __init__(self, functions: Sequence[list[bytes]]):
        """`functions`: of each, the forms that it can travel in."""
        self._functions, self._loaded = functions, set[int]()
        ours, theirs = socket.socketpair()
        self._folder = tempfile.mkdtemp(prefix="dovetail-reward-")  # a worker that is killed does not tidy up
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), paths],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                env=_environment(self._folder),
            )  # fmt: skip
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, index: int, positional: list, named: dict[str, Any], seconds: float) -> Any:
        """What the function returns; Failed otherwise. After the kinds `time` and `died` this worker is of no use."""
        if index not in self._loaded:
            try:
                self._ask(("load", index, self._functions[index]), LOAD_SECONDS)
            except Failed as failed:
                kind = "load" if failed.kind == "raised" else failed.kind
                message = f"it cannot be loaded in a worker process: {failed.message}"
                raise Failed(kind, message, failed.trace) from None
            self._loaded.add(index)
        return self._ask(("call", index, positional, named, seconds), seconds)

    def _ask(self, message: tuple, seconds: float) -> Any:
        try:
            data = pickle.dumps(message)
        except Exception as error:
            raise Failed("raised", f"the rows cannot be sent to a worker process: {error}") from None
        try:
            self._connection.send_bytes(data)
            if not self._connection.poll(seconds):
                raise Failed("time", f"it took more than {seconds:g} s and was stopped")
            kind, value, trace = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise Failed("died", f"its process ended{self._how()}") from None
        if kind != "ok":
            raise Failed(kind, value, trace)
        return value

    def _how(self) -> str:
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"

    def kill(self) -> None:
        """At once, with all that its functions have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """After no thread waits for it any more."""
        self.kill()
        self._connection.close()


def forms_of(function: Callable[..., Any]) -> list[bytes]:
    """How a function can travel: by its name, which is quickest, and by what it consists of, which takes cloudpickle.
    None where it cannot.
    """
    found = []
    with contextlib.suppress(Exception):
        found.append(pickle.dumps(function))
    found = [form for form in found if b"__main__" not in form]  # the script, which a worker does not run again
    if importlib.util.find_spec("cloudpickle") is not None:
        with contextlib.suppress(Exception):
            found.append(_by_value(function))
    return found


def _by_value(function: Callable[..., Any]) -> bytes:
    """With the names of its own module that it uses: a worker may not find that module."""
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
    """Should a function's module load jax, it does not take the accelerator from the trainer."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": folder}
