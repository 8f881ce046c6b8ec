"""Failures of the user's code (rewards, environments): logged once each, and a limit on rollouts without a reward."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from dovetail.core.errors import UserError

MAX_UNREWARDED = 3  # rollouts in a row without a reward, after which a run stops
MAX_FRAMES = 12  # of a traceback, the last ones
MAX_CHARACTERS = 300  # of an error's message


class Failures:
    """Log each new failure with its traceback, and stop a run that gets no rewards.

    Args:
        log: Called with the text of each new (source, kind, exception type).
    """

    def __init__(self, log: Callable[[str], object] = lambda text: None):
        self._log, self._known, self._lock = log, set[tuple[str, str, str]](), threading.Lock()
        self._first, self._unrewarded = "", 0

    def add(self, source: str, kind: str, message: str, trace: str = "") -> None:
        """Record a failure. `source` names the code that failed, such as "the reward 'exact'"."""
        key = source, kind, message.partition(":")[0] if trace else ""  # the message begins with the exception's type
        below = f"\n{trace}" if trace else ""
        with self._lock:
            is_new = key not in self._known
            self._known.add(key)
            self._first = self._first or f"{source}: {message}{below}"
        if is_new:
            self._log(f"{source} failed: {message} (completions.jsonl has each case){below}")

    def end_rollout(self, is_rewarded: bool, rollouts: int) -> None:
        """Raise a UserError after several rollouts in a row without any reward; `rollouts`: of the whole run."""
        self._unrewarded = 0 if is_rewarded else self._unrewarded + 1
        if is_rewarded:
            self._first = ""
        elif self._unrewarded >= min(MAX_UNREWARDED, rollouts):
            last = "last rollout" if self._unrewarded == 1 else f"last {self._unrewarded} rollouts"
            raise UserError(
                f"no completion of the {last} got a reward: the run was stopped and nothing was exported. Correct the "
                "rewards or the environment and start the same command again, which repeats these rollouts. The first "
                f"failure: {self._first or 'every reward returned None'}",
                param="rewards",
                code="no_rewards",
            )


def describe(error: BaseException) -> str:
    """Return the type and message of an exception, shortened."""
    return f"{type(error).__name__}: {error}"[:MAX_CHARACTERS].rstrip(": ")


def traceback_of(error: BaseException, *files: str) -> str:
    """Return the traceback of `error` without the leading frames in `files`, which are those of the caller."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES, chain=False)).rstrip()
