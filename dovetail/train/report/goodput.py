"""Account for a run's wall time: goodput is the share spent in steps that were kept.

Every second of a process belongs to one kind: that of the innermost open span, or outside of spans to the start, the
steps or the end. The ledger is kept in the run's folder and continues after a restart. A thread writes it now and then,
including open spans, so that a kill loses little. `restored` moves the time of steps that a crash or a rollback undid
from `step` to `lost`.
"""

from __future__ import annotations

import bisect
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.core.errors import FileError, UserError
from dovetail.core.files import write_atomic

# kind -> its description in the report
KINDS = {
    "step": "steps that were kept",
    "start": "start: Python, imports, devices, other processes",
    "prepare": "opening the data, tokenising it the first time",
    "init": "initialising the weights",
    "compile": "compiling",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "restore": "restoring a checkpoint",
    "eval": "evaluation",
    "replay": "replaying suspect steps",
    "lost": "steps undone by a crash or a rollback",
    "end": "the end: last writes, the report",
}
OTHER = "other"  # an unfinished step; and time that an older version's ledger did not classify
# Seconds between two writes, which is what a kill can lose: a share of the process's time, within these bounds.
SAVE_SHARE, SAVE_LEAST, SAVE_MOST = 0.02, 1.0, 10.0
MARKS = 1024  # steps whose end the ledger stores; between two it interpolates


