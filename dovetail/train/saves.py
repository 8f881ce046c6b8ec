"""A run's checkpoints: whole states, each with the number of the next batch and the recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.core.compute import compute_of
from dovetail.core.errors import FileError, UserError
from dovetail.io.checkpoint import Checkpoints
from dovetail.train.changes import changes, rows_key_of
from dovetail.train.guard.stop import Together
from dovetail.train.inputs import changed_inputs, refusal
from dovetail.train.position import Position
from dovetail.train.prepare import Ready
from dovetail.train.recorded import record
from dovetail.train.report.goodput import Goodput


class Saves:
    """As a context it waits for what is still being written."""

    def __init__(
        self, ready: Ready, folder: Path, goodput: Goodput, remark: Callable[[str], None], inputs: Mapping[str, str]
    ):
        self._ready, self._settings, self._folder = ready, ready.settings, folder
        self._goodput, self._remark, self._inputs = goodput, remark, dict(inputs)
        self._by_clock, self._saved_at, self._lost = Together("save"), time.monotonic(), False
        wanted = self._settings.checkpoint
        self.checkpoints = Checkpoints(
            folder / "checkpoints", durable=wanted.durable, keep=wanted.keep, keep_every=wanted.keep_every,
            durable_every=wanted.durable_every, on_problem=remark,
        )  # fmt: skip

    def __enter__(self) -> Saves:
        self.checkpoints.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.checkpoints.__exit__(kind, error, trace)

    # --- where a run begins -------------------------------------------------------------------------------------------

    def open(self) -> Position:
        """The newest good checkpoint, or a new state."""
        with self._goodput.span("restore"):
            at = self._resumed() if self.checkpoints.latest() is not None else None
        if at is None:
            self._goodput.restored(0)  # what a process that saved nothing did
            with self._goodput.span("init"):
                at = Position(self._ready.init(_given_weights(self._ready)))
        self._saved_at = time.monotonic()
        return at

    def _resumed(self) -> Position:
        at, meta = self._restored()
        self._check_inputs(at.step, meta.get("inputs"))
        self._remark(f"going on after step {at.step:,}, from {self._folder / 'checkpoints'}")
        if changed := changes(meta["recipe"], self._settings):
            self._remark(f"the recipe has changed since it was saved: {', '.join(changed.values())}")
        return at

    def _check_inputs(self, step: int, stored: Mapping[str, str] | None) -> None:
        changed = changed_inputs(stored, self._inputs)
        if not changed:
            return
        if not self._settings.checkpoint.allow_changed_inputs:
            raise UserError(refusal(self._folder, step, changed))
        self._remark(f"changed since step {step:,}, and used as it is now: {', '.join(changed)}")

    def restore(self) -> Position:
        with self._goodput.span("restore"):
            return self._restored()[0]

    def _restored(self) -> tuple[Position, dict[str, Any]]:
        """Return the newest good checkpoint and what was saved with it (see `save`)."""
        state, meta, step = self.checkpoints.restore(self._ready.form)
        key = self._settings.rows_key
        if key not in (meta["data"], rows_key_of(meta["recipe"], type(self._settings))):
            changed = changes(meta["recipe"], self._settings)
            told = [text for name, text in changed.items() if name.partition(".")[0] in ("", *key)]
            raise UserError(
                f"the run in {self._folder} was begun with other {_either(list(key))} ({', '.join(told)}); give "
                "another --run-dir, or the recipe it was begun with"
            )
        self._goodput.restored(step)
        cursor = int(meta["cursor"])
        return Position(state, step, cursor, saved=cursor), meta

    # --- saving -------------------------------------------------------------------------------------------------------

    def is_time(self, step: int) -> bool:
        """Whether the clock asks for a checkpoint: all processes must do it after the same step."""
        minutes = self._settings.checkpoint.minutes
        return bool(minutes) and self._by_clock.is_due(time.monotonic() - self._saved_at > 60 * minutes, step)

    def save(self, at: Position, durable: bool) -> None:
        recorded = record(self._settings)
        meta = {"cursor": at.cursor, "data": self._settings.rows_key, "inputs": self._inputs, **recorded}
        with self._goodput.span("checkpoint"):
            far = True if durable and self._settings.checkpoint.durable else None
            self.checkpoints.save(at.step, at.state, meta, far)
        at.saved, self._saved_at = at.cursor, time.monotonic()
        self._by_clock.done()

    def await_last(self, at: Position) -> None:
        """No save comes after the last one: when that has failed, once more."""
        with self._goodput.span("checkpoint"):
            self.checkpoints.wait()
            if self.checkpoints.has_failed():
                self.save(at, durable=True)
                self.checkpoints.wait()
                self._lost = self.checkpoints.has_failed()

    def refuse_lost(self, step: int) -> None:
        if self._lost:
            left = self.checkpoints.latest()
            raise FileError(
                f"the last checkpoint, of step {step:,}, could not be written ({self.checkpoints.problem}), so "
                f"{f'what came after step {left:,}' if left is not None else 'the run'} is lost: make room, and start "
                "the same command again"
            )


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _given_weights(ready: Ready) -> Any:
    """Those that the objective begins with, or of the recipe's folder; None: random ones."""
    settings = ready.settings
    if ready.objective.initial:
        return ready.objective.initial(ready)
    if not settings.weights or settings.adapter:  # its base is frozen
        return None
    return weights_of_folder(ready)


def weights_of_folder(ready: Ready) -> Any:
    """The recipe's, as masters on their mesh."""
    settings = ready.settings
    from dovetail.io.hf import has_mtp, read_params
    from dovetail.io.hub import resolve
    from dovetail.io.load import open_checkpoint

    path = resolve(settings.weights)
    source, _, _ = open_checkpoint(path)
    dtype = compute_of(settings.precision.params).dtype
    further = "mtp" in ready.specs and has_mtp(source)
    return read_params(source, ready.cfg, dtype, str(path), ready.placement, mtp=further)
