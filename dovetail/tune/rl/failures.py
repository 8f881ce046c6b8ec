"""Failures of a user's code (rewards, environments): shown once each, the first traceback kept."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from dovetail.core.errors import UserError

MOST_UNREWARDED = 3  # rollouts in a row without a reward, after which a run stops
DEEPEST = 12  # frames of a traceback that are kept, the last ones


class Failures:
    def __init__(self, told: Callable[[str], object] = lambda line: None):
        """`told` is called with a line for each new (source, kind) of failure."""
        self._told, self._known, self._lock = told, set[tuple[str, str]](), threading.Lock()
        self._first, self._unrewarded = "", 0

    def add(self, source: str, kind: str, message: str, trace: str = "") -> None:
        """`source` names the code that failed, such as "reward 'exact'"."""
        with self._lock:
            is_new = (source, kind) not in self._known
            self._known.add((source, kind))
            self._first = self._first or f"{source}: {message}" + (f"\n{trace}" if trace else "")
        if is_new:
            self._told(f"{source} failed: {message} (completions.jsonl has each case)")

    def end_rollout(self, is_rewarded: bool, rollouts: int) -> None:
        """Raise ValueError after several rollouts in a row without any reward; `rollouts`: of the whole run."""
        self._unrewarded = 0 if is_rewarded else self._unrewarded + 1
        if is_rewarded:
            self._first = ""
        elif self._unrewarded >= min(MOST_UNREWARDED, rollouts):
            last = "last rollout" if self._unrewarded == 1 else f"last {self._unrewarded} rollouts"
            raise UserError(
                f"no completion of the {last} got a reward: the run was stopped and nothing was exported. Correct the "
                "rewards or the environment and start the same command again, which repeats these rollouts. The first "
                f"failure: {self._first or 'every reward returned None'}"
            )


def traceback_of(error: BaseException, *files: str) -> str:
    """Return the traceback of `error` without the leading frames in `files`, which are those of the caller."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-DEEPEST, chain=False)).rstrip()