class Goodput:
    """Keep a ledger of wall time. As a context manager it is written now and then.

    Args:
        path: The ledger's file, read if it exists; None: nothing is stored (every process but the first).
        clock: Returns seconds.
        age: Seconds that the process has run already.
        calendar: Returns the time of day.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        age: float = 0.0,
        calendar: Callable[[], float] = time.time,
    ):
        self._path, self._clock, self._calendar = Path(path) if path else None, clock, calendar
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._marks: list[tuple[int, float]] = [(0, 0.0)]  # (step, productive seconds at its end)
        self._earlier = 0.0  # wall time of the processes before this one
        self._open: list[str] = []  # kinds of the open spans
        self._outside = "start"  # the kind of time outside of spans
        self._pending = 0.0  # seconds outside of spans since the last step; a step's once it ends
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.starts, self.between = 1, 0.0  # seconds between the end of a process and the next start, not counted
        if self._path and self._path.exists():
            self._read(self._path)
            self._seconds["lost"] += self._pending  # the step that a kill interrupted
            self._pending = 0.0
            self.between += max(0.0, calendar() - age - self._ended)
        self._seconds["start"] += age
        self._start = self._at = clock()  # all time before `_at` is classified
        self._start -= age

    @classmethod
    def stored(cls, path: str | Path) -> Goodput:
        """Return a stored ledger for reading: its clock stands still and nothing is written."""
        ledger = cls(clock=lambda: 0.0)
        ledger._read(Path(path))
        ledger.starts -= 1
        return ledger

    def __enter__(self) -> Goodput:
        if self._path:
            self._found = self._path.read_text() if self._path.exists() else None
            self.save()
            self._over.clear()
            self._thread = threading.Thread(target=self._keep, name="goodput", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._path or not self._thread:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        if not isinstance(error, UserError) or self._outside != "start":
            self.save()
        elif self._found is None:  # the recipe was refused: not a start
            self._path.unlink()
        else:
            write_atomic(self._path, self._found)

    # --- counting -----------------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Count the time of the block as `kind`. A nested span is not counted in the outer one."""
        assert kind in KINDS, kind
        self._enter(kind)
        try:
            yield
        finally:
            self._leave()

    def begin(self) -> None:
        """Record that the first step is launched: time outside of spans now belongs to steps."""
        with self._lock:
            self._advance()
            self._outside = "step"

    def step(self, step: int) -> None:
        """Record the end of a step: the time outside of spans since the previous one was productive."""
        with self._lock:
            self._advance()
            self._settle("step")
            self._marks.append((step, self._seconds["step"]))
            if len(self._marks) > MARKS:
                half = MARKS // 2
                self._marks = self._marks[:half:2] + self._marks[half:]  # older marks are coarser

    def undone(self) -> None:
        """Record that a step ended and was discarded."""
        with self._lock:
            self._advance()
            self._settle("lost")

    def restored(self, step: int) -> float:
        """Record that the run continues after `step`, so later steps are lost; return their seconds."""
        with self._lock:
            self.undone()
            kept = self._productive_until(step)
            lost = max(0.0, self._seconds["step"] - kept)
            self._seconds["step"] -= lost
            self._seconds["lost"] += lost
            self._marks = [mark for mark in self._marks if mark[0] < step] + [(step, self._seconds["step"])]
            return lost

    def end(self) -> None:
        """Record that no further step follows."""
        with self._lock:
            self._advance()
            self._settle("end")
            self._outside = "end"

    # --- results ------------------------------------------------------------------------------------------------------

    @property
    def wall(self) -> float:
        """Return the seconds of all processes so far."""
        return self._earlier + self._clock() - self._start

    @property
    def share(self) -> float:
        """Return the share of the wall time in steps that were kept; 0 at the start."""
        return self._seconds["step"] / wall if (wall := self.wall) else 0.0

    def table(self) -> list[tuple[str, float, float]]:
        """Return (kind, seconds, share of the wall time): steps first, then losses, largest first, without zeros."""
        with self._lock:
            self._advance()
            wall = self._earlier + self._at - self._start
            kinds = self._seconds | {OTHER: wall - sum(self._seconds.values())}
        losses = sorted((kind for kind in kinds if kind != "step"), key=lambda kind: -kinds[kind])
        return [(kind, kinds[kind], kinds[kind] / wall) for kind in ("step", *losses) if kinds[kind] > 1e-6]

    def save(self) -> None:
        """Write the ledger."""
        if not self._path:
            return
        with self._lock:
            self._advance()
            kept = {
                "wall": self._earlier + self._at - self._start, "starts": self.starts, "between": self.between,
                "time": self._calendar(), "seconds": self._seconds, "pending": self._pending, "marks": self._marks,
            }  # fmt: skip
            text = json.dumps(kept) + "\n"
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, text)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _enter(self, kind: str) -> None:
        with self._lock:
            self._advance()
            self._open.append(kind)

    def _leave(self) -> None:
        with self._lock:
            self._advance()
            self._open.pop()

    def _advance(self) -> None:
        """Classify the time until now."""
        now = self._clock()
        passed, self._at = now - self._at, now
        kind = self._open[-1] if self._open else self._outside
        if kind == "step":
            self._pending += passed
        else:
            self._seconds[kind] += passed

    def _settle(self, kind: str) -> None:
        self._seconds[kind] += self._pending
        self._pending = 0.0

    def _keep(self) -> None:
        """Write the ledger in a loop, on a thread. A full disk does not stop a run."""
        pause = SAVE_LEAST
        while not self._over.wait(pause):
            try:
                self.save()
            except OSError:
                pause = SAVE_MOST
                continue
            pause = min(SAVE_MOST, max(SAVE_LEAST, SAVE_SHARE * (self._clock() - self._start)))

    def _productive_until(self, step: int) -> float:
        at = bisect.bisect_right(self._marks, step, key=lambda mark: mark[0])
        if at == len(self._marks):
            return self._marks[-1][1]
        (before, low), (after, high) = self._marks[at - 1], self._marks[at]
        return low + (high - low) * (step - before) / (after - before)

    def _read(self, path: Path) -> None:
        kept = _load(path)
        self._earlier, self.starts = kept["wall"], kept["starts"] + 1
        self._seconds |= {kind: seconds for kind, seconds in kept["seconds"].items() if kind in KINDS}
        self._marks = [(step, seconds) for step, seconds in kept["marks"]]
        # missing in ledgers of older versions
        self._pending, self.between = kept.get("pending", 0.0), kept.get("between", 0.0)
        self._ended = kept.get("time", path.stat().st_mtime)


def _load(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
        if not {"wall", "starts", "seconds", "marks"} <= kept.keys():
            raise KeyError("a key is missing")
    except (ValueError, KeyError, AttributeError) as error:
        raise FileError(f"{path} is not a goodput ledger ({error}): move it away to start a new one") from None
    return kept


# --- parts of a step --------------------------------------------------------------------------------------------------
#
# A step that does more than train has metrics such as `rollout_seconds` besides `seconds`.

PART = "_seconds"
REST = "train"


def parts(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts that a line of metrics names, in seconds."""
    return {name.removesuffix(PART): value for name, value in line.items() if name.endswith(PART) and value is not None}


def split(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a line's `seconds` and the rest; empty if it names no parts.

    Parts that ran beside the training may exceed the total.
    """
    named = parts(line)
    return named | {REST: max(0.0, line["seconds"] - sum(named.values()))} if named and "seconds" in line else {}


def added(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the summed parts of several steps, named as in a line of metrics."""
    total: dict[str, float] = {}
    for line in lines:
        for name, seconds in parts(line).items():
            total[name + PART] = total.get(name + PART, 0.0) + seconds
    return total
