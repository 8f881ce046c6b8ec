"""Goodput: the share of the wall time that went into steps that stayed, and where the rest of it went.

The ledger is kept in the run's folder and goes on after a restart. Work that a crash or a rollback undid was productive
when it was done and is not any more: `restored` moves it from `step` to `lost`.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.train.files import write_whole

# kind -> what a reader is told
KINDS = {
    "step": "steps that stayed",
    "init": "start: devices, weights, data",
    "compile": "compiling",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "restore": "restoring a checkpoint",
    "eval": "evaluation",
    "replay": "replaying suspect steps",
    "lost": "steps undone by a crash or a rollback",
}
OTHER = "other"  # wall time that no kind was given for
SAVE_EVERY = 10.0  # seconds: what a kill can take from the ledger
MARKS = 1024  # of how many steps the ledger knows when they were done; between two it draws a line


class Goodput:
    """A ledger of wall time. `path`: the file that keeps it, read if it is there; None keeps nothing (every process
    but the first)."""

    def __init__(self, path: str | Path | None = None, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = Path(path) if path else None, clock
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._marks: list[tuple[int, float]] = [(0, 0.0)]  # (step, productive seconds when it was done)
        self._earlier = 0.0  # wall time of the processes before this one
        self._inner: list[float] = []  # seconds spent inside spans within each open span
        self.starts = 1
        if self._path and self._path.exists():
            self._read(self._path)
        self._start = self._saved = clock()

    @classmethod
    def stored(cls, path: str | Path) -> Goodput:
        """What a ledger's file says, to look at: its clock stands and nothing is written."""
        ledger = cls(clock=lambda: 0.0)
        ledger._read(Path(path))
        ledger.starts -= 1
        return ledger

    # --- what is counted ----------------------------------------------------------------------------------------------

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """The time of its body. A span within another one takes its time from it, so no second counts twice."""
        _known(kind)
        start = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole, inner = self._clock() - start, self._inner.pop()
            if self._inner:
                self._inner[-1] += whole
            self._count(kind, max(0.0, whole - inner))

    def add(self, kind: str, seconds: float) -> None:
        """Time that was measured elsewhere, and is outside every open span."""
        _known(kind)
        self._count(kind, seconds)

    def step(self, step: int, seconds: float) -> None:
        """`seconds` of productive work that ended with this step."""
        self._count("step", seconds)
        self._marks.append((step, self._seconds["step"]))
        if len(self._marks) > MARKS:
            half = MARKS // 2
            self._marks = self._marks[:half:2] + self._marks[half:]  # the older, the coarser

    def restored(self, step: int) -> float:
        """The run goes on after `step`: what was done beyond it is lost. The seconds that were."""
        kept = self._productive_until(step)
        lost = max(0.0, self._seconds["step"] - kept)
        self._seconds["step"] -= lost
        self._seconds["lost"] += lost
        self._marks = [mark for mark in self._marks if mark[0] < step] + [(step, self._seconds["step"])]
        self.save()
        return lost

    # --- what came of it ----------------------------------------------------------------------------------------------

    @property
    def wall(self) -> float:
        """Seconds of all processes that ran so far. Time spent above it in spans (of a test's clock, say) counts."""
        return max(self._earlier + self._clock() - self._start, sum(self._seconds.values()))

    @property
    def share(self) -> float:
        """Of the wall time, what went into steps that stayed; 0 before there is any."""
        return self._seconds["step"] / self.wall if self.wall else 0.0

    def table(self) -> list[tuple[str, float, float]]:
        """(kind, seconds, share of the wall time), steps first, then the losses, largest first; none that is 0."""
        wall = self.wall
        kinds = self._seconds | {OTHER: wall - sum(self._seconds.values())}
        losses = sorted((kind for kind in kinds if kind != "step"), key=lambda kind: -kinds[kind])
        return [(kind, kinds[kind], kinds[kind] / wall) for kind in ("step", *losses) if kinds[kind] > 0]

    def save(self) -> None:
        self._saved = self._clock()
        if self._path:
            kept = {"wall": self.wall, "starts": self.starts, "seconds": self._seconds, "marks": self._marks}
            write_whole(self._path, json.dumps(kept) + "\n")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _count(self, kind: str, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"time spent is not negative; got {seconds} seconds of {kind}")
        self._seconds[kind] += seconds
        if self._clock() - self._saved >= SAVE_EVERY:
            self.save()

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


def _load(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
        if not {"wall", "starts", "seconds", "marks"} <= kept.keys():
            raise ValueError("a key is missing")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a goodput ledger ({error}): move it away, and counting starts again") from None
    return kept


def _known(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"goodput counts {', '.join(KINDS)}; got {kind!r}")
