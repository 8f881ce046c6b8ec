"""A profile of some steps, for xprof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax


class Trace:
    """`window`: (first, one past the last) step to trace; None: none. A process other than the first traces nothing,
    but comes to the same boundaries."""

    def __init__(self, window: tuple[int, int] | None, folder: Path, first: bool, remark: Callable[[str], object]):
        self._window, self._folder, self._first, self._remark = window, folder / "profile", first, remark
        self._tracing = False

    def is_boundary(self, step: int) -> bool:
        """Nothing else may be under way where tracing begins and ends."""
        return self._window is not None and step in (self._window[0] - 1, self._window[1] - 1)

    def begin(self, step: int) -> None:
        """Before `step` is launched."""
        if self._first and self._window and step == self._window[0]:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def end(self, step: int, leaving: bool) -> None:
        """After `step`, if it is the last to trace or the last of all."""
        if self._tracing and self._window and (leaving or step == self._window[1] - 1):
            jax.profiler.stop_trace()
            self._tracing = False
            self._remark(f"traced into {self._folder}: xprof {self._folder} shows it")
