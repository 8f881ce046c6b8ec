"""Goodput: the share of the wall time that went into steps that stayed, and where the rest of it went.

Every second of a process belongs to one kind: to the innermost open span, outside of spans to the start, the steps or
the end. The ledger is kept in the run's folder and goes on after a restart. A thread writes it, with what is still
open, so that a kill takes little from it. Work that a crash or a rollback undid was productive when it was done and is
not any more: `restored` moves it from `step` to `lost`.
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

from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic

# kind -> what a reader is told
KINDS = {
    "step": "steps that stayed",
    "start": "start: Python, imports, devices, other processes",
    "prepare": "opening the data, tokenising it the first time",
    "init": "making the first weights",
    "compile": "compiling",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "restore": "restoring a checkpoint",
    "eval": "evaluation",
    "replay": "replaying suspect steps",
    "lost": "steps undone by a crash or a rollback",
    "end": "ending: what is still being written, the report",
}
OTHER = "other"  # a step under way; and what a ledger of an older version gave no kind
# Seconds between two writes, and so what a kill can take: a share of the process's time, within these bounds.
SAVE_SHARE, SAVE_LEAST, SAVE_MOST = 0.02, 1.0, 10.0
MARKS = 1024  # of how many steps the ledger knows when they were done; between two it draws a line


class Goodput:
    """A ledger of wall time. `path`: the file that keeps it, read if it is there; None keeps nothing (every process
    but the first). `age`: seconds that the process has run already. As a context it writes itself now and then."""

    def __init__(
        self,
        path: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        age: float = 0.0,
        calendar: Callable[[], float] = time.time,
    ):
        self._path, self._clock, self._calendar = Path(path) if path else None, clock, calendar
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._marks: list[tuple[int, float]] = [(0, 0.0)]  # (step, productive seconds when it was done)
        self._earlier = 0.0  # wall time of the processes before this one
        self._open: list[str] = []  # kinds of the open spans
        self._outside = "start"  # the kind of what is in no span
        self._pending = 0.0  # seconds since the last step, in no span: a step's, once it is done
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.starts, self.between = 1, 0.0  # seconds from the end of a process to the start of the next: not counted
        if self._path and self._path.exists():
            self._read(self._path)
            self._seconds["lost"] += self._pending  # the step that a kill broke off
            self._pending = 0.0
            self.between += max(0.0, calendar() - age - self._ended)
        self._seconds["start"] += age
        self._start = self._at = clock()  # all time before `_at` has its kind
        self._start -= age

    @classmethod
    def stored(cls, path: str | Path) -> Goodput:
        """What a ledger's file says, to look at: its clock stands and nothing is written."""
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
        if not isinstance(error, ValueError) or self._outside != "start":
            self.save()
        elif self._found is None:  # the recipe was refused: that was no start
            self._path.unlink()
        else:
            write_atomic(self._path, self._found)

    # --- what is counted ----------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """The time of its body. A span within another one takes its time from it, so no second counts twice."""
        if kind not in KINDS:
            raise UserError(f"goodput counts {', '.join(KINDS)}; got {kind!r}")
        self._enter(kind)
        try:
            yield
        finally:
            self._leave()

    def begin(self) -> None:
        """The first step is launched: from here on, what is in no span is a step's."""
        with self._lock:
            self._advance()
            self._outside = "step"

    def step(self, step: int) -> None:
        """This step is done: what was in no span since the one before was productive."""
        with self._lock:
            self._advance()
            self._settle("step")
            self._marks.append((step, self._seconds["step"]))
            if len(self._marks) > MARKS:
                half = MARKS // 2
                self._marks = self._marks[:half:2] + self._marks[half:]  # the older, the coarser

    def undone(self) -> None:
        """A step was done and did not count."""
        with self._lock:
            self._advance()
            self._settle("lost")

    def restored(self, step: int) -> float:
        """The run goes on after `step`: what was done beyond it is lost. The seconds that were."""
        with self._lock:
            self.undone()
            kept = self._productive_until(step)
            lost = max(0.0, self._seconds["step"] - kept)
            self._seconds["step"] -= lost
            self._seconds["lost"] += lost
            self._marks = [mark for mark in self._marks if mark[0] < step] + [(step, self._seconds["step"])]
            return lost

    def end(self) -> None:
        """No further step comes."""
        with self._lock:
            self._advance()
            self._settle("end")
            self._outside = "end"

    # --- what came of it ----------------------------------------------------------------------------------------------

    @property
    def wall(self) -> float:
        """Seconds of all processes that ran so far."""
        return self._earlier + self._clock() - self._start

    @property
    def share(self) -> float:
        """Of the wall time, what went into steps that stayed; 0 before there is any."""
        return self._seconds["step"] / wall if (wall := self.wall) else 0.0

    def table(self) -> list[tuple[str, float, float]]:
        """(kind, seconds, share of the wall time), steps first, then the losses, largest first; none that is 0."""
        with self._lock:
            self._advance()
            wall = self._earlier + self._at - self._start
            kinds = self._seconds | {OTHER: wall - sum(self._seconds.values())}
        losses = sorted((kind for kind in kinds if kind != "step"), key=lambda kind: -kinds[kind])
        return [(kind, kinds[kind], kinds[kind] / wall) for kind in ("step", *losses) if kinds[kind] > 1e-6]

    def save(self) -> None:
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

    # --- inside -------------------------------------------------------------------------------------------------------

    def _enter(self, kind: str) -> None:
        with self._lock:
            self._advance()
            self._open.append(kind)

    def _leave(self) -> None:
        with self._lock:
            self._advance()
            self._open.pop()

    def _advance(self) -> None:
        """Give the time until now its kind."""
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
        """The thread's loop. A full disk does not stop a run; the next write may find room."""
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
        # an older version did not keep these
        self._pending, self.between = kept.get("pending", 0.0), kept.get("between", 0.0)
        self._ended = kept.get("time", path.stat().st_mtime)


def _load(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
        if not {"wall", "starts", "seconds", "marks"} <= kept.keys():
            raise UserError("a key is missing")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a goodput ledger ({error}): move it away, and counting starts again") from None
    return kept


# Where a step's seconds went, where it does more than train: `rollout_seconds` beside `seconds` is such a part.


PART = "_seconds"
REST = "train"


def parts(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line says that they went to, by name."""
    return {name.removesuffix(PART): value for name, value in line.items() if name.endswith(PART) and value is not None}


def split(line: Mapping[str, Any]) -> dict[str, float]:
    """All of a line's `seconds`; empty where it names no part of them. Parts that ran beside the training can be more
    than all of them together."""
    named = parts(line)
    return named | {REST: max(0.0, line["seconds"] - sum(named.values()))} if named and "seconds" in line else {}


def added(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The parts of several steps together, as a line names them."""
    total: dict[str, float] = {}
    for line in lines:
        for name, seconds in parts(line).items():
            total[name + PART] = total.get(name + PART, 0.0) + seconds
    return total
