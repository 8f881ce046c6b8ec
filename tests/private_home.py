"""A DOVETAIL_HOME for the tests: it shares the user's downloaded models and nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_MARK = "DOVETAIL_TESTS_REAL_HOME"  # set for the workers of a session, which share its home
_is_first = _MARK not in os.environ
REAL = Path(os.environ.get(_MARK) or os.environ.get("DOVETAIL_HOME") or "~/.cache/dovetail").expanduser()
_before: dict[str, int] = {}


def enter() -> dict[str, str]:
    """Make the home and return the environment variables that select it."""
    if not _is_first:
        return {}
    _before.update(_listing())
    own = Path(tempfile.mkdtemp(prefix="dovetail-tests-"))
    (REAL / "models").mkdir(parents=True, exist_ok=True)
    (own / "models").symlink_to((REAL / "models").resolve())
    return {_MARK: str(REAL), "DOVETAIL_HOME": str(own)}


def leave() -> list[str]:
    """Remove the home and return the files written into the user's home meanwhile."""
    if not _is_first:
        return []
    shutil.rmtree(os.environ["DOVETAIL_HOME"], ignore_errors=True)  # a link is removed, not what it leads to
    return written()


def written() -> list[str]:
    """Return the files made or changed there since `enter`, except models."""
    return sorted(name for name, changed in _listing().items() if _before.get(name) != changed)


def _listing() -> dict[str, int]:
    """Return the files and their modification times."""
    files = (path for path in REAL.rglob("*") if path.is_file()) if REAL.is_dir() else ()
    listed = ((path.relative_to(REAL), path) for path in files)
    return {str(name): path.stat().st_mtime_ns for name, path in listed if name.parts[0] != "models"}
