"""A polite end: SIGTERM (a preemption) and ctrl-C let the step under way end, and the run save itself.

Processes of one run must do so after the same step, though the signal may reach one of them only. They agree through
jax's coordination service and not through the devices: a collective would wait for the steps under way.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType

import jax

MARGIN = 4  # steps between saying that something will be done and doing it: by then all have heard


class Together:
    """Something that all processes do after the same step, when one of them wants it; again after `done`."""

    def __init__(self, name: str) -> None:
        self._name, self._turn, self._after = name, 0, -1

    def is_due(self, wanted: bool, step: int) -> bool:
        """Asked by every process at every step."""
        if jax.process_count() == 1:
            return wanted
        from jax._src.distributed import global_state

        client, key = global_state.client, f"dovetail/{self._name}/{self._turn}"
        if self._after < 0 and wanted:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
                client.key_value_set(key, str(step + MARGIN))  # type: ignore[union-attr]
        if self._after < 0:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has said it yet
                self._after = int(client.key_value_try_get(key))  # type: ignore[union-attr]
        return 0 <= self._after <= step

    def done(self) -> None:
        self._turn, self._after = self._turn + 1, -1


class Stop:
    """A context in which the first signal only raises a flag; a second ctrl-C ends the process as usual."""

    def __init__(self) -> None:
        self.signal = 0
        self._together = Together("stop")
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number

    def is_due(self, step: int) -> bool:
        """Whether to stop after `step`."""
        due = self._together.is_due(bool(self.signal), step)
        if due and not self.signal:
            self.signal = signal.SIGTERM  # another process's
        return due
