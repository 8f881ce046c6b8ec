"""End a run that hangs or that has lost a process, so that the job runner can start it again.

    with Watchdog(settings.hang_seconds, run_dir, peers) as watchdog:
        for step in ...:
            ...
            watchdog.beat(step)
            with watchdog.suspend("evaluation"): ...

A collective that waits for a lost host hangs every process; each has its own watchdog and writes its own stacks.

    with Peers(lost_seconds=20) as peers:  # after distributed.start
        ...                                # the run

A process that fails tells the others through jax's coordination service, and each ends with that error as its last line
and that exit code. A process that is killed cannot: process 0 notices the missing heartbeat. A process that
cannot reach process 0 ends too. A process blocked in a collective cannot be woken, so the others leave by `os._exit`,
as if killed, which a run survives; Python's normal exit would wait at jax's barrier for processes that never come.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax

from dovetail.core.errors import RecipeError, report_failure
from dovetail.train.guard.exits import ABORTED, HUNG, LOST, meaning, on_abort

GOODBYE_SECONDS = 10.0  # telling the other processes may itself hang


class Watchdog:
    """Write every thread's stack and end the process with HUNG if no step ends for `hang_seconds`.

    Args:
        hang_seconds: Seconds without a step; 0: no watchdog.
        run_dir: Where the stacks are written.
        peers: The other processes, which are notified before this one exits.
    """

    def __init__(self, hang_seconds: float, run_dir: str | os.PathLike, peers: Peers | None = None) -> None:
        if hang_seconds < 0:
            raise RecipeError(
                f"`hang_seconds` must be 0 (no watchdog) or more, got {hang_seconds}", param="hang_seconds"
            )
        self.hang_seconds = hang_seconds
        self.path = Path(run_dir) / f"hang-{platform.node()}-{os.getpid()}.txt"
        self._peers = peers
        self._step, self._last = -1, time.monotonic()
        self._suspended: list[str] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.hang_seconds:
            self._last = time.monotonic()
            self._done.clear()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def beat(self, step: int) -> None:
        """Record that a step has ended."""
        self._step, self._last = step, time.monotonic()

    @contextmanager
    def suspend(self, what: str = "a known pause") -> Iterator[None]:
        """Pause the clock during a long known operation (compilation, evaluation, the last save), then restart it."""
        self._suspended.append(what)
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._suspended.remove(what)

    def _watch(self) -> None:
        pause = min(self.hang_seconds / 4, 10.0)
        try:
            while not self._done.wait(pause):
                # If a C call holds the GIL, this thread cannot run. Then faulthandler's own thread, which does not need
                # the GIL, writes the stacks and ends the process (exit code 1); this line postpones it each time. Not
                # sys.stderr: a notebook's has no file descriptor.
                later = self.hang_seconds + 4 * pause
                faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__ or 2)
                silent = time.monotonic() - self._last
                if silent > self.hang_seconds and not self._suspended:
                    self._report(silent)
                    os._exit(HUNG)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report(self, silent: float) -> None:
        after = f"since step {self._step}" if self._step >= 0 else "since the start"
        message = (
            f"no step has ended for {silent:.0f} s {after} (health.hang_seconds is {self.hang_seconds:g}) "
            f"on {platform.node()}, process {os.getpid()}; stacks in {self.path}; {meaning(HUNG)}"
        )
        try:
            self._write(message)
        except OSError as error:
            print(f"{self.path} could not be written: {error}", file=sys.stderr)
        print(message, file=sys.stderr)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        sys.stderr.flush()
        if self._peers is not None:
            goodbye = threading.Thread(target=self._peers.tell, args=(HUNG, message), daemon=True)
            goodbye.start()
            goodbye.join(GOODBYE_SECONDS)

    def _write(self, message: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            print(message, file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)


# --- the processes of a run -------------------------------------------------------------------------------------------

POLL_S = 1.0
HEARD_S = 5.0  # time for the others to read of a failure before process 0, which holds the message, exits
END_S = 24 * 3600  # at the end the others wait for process 0, which may still run an evaluation
FAILED, HEARD, ALIVE = "dovetail/failed", "dovetail/heard", "dovetail/alive"
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")


class Peers:
    """End all processes of a run together when one fails or is lost.

    Args:
        lost_seconds: Seconds without a heartbeat after which a process counts as lost.
    """

    def __init__(self, lost_seconds: float) -> None:
        self._lost_seconds = lost_seconds
        self._done = threading.Event()
        self._ending = threading.Lock()  # held by the first thread that ends the process; others wait

    def __enter__(self) -> Peers:
        self._client: Any = _client()
        self._me, self._count = jax.process_index(), jax.process_count()
        # process -> its last heartbeat and when it arrived
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
        """Tell the other processes that this one fails. The first message counts."""
        self._publish(code, f"{line} (process {self._me} of {self._count}, on {platform.node()})")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._await_hearing()

    # --- how a process ends -------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> NoReturn:
        if _of_a_collective(error):  # a failed process breaks collectives of the others too
            self._await_failure(self._lost_seconds + 3 * POLL_S)
        self._fail_with(*report_failure(error))

    def _fail_with(self, code: int, line: str) -> NoReturn:
        self.tell(code, line)
        self._leave(code, line)

    def _leave(self, code: int, line: str) -> NoReturn:
        """Exit with the code and line of the process that failed first, or those given if process 0 is unreachable."""
        with self._ending:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                code, line = self._failure() or (code, line)
                self._await_hearing()
            _end(code, line)

    def _aborted(self) -> NoReturn:
        """Exit when XLA aborts the process (SIGABRT): process 0 is gone, or XLA has an internal error."""
        line = "error: XLA ended this process (see above)"
        # In the first case the aborting thread holds the client's lock, so another thread notifies the other processes.
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
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first, or process 0 is gone
            self._client.key_value_set(FAILED, json.dumps([code, line]))

    def _failure(self) -> tuple[int, str] | None:
        """Return (exit code, last line) of the process that failed first, or None."""
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
        """Wait until the others have read the message, at most HEARD_S: process 0 holds it and exits last."""
        until = time.monotonic() + HEARD_S
        self._client.key_value_set(f"{HEARD}/{self._me}", "", allow_overwrite=True)
        while self._me == 0 and time.monotonic() < until:
            everyone = len(self._client.key_value_dir_get(HEARD)) == self._count
            time.sleep(POLL_S / 4)
            if everyone:
                return


def _of_a_collective(error: BaseException) -> bool:
    """Return whether XLA raised the error. jax raises some of these as ValueError; all begin with a status name."""
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(_STATUS.match(str(error)))


def _lost(*processes: int) -> str:
    who = " and ".join(f"process {i}" for i in processes)
    return f"error: {who} sent no heartbeat; was it killed, or its host lost? {meaning(LOST)}"


def _end(code: int, line: str) -> NoReturn:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # overwrite the live line
    print(line, file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _client() -> Any:
    from jax._src.distributed import global_state  # jax has no public way to its key-value store

    return global_state.client
