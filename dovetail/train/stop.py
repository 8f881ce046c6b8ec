"""A polite end: SIGTERM (a preemption) and ctrl-C let the step under way end, and the run save itself."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import jax


class Stop:
    """A context in which the first signal only raises a flag; a second ctrl-C ends the process as usual."""

    def __init__(self) -> None:
        self.signal = 0
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

    def wanted(self, step: int) -> bool:
        """Whether to stop after `step`: all processes answer alike, for the signal may reach one of them only."""
        if jax.process_count() == 1:
            return bool(self.signal)
        return agreed(bool(self.signal), any_=True)


def agreed(mine: bool, any_: bool = False) -> bool:
    """Process 0's answer, or whether any process says so; one process's own."""
    if jax.process_count() == 1:
        return mine
    import numpy as np
    from jax.experimental import multihost_utils

    answers = np.asarray(multihost_utils.process_allgather(np.asarray(mine)))
    return bool(answers.any() if any_ else answers.flat[0])
