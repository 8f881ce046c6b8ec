"""Start a real Postgres on a free loopback port; it ends with the test."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PASSWORD = "s3cret%40word"  # as a URL has it
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=16MB")


class Unable(Exception):
    """Why no server can be had here."""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Its URL, with the password."""
    programs, whom = _programs(), _user()
    folder = Path(tempfile.mkdtemp(prefix="dovetail-postgres-"))  # pytest's own folders are closed to other users
    try:
        _initialise(folder, programs, whom)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [f"-p {port}", "-h 127.0.0.1", f"-k {folder}", *(f"-c {option}" for option in FAST)]
        start = ["start", "--wait", "--log", str(folder / "log"), "--options", " ".join(words)]
        _run([programs / "pg_ctl", "-D", folder / "data", *start], whom)
        yield f"postgresql://jobs:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            _run([programs / "pg_ctl", "-D", folder / "data", "stop", "--mode", "immediate", "--wait"], whom)
        shutil.rmtree(folder, ignore_errors=True)


def _initialise(folder: Path, programs: Path, whom: str | None) -> None:
    (folder / "password").write_text(PASSWORD.replace("%40", "@"))
    if whom:
        for path in (folder, folder / "password"):
            shutil.chown(path, whom)
    words = ["--username=jobs", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "--no-sync", "--locale=C"]
    _run([programs / "initdb", "-D", folder / "data", "--encoding=UTF8", *words], whom)


def _programs() -> Path:
    """Debian keeps them out of PATH, a folder for each version."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb"), *filter(None, [shutil.which("initdb")])]
    if not found:
        raise Unable("initdb not installed (Debian: apt-get install postgresql)")
    return Path(found[-1]).parent


def _user() -> str | None:
    """Who is to run it: a server refuses to be root's."""
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in known:
            return name
    raise Unable("these tests run as root, which a server refuses to be, and there is no user for it")


def _run(command: list, whom: str | None) -> None:
    # into a file, and not a pipe: the server inherits it, and would keep it open
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            list(map(str, command)), user=whom, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False,
            cwd="/", timeout=60,
        )  # fmt: skip
        output.seek(0)
        if done.returncode:
            raise Unable(f"{Path(command[0]).name}: {output.read().decode(errors='replace')[-300:].strip()}")
