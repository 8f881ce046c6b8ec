"""The process of a worker: it loads reward functions and calls them, one call at a time, until its parent goes.

Started by `worker.py` with a socket. It is no fork of its parent and does not run its parent's script again, so that
nothing that the script does at its top (jax, a training run) happens here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import queue
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from dovetail.tune.rl.failures import traceback_of
from dovetail.tune.rl.rewards import imported
from dovetail.tune.rl.rewards.deadline import time_limit

Answer = tuple[str, Any, str]  # ("ok", values, ""), or a failure's kind, message and traceback
SHORT = 300  # characters of an error


def main(fd: int) -> None:
    connection = Connection(fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    functions: dict[int, Any] = {}
    while True:
        connection.send_bytes(_sent(answer(inbox.get(), functions)))


def _sent(answer: Answer) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(("raised", f"what it returned cannot be sent back: {told(error)}", ""))


def _read(connection: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """On a thread of its own: a function that never returns does not keep the process alive without its parent."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)  # its parent made it for this process alone
        os.killpg(0, signal.SIGKILL)  # this process, and those that its functions have started


def answer(message: bytes, functions: dict[int, Any]) -> Answer:
    try:
        what, index, *rest = pickle.loads(message)
        if what == "load":
            functions[index] = _load(rest[0])
            return "ok", None, ""
        positional, named, seconds = rest
        return "ok", call(functions[index], positional, named, seconds), ""
    except BaseException as error:  # a SystemExit too: this process goes on
        return "raised", told(error), traceback_of(error, __file__, imported.__file__)


def call(function: Any, positional: list, named: dict[str, Any], seconds: float) -> Any:
    """A list of what it returned: plain numbers travel, whatever an array is made of."""
    with time_limit(seconds):
        found = function(*positional, **named)
        if inspect.isawaitable(found):
            found = asyncio.run(_await(found))
    if hasattr(found, "tolist"):
        found = found.tolist()
    return list(found) if isinstance(found, tuple) else found


async def _await(found: Any) -> Any:
    return await found


def _load(forms: list[bytes]) -> Any:
    """The first form that can be read here: a function by its name, or else by what it consists of."""
    for form in forms[:-1]:
        try:
            return pickle.loads(form)
        except Exception:  # its module is not one that this process finds, or not the same one
            continue
    return pickle.loads(forms[-1])


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:SHORT].rstrip(": ")
