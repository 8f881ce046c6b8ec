"""What a run reads besides its recipe, compared with what it read when its checkpoint was saved.

A recipe names files and functions; they can change while their names stay the same. Each is fingerprinted
(core.fingerprint) under the name by which a user knows it, and `rows.Opened.inputs` holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FLAG = "checkpoint.allow_changed_inputs=true"


def changed_inputs(stored: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Return the names of inputs that differ. stored: None in a checkpoint of a version without fingerprints."""
    if stored is None:
        return []
    return sorted(name for name in {*stored, *now} if stored.get(name) != now.get(name))


def refusal(folder: Path, step: int, changed: list[str]) -> str:
    which, verb = " and ".join(changed), "have" if len(changed) > 1 else "has"
    return (
        f"{which} {verb} changed since step {step:,} of the run in {folder}: it would not continue with what it was "
        f"started with. Restore what was there, start a new run with another --run-dir, or set {FLAG} to continue with "
        "what is there now."
    )
