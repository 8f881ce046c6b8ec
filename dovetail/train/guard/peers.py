"""The processes of one run live and end together.

    with Peers(last_words, lost_seconds=20) as peers:  # after distributed.start
        ...                                            # the run

When one fails, it tells the others through jax's coordination service, and each ends with that error as its last line
and that exit code. One that is killed tells none: process 0 misses its sign of life. One that cannot reach process 0
ends too. None waits: a process blocked in a collective cannot be woken, so the others leave by `os._exit`, as if
killed, which a run survives; and Python's own way out would wait at jax's barrier for those that never come.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import jax

from dovetail.train.guard.abort import on_abort
from dovetail.train.guard.exits import ABORTED, LOST, meaning

POLL_S = 1.0
HEARD_S = 5.0  # for the others to hear of a failure, before process 0, which tells them, is gone
END_S = 24 * 3600  # at the end the others wait for process 0, and it perhaps for an evaluation
FAILED, HEARD, ALIVE = "dovetail/failed", "dovetail/heard", "dovetail/alive"
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")

LastWords = Callable[[BaseException], tuple[int, str]]  # an exit code, and one line for the user


class Peers:
    """Of a run of several processes; one that is alone needs none."""

    def __init__(self, last_words: LastWords, lost_seconds: float) -> None:
        self._last_words, self._lost_seconds = last_words, lost_seconds
        self._done = threading.Event()
        self._ending = threading.Lock()  # the first thread that ends the process does; others wait for the end

    def __enter__(self) -> Peers:
        self._client: Any = _client()
        self._me, self._count = jax.process_index(), jax.process_count()
        # process -> its last sign of life, and when it came
        self._seen = {f"{ALIVE}/{i}": ("", time.monotonic()) for i in range(self._count)}
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()
        on_abort(self._aborted)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._fail(error)
        self._client.wait_at_barrier("dovetail/end", END_S * 1000)  # the watch goes on meanwhile
        self._done.set()
        self._thread.join()

    def tell(self, code: int, line: str) -> None:
        """The others that this process fails. Who says so first is believed."""
        self._publish(code, f"{line} (process {self._me} of {self._count}, on {platform.node()})")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._await_hearing()

    # --- how a process ends -------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> NoReturn:
        if _of_a_collective(error):  # it breaks off for those that are left, too
            self._await_failure(self._lost_seconds + 3 * POLL_S)
        self._fail_with(*self._last_words(error))

    def _fail_with(self, code: int, line: str) -> NoReturn:
        self.tell(code, line)
        self._leave(code, line)

    def _leave(self, code: int, line: str) -> NoReturn:
        """With the code and last line of the process that failed first, or those given if process 0 is out of reach."""
        with self._ending:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                code, line = self._failure() or (code, line)
                self._await_hearing()
            _end(code, line)

    def _aborted(self) -> NoReturn:
        """XLA ends the process at once (SIGABRT) when process 0 is gone, or when it meets a fault of its own."""
        line = "error: XLA ended this process (see above)"
        # In the first case the thread that aborts, this one, holds the client's lock: another one tries to speak.
        teller = threading.Thread(target=self._fail_with, args=(ABORTED, line), daemon=True)
        teller.start()
        teller.join(HEARD_S + 2 * POLL_S)
        _end(LOST, _lost(0))

    # --- the watch ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        turn, answered = 0, time.monotonic()
        while not self._done.wait(POLL_S):
            try:
                turn += 1
                self._client.key_value_set(f"{ALIVE}/{self._me}", str(turn), allow_overwrite=True)
                if self._me == 0:
                    self._look_for_lost()
                if failure := self._failure():
                    self._leave(*failure)
                answered = time.monotonic()
            except jax.errors.JaxRuntimeError:
                if time.monotonic() - answered > self._lost_seconds:
                    self._leave(LOST, _lost(0))

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        for name, turn in self._client.key_value_dir_get(ALIVE):
            if self._seen[name][0] != turn:
                self._seen[name] = (turn, now)
        lost = [int(name.rpartition("/")[2]) for name, (_, at) in self._seen.items() if now - at > self._lost_seconds]
        if lost:
            self._publish(LOST, _lost(*lost))

    def _publish(self, code: int, line: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first, or process 0 is gone
            self._client.key_value_set(FAILED, json.dumps([code, line]))

    def _failure(self) -> tuple[int, str] | None:
        """(exit code, last line) of the process that failed first."""
        try:
            code, line = json.loads(self._client.key_value_try_get(FAILED))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return code, line

    def _await_failure(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while self._failure() is None and time.monotonic() < until:
                time.sleep(POLL_S / 4)

    def _await_hearing(self) -> None:
        """Process 0 holds what the others must read: it goes last, or when those that are left have had time."""
        until = time.monotonic() + HEARD_S
        self._client.key_value_set(f"{HEARD}/{self._me}", "", allow_overwrite=True)
        while self._me == 0 and time.monotonic() < until:
            everyone = len(self._client.key_value_dir_get(HEARD)) == self._count
            time.sleep(POLL_S / 4)  # those that have read it are about to end
            if everyone:
                return


def _of_a_collective(error: BaseException) -> bool:
    """jax raises some of XLA's failures as ValueError; all begin with the name of a status."""
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(_STATUS.match(str(error)))


def _lost(*processes: int) -> str:
    who = " and ".join(f"process {i}" for i in processes)
    return f"error: {who} gave no sign of life; was it killed, or its host lost? {meaning(LOST)}"


def _end(code: int, line: str) -> NoReturn:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # over the live line
    print(line, file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _client() -> Any:
    from jax._src.distributed import global_state  # jax has no public way to its key-value store

    return global_state.client
