"""The values of a job's secrets: read when the job is created, kept in a file that only its owner can read until the
job is over, and given to its processes in their environment. They are never in the database, nor shown."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic
from dovetail.jobs import parcel
from dovetail.jobs.attempt import CALL
from dovetail.jobs.spec import Spec

FILE = "secrets.json"  # in the job's folder


def names(spec: Spec) -> list[str]:
    """Return the variables whose values are kept here; `gcp:` secrets are read by the TPU VMs themselves."""
    return [name for name, kind, _ in _parts(spec) if kind != "gcp"]


def take(spec: Spec) -> dict[str, str]:
    """Read the values from this process's environment and files."""
    found = {}
    for name, kind, where in _parts(spec):
        if kind == "env":
            if where not in os.environ:
                raise UserError(f"secret {name} is to come from ${where}, which is not set here: set it")
            found[name] = os.environ[where]
        elif kind == "file":
            found[name] = _from_file(name, where)
        elif spec.backend != "gcp-tpu":
            raise UserError(f"secret {name} is in Google's Secret Manager, which backend {spec.backend} does not read")
    return found


def _parts(spec: Spec) -> list[tuple[str, str, str]]:
    """Return (name, env or file or gcp, where) of each secret."""
    pairs = [pair.partition("=") for pair in spec.secrets]
    return [(name, *_split(reference)) for name, _, reference in pairs]


def _split(reference: str) -> tuple[str, str]:
    kind, _, where = reference.partition(":")
    return kind, where


def _from_file(name: str, where: str) -> str:
    try:
        return Path(where).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"secret {name} is to come from the file {where}, which cannot be read: {why}") from None


def keep(home: Path, values: dict[str, str]) -> None:
    """Write the values into the job's folder; where there are none, remove those of before."""
    if not values:
        forget(home)
        return
    if home.stat().st_uid != os.geteuid():  # a file that only we can read would be of no use to its supervisor
        raise UserError(f"{home} is another user's job: only that user can give it the secrets that it needs")
    write_atomic(home / FILE, json.dumps(values), opener=_opener)


def _opener(path: str, flags: int) -> int:
    file = os.open(path, flags, 0o600)
    os.fchmod(file, 0o600)  # beyond the umask, and for a file that a killed process left
    return file


def read(home: Path, spec: Spec) -> dict[str, str]:
    """Return what `keep` wrote, for a process that starts now, and the key of a remote function."""
    return _kept(home, spec) | ({parcel.VARIABLE: parcel.key_of(home / CALL)} if (home / CALL).is_dir() else {})


def _kept(home: Path, spec: Spec) -> dict[str, str]:
    wanted = names(spec)
    if not wanted:
        return {}
    path = home / FILE
    try:
        held = json.loads(path.read_text())
    except FileNotFoundError:
        held = {}
    except PermissionError:
        raise UserError(
            f"{path} can be read only by the user who created the job: `dovetail job supervise --restart` as that user"
        ) from None
    if missing := [name for name in wanted if name not in held]:
        raise UserError(f"the value of secret {', '.join(missing)} is not kept here: create the job again")
    return {name: held[name] for name in wanted}


def forget(home: Path) -> None:
    """Delete the values, once the job is over."""
    (home / FILE).unlink(missing_ok=True)
