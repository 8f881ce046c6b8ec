"""This machine: an attempt is a launcher (local_launcher.py) with its processes, several to imitate hosts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dovetail.core.errors import MissingPackageError, UnsupportedError, UserError
from dovetail.jobs import files, script, secrets
from dovetail.jobs.backends.backend import LogPart, Observed, read_log
from dovetail.jobs.backends.local_launcher import CLAIM, END, LAUNCH, LOCK, STOP, write
from dovetail.jobs.job import Attempt, Resource
from dovetail.jobs.outcome import deciding
from dovetail.jobs.spec import Spec

BACKGROUND = '"$0" "$@" &'  # the launcher's parent ends at once, so that no process has to wait for it
MARK = "DOVETAIL_LOCAL_ATTEMPT"  # in the environment of all processes of an attempt: its folder


class LocalBackend:
    """Run jobs on this machine; every attempt has a folder below `root`, the folder of jobs."""

    def __init__(self, root: Path, owner: str = "") -> None:
        self.root, self.owner = Path(root), owner

    def check(self, spec: Spec) -> None:
        """Raise UserError for a spec that can never start here."""
        if spec.mounts:
            raise UnsupportedError(
                "`mounts` are for cloud machines; with backend local, use the folder's path in the command",
                param="mounts",
            )
        if spec.environment.image:
            raise UnsupportedError(
                "`environment.image` is for gke and slurm; with backend local give environment.lock, venv or conda",
                param="environment.image",
            )
        if spec.environment.conda and shutil.which("conda") is None:
            raise MissingPackageError(
                "`environment.conda` needs the program conda, which is not in PATH", param="environment.conda"
            )

    def create(self, attempt: Attempt) -> str:
        """Start the launcher, unless it was started before."""
        folder = attempt.folder
        if platform.node() in attempt.exclude:
            raise UserError(
                f"{platform.node()} is in quarantine because its hardware computed wrong results: use another machine, "
                f"or release it with `dovetail job clean --release {platform.node()}`",
                code="quarantined",
            )
        self.check(attempt.spec)
        files.make_folder(folder)
        with open(folder / LOCK, "a", opener=files.opener) as lock:
            if _take(lock.fileno(), folder):
                self._launch(attempt, lock.fileno())
        return ""

    def _launch(self, attempt: Attempt, lock: int) -> None:
        spec, folder = attempt.spec, attempt.folder
        files.write_text(folder / "script.sh", script.script(spec, script.interpreter(spec)))
        variables = {MARK: str(folder), "DOVETAIL_JOB_DIR": str(attempt.home), **attempt.variables}
        if attempt.snapshot:
            variables["DOVETAIL_CODE_DIR"] = str(attempt.home / "code")
        write(folder / LAUNCH, {"processes": spec.processes, "env": variables, "host": platform.node()})
        command = [sys.executable, "-m", "dovetail.jobs.backends.local_launcher", str(folder), str(lock)]
        environ = secrets.inherited(os.environ) | secrets.read(attempt.home, spec) | {"PYTHONPATH": _import_path()}
        # In its own session it survives the terminal and the supervisor. Secrets are passed in its environment.
        with open(folder / "launcher.log", "ab", opener=files.opener) as log:
            subprocess.run(
                ["sh", "-c", BACKGROUND, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True,
                env=environ, cwd=folder, pass_fds=(lock,), start_new_session=True,
            )  # fmt: skip

    def observe(self, attempt: Attempt) -> Observed:
        """Return the state of an attempt, from the launcher's lock and files."""
        folder = attempt.folder
        if (host := _host(folder)) != platform.node():  # machines share the folder of jobs
            return Observed("unknown", f"it runs on {host}, and can be observed only there: run a supervisor there")
        alive, ended = _is_locked(folder / LOCK), folder / END
        if alive:
            started = (folder / CLAIM).exists()
            return Observed("running" if started else "waiting", "", (platform.node(),) * attempt.spec.processes)
        if (folder / "deleted").exists():
            return Observed("absent")
        if ended.exists():
            return _ended(json.loads(ended.read_text()))
        if (folder / CLAIM).exists():
            return Observed("failed", "the launcher was killed", (platform.node(),))
        return Observed("absent", "the launcher did not start: see launcher.log in the attempt's folder")

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Tell the launcher to stop the processes."""
        if attempt.folder.exists():
            write(attempt.folder / STOP, {"grace": grace})

    def delete(self, resource: Resource) -> None:
        """Stop the launcher; kill processes that a dead launcher left behind."""
        folder = self._folder(resource)
        if folder is None or not folder.exists():
            return
        write(folder / STOP, {"grace": 0.0})
        write(folder / "deleted", {})
        if not _is_locked(folder / LOCK):
            for process in _leftovers(folder):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)

    def list(self) -> Sequence[Resource]:
        """Return the attempts of this user with a live launcher."""
        found = []
        for lock in sorted((self.root / "jobs").glob(f"*/attempts/*/{LOCK}")):
            if lock.stat().st_uid != os.getuid():  # another user's processes, in a shared folder
                continue
            if _is_locked(lock) and not (lock.parent / "deleted").exists():
                found.append(Resource(f"dt-{lock.parts[-4]}-{lock.parts[-2]}"))
        return found

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """Return a part of a rank's log."""
        return read_log(attempt.log(rank), since)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        """Return a command that opens a shell in the job's folder."""
        return ["sh", "-c", f'cd "{attempt.home}" && exec "${{SHELL:-sh}}"']

    def _folder(self, resource: Resource) -> Path | None:
        if resource.attempt is None:
            return None
        job, number = resource.attempt
        return self.root / "jobs" / job / "attempts" / str(number)


def _host(folder: Path) -> str:
    """Return the machine on which it was launched; this one if it was not."""
    path = folder / LAUNCH
    return json.loads(path.read_text())["host"] if path.exists() else platform.node()


def _ended(end: dict) -> Observed:
    code, rank = deciding(end["codes"], end["order"])
    hosts = (end.get("host", ""),) * len(end["codes"])
    if code == 0:
        return Observed("succeeded", "", hosts, 0)
    return Observed("failed", f"exit codes by rank: {end['codes']}", hosts, code, rank)


def _take(lock: int, folder: Path) -> bool:
    """Lock the file for the launcher; return False if there is or was one. _is_locked holds the lock for a moment."""
    for _ in range(100):
        if (folder / CLAIM).exists():
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not (folder / CLAIM).exists()
        except OSError:
            time.sleep(0.005)
    return False


def _is_locked(path: Path) -> bool:
    """Return whether a live process holds the lock: the system releases it when its holder dies."""
    if not path.exists():
        return False
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _leftovers(folder: Path) -> Iterator[int]:
    """Yield the processes with the attempt's mark in their environment, after their launcher has died."""
    mark = f"{MARK}={folder}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes() + b"\0":
                yield int(entry.name)
        except OSError:
            continue


def _import_path() -> str:
    """Return a PYTHONPATH with which the launcher finds this package."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
