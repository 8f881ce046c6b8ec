"""Save and restore a run: whole states, each with the number of the next batch and the recipe.

The recipe is recorded with the value of every key, so that a later default does not change a run. `RUN/recipe.yaml` and
each checkpoint hold the effective recipe. A checkpoint also holds `given`, the keys that differed from the defaults of
its version. A resumed run keeps a recorded value if the key was set neither then nor now.

A recipe names files and functions, which may change while their names stay the same. Each is fingerprinted
(core.fingerprint) under the name that a user knows (`Opened.inputs`); a resumed run compares the fingerprints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dovetail.core import recipe, yaml_text
from dovetail.core.compute import compute_of
from dovetail.core.errors import CheckpointError, FileError, UserError
from dovetail.core.reporter import Reporter
from dovetail.core.training import Training
from dovetail.io.checkpoint import Checkpoints
from dovetail.train.guard.stop import Together
from dovetail.train.prepare import Ready
from dovetail.train.report.goodput import Goodput
from dovetail.train.rows import Opened
from dovetail.train.state import Position

S = TypeVar("S", bound=Training)
ALLOW_CHANGED = "checkpoint.allow_changed_inputs=true"


class Saves:
    """Write and read a run's checkpoints. On exit it waits until they are written."""

    def __init__(self, ready: Ready, folder: Path, goodput: Goodput, reporter: Reporter, opened: Opened):
        self._ready, self._settings, self._folder = ready, ready.settings, folder
        self._goodput, self._reporter, self._inputs = goodput, reporter, dict(opened.inputs)
        self._rows_key = opened.rows_key
        self._by_clock, self._saved_at, self._lost = Together("save"), time.monotonic(), False
        wanted = self._settings.checkpoint
        self.checkpoints = Checkpoints(
            folder / "checkpoints", durable=wanted.durable, keep=wanted.keep, keep_every=wanted.keep_every,
            durable_every=wanted.durable_every, on_problem=reporter.note,
        )  # fmt: skip

    def __enter__(self) -> Saves:
        self.checkpoints.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.checkpoints.__exit__(kind, error, trace)

    # --- where a run begins -------------------------------------------------------------------------------------------

    def open(self) -> Position:
        """Return the newest intact checkpoint, or a new state."""
        with self._goodput.span("restore"):
            at = self._resumed() if self.checkpoints.latest() is not None else None
        if at is None:
            self._goodput.restored(0)  # steps of a process that saved nothing are lost
            with self._goodput.span("init"):
                at = Position(self._ready.init(_given_weights(self._ready)))
        self._saved_at = time.monotonic()
        return at

    def _resumed(self) -> Position:
        at, meta = self._restored()
        self._check_inputs(at.step, meta.get("inputs"))
        self._reporter.note(f"continuing after step {at.step:,}, from {self._folder / 'checkpoints'}")
        if changed := changes(meta["recipe"], self._settings):
            self._reporter.note(f"the recipe has changed since it was saved: {', '.join(changed.values())}")
        return at

    def _check_inputs(self, step: int, stored: Mapping[str, str] | None) -> None:
        changed = changed_inputs(stored, self._inputs)
        if not changed:
            return
        if not self._settings.checkpoint.allow_changed_inputs:
            raise CheckpointError(_inputs_refusal(self._folder, step, changed), code="changed_inputs")
        self._reporter.note(f"changed since step {step:,}, and used as it is now: {', '.join(changed)}")

    def restore(self) -> Position:
        """Return the newest intact checkpoint."""
        with self._goodput.span("restore"):
            return self._restored()[0]

    def _restored(self) -> tuple[Position, dict[str, Any]]:
        """Return the newest intact checkpoint and its meta data (see `save`)."""
        state, meta, step = self.checkpoints.restore(self._ready.abstract_state)
        key = self._rows_key(self._settings)
        if key not in (meta["data"], self._stored_rows_key(meta["recipe"])):
            changed = changes(meta["recipe"], self._settings)
            shown = [text for name, text in changed.items() if name.partition(".")[0] in ("", *key)]
            raise CheckpointError(
                f"the run in {self._folder} was started with other {_either(list(key))} ({', '.join(shown)}); use "
                "another --run-dir, or the recipe that it was started with",
                code="changed_rows",
            )
        self._goodput.restored(step)
        cursor = int(meta["cursor"])
        return Position(self._ready.carried(state), step, cursor, saved=cursor), meta

    def _stored_rows_key(self, stored: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the rows key of a checkpoint's recipe as this version writes it; None if it cannot be read."""
        try:
            return self._rows_key(recipe.read(type(self._settings), stored))
        except UserError:
            return None

    # --- saving -------------------------------------------------------------------------------------------------------

    def is_time(self, step: int) -> bool:
        """Return whether a checkpoint is due by the clock: all processes must save after the same step."""
        minutes = self._settings.checkpoint.minutes
        return bool(minutes) and self._by_clock.is_due(time.monotonic() - self._saved_at > 60 * minutes, step)

    def save(self, at: Position, durable: bool) -> None:
        """Save the state; with `durable`, into the durable folder too if there is one."""
        recorded = record(self._settings)
        meta = {"cursor": at.cursor, "data": self._rows_key(self._settings), "inputs": self._inputs, **recorded}
        with self._goodput.span("checkpoint"):
            far = True if durable and self._settings.checkpoint.durable else None
            self.checkpoints.save(at.step, replace(at.state, copy=None), meta, far)
        at.saved, self._saved_at = at.cursor, time.monotonic()
        self._by_clock.done()

    def await_last(self, at: Position) -> None:
        """Wait for the last save; if it failed, save once more."""
        with self._goodput.span("checkpoint"):
            self.checkpoints.wait()
            if self.checkpoints.has_failed():
                self.save(at, durable=True)
                self.checkpoints.wait()
                self._lost = self.checkpoints.has_failed()

    def refuse_lost(self, step: int) -> None:
        """Raise FileError if the last checkpoint could not be written."""
        if self._lost:
            left = self.checkpoints.latest()
            raise FileError(
                f"the last checkpoint, of step {step:,}, could not be written ({self.checkpoints.problem}), so "
                f"{f'everything after step {left:,}' if left is not None else 'the run'} is lost: free some space, and "
                "start the same command again"
            )


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _given_weights(ready: Ready) -> Any:
    """Return the weights that the objective or the recipe starts from; None: random weights."""
    settings = ready.settings
    if ready.objective.initial:
        return ready.objective.initial(ready)
    if not settings.weights or settings.step_models.adapter:  # an adapter's base is frozen, not part of the state
        return None
    return weights_of_folder(ready)


def weights_of_folder(ready: Ready) -> Any:
    """Read the recipe's weights as master weights on their mesh."""
    settings = ready.settings
    from dovetail.io.hf import has_mtp, read_params
    from dovetail.io.hub import resolve
    from dovetail.io.load import open_checkpoint

    path = resolve(settings.weights)
    source, _, _ = open_checkpoint(path)
    dtype = compute_of(settings.precision.params).dtype
    further = "mtp" in ready.specs and has_mtp(source)
    return read_params(source, ready.cfg, dtype, str(path), ready.placement, mtp=further)


# --- the recorded recipe ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that a run is recorded with."""
    import jax

    from dovetail import __version__

    return {"dovetail": __version__, "jax": jax.__version__}


def record(settings: Training) -> dict[str, Any]:
    """Return the part of a checkpoint's meta data that describes the recipe."""
    return {"recipe": recipe.whole(_lasting(settings)), "given": recipe.dump(settings), "versions": versions()}


def recipe_text(settings: Training) -> str:
    """Return the contents of `RUN/recipe.yaml`: a recipe that starts the same training again."""
    by = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = f"# Written by {by}: every key of this run, defaults and derived values included.\n"
    return head + yaml_text.write(recipe.whole(_lasting(settings)))


def _lasting(settings: S) -> S:
    """Return the effective recipe without the keys that hold for one start only."""
    effective = settings.effective
    return replace(effective, checkpoint=replace(effective.checkpoint, allow_changed_inputs=False))


def newest_meta(folder: Path, durable: str = "") -> dict[str, Any] | None:
    """Return the meta data of the newest readable checkpoint of a run, or None if there is none yet."""
    from dovetail.io.checkpoint_tier import manifests

    found = [each for where in (str(folder / "checkpoints"), durable) if where for each in manifests(where)]
    return max(found, key=lambda one: one.step).meta if found else None


def as_begun(settings: S, meta: Mapping[str, Any] | None) -> tuple[S, list[str]]:
    """Return the settings with the defaults that a run was started with, and a line for each that differs today.

    Args:
        settings: The recipe of this start.
        meta: Meta data of the run's newest checkpoint; None for a new run. A checkpoint without `given` is from an
            earlier version, which did not record its defaults: nothing is kept.
    """
    if meta is None or "given" not in meta:
        return settings, []
    then, now = _flat(meta["recipe"]), _flat(recipe.whole(settings.effective))
    given = (*_flat(meta["given"]), *_flat(recipe.dump(settings)))
    kept = {key: then[key] for key in now if key in then and then[key] != now[key] and not _is_set(key, given)}
    by = meta.get("versions", {}).get("dovetail", "")
    lines = [
        f"{key} stays {value}, the default of dovetail {by} with which this run began; today's is {now[key]}: start a "
        "new --run-dir to use it"
        for key, value in kept.items()
    ]
    return recipe.change(settings, kept) if kept else settings, lines


def _is_set(key: str, given: tuple[str, ...]) -> bool:
    """Return whether the key, a part of it or its parent was given."""
    return any(key == each or key.startswith(f"{each}.") or each.startswith(f"{key}.") for each in given)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return dotted key -> value; an empty section or list is a value."""
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    found: dict[str, Any] = {}
    for key, part in parts:
        found |= _flat(part, f"{path}.{key}" if path else str(key))
    return found or {path: tree}


def changes(stored: Mapping[str, Any], settings: Training) -> dict[str, str]:
    """Return dotted key -> `key old -> new` for the keys that differ from a checkpoint's recipe.

    Both `stored` (see `record`) and `settings` have their derived values filled in.
    """
    try:
        before = recipe.read(type(settings), stored).effective
    except UserError as error:  # keys were renamed since, or their checks are stricter
        return {"": f"the recipe in the checkpoint is another version's ({error})"}
    found = recipe.differences(before, settings.effective)
    return {key: f"{key} {_text(old)} -> {_text(new)}" for key, old, new in found}


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- fingerprints of inputs -------------------------------------------------------------------------------------------


def changed_inputs(stored: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Return the names of inputs that differ. `stored` is None in checkpoints of versions without fingerprints."""
    if stored is None:
        return []
    return sorted(name for name in {*stored, *now} if stored.get(name) != now.get(name))


def _inputs_refusal(folder: Path, step: int, changed: list[str]) -> str:
    which, verb = " and ".join(changed), "have" if len(changed) > 1 else "has"
    return (
        f"{which} {verb} changed since step {step:,} of the run in {folder}: the run would not continue as it started. "
        f"Restore the earlier version, start a new run with another --run-dir, or set {ALLOW_CHANGED} to continue with "
        "the current one."
    )
