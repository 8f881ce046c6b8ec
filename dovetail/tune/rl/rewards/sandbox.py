"""Runs Python code that nobody has read: in a process with limits, without network, and without files but its own.

    ran = run_python("print(6 * 7)")
    ran.ok, ran.stdout                                      # True, "42\\n"
    run_python(code, tests=["assert add(2, 2) == 4"]).passed       # (True,)

On Linux the kernel enforces it, without root: rlimits, Landlock (5.13), seccomp and, where permitted, namespaces;
`Ran.isolation` names those that held. Elsewhere an audit hook stops what does not mean to get out, and that is no
security boundary: see `Limits.isolation`. The program sees the standard library and what it writes below its folder,
which is removed at the end with every process of its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from dovetail.core.choice import one_of, require

ENFORCED = {"limits", "landlock", "seccomp"}
SHOWN = 65_536  # characters of what it printed that are kept
START = "import sys; sys.path.insert(0, sys.argv[1]); from cage.inside import main; del sys.path[0]; main({}, {})"
SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache",
    "/etc/localtime", "/dev/null", "/dev/urandom",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    seconds: float = 5.0  # of the clock and of CPU time
    memory: int = 512  # MB of addresses
    file: int = 16  # MB a file, what it prints too
    packages: bool = False  # whether it may import what is installed beside the standard library
    # kernel: nothing runs where the kernel cannot enforce it. any: an audit hook is enough
    isolation: str = "kernel"

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "file"):
            require(getattr(self, name) > 0, f"{name} must be above 0; got {getattr(self, name)}")
        one_of("isolation", self.isolation, ("kernel", "any"))


@dataclass(frozen=True)
class Ran:
    ok: bool  # it came to its end, and every test passed
    passed: tuple[bool, ...]  # of each test
    code: int | None  # its exit code; below 0 a signal; None where it was stopped
    error: str  # what went wrong first, in short
    stdout: str
    stderr: str
    seconds: float
    isolation: tuple[str, ...]  # what held

    @property
    def isolated(self) -> bool:
        """The kernel kept it from the network, other processes and files that are not its own."""
        return ENFORCED.issubset(self.isolation)


def run_python(source: str, *, tests: Sequence[str] = (), stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run the program, then each test in its names. A program that ends its process passes none of them.

    A test shares its interpreter with the program, which can make it pass without doing what it asks (an object that
    equals everything). Where that matters, compare what a program prints for an input: that happens out of its reach.
    """
    limits = limits or Limits()
    require_isolation(limits)
    return _run(source, tests, stdin, limits)


def require_isolation(limits: Limits) -> None:
    """ValueError where the kernel must enforce the limits and cannot."""
    if limits.isolation == "kernel" and not ENFORCED.issubset(isolation_here()):
        missing = ", ".join(sorted(ENFORCED - set(isolation_here())))
        raise ValueError(
            f"code runs in a sandbox that needs {missing} of the kernel, which this machine does not offer; use Linux "
            "5.13 or newer on x86-64 or arm64, or set isolation to 'any' if you trust the code not to break out"
        )


@cache
def isolation_here() -> tuple[str, ...]:
    """What holds on this machine, by trying."""
    return _run("", (), "", Limits(isolation="any", seconds=30.0)).isolation


# --- one run ------------------------------------------------------------------------------------------------------


def _run(source: str, tests: Sequence[str], stdin: str, limits: Limits) -> Ran:
    word = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-", ignore_cleanup_errors=True))
        payload, given, out, errors, report = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(5))
        order = {**_order(folder, limits), "source": source, "tests": list(tests), "word": word}
        _fill(payload, json.dumps(order))
        _fill(given, stdin)
        begun = time.monotonic()
        process = subprocess.Popen(
            _command(payload, report, limits), stdin=given, stdout=out, stderr=errors, start_new_session=True,
            pass_fds=(payload.fileno(), report.fileno()), env=_environment(folder), cwd=folder,
        )  # fmt: skip
        code = _end_of(process, limits.seconds)
        return _ran(code, _lines(report, word), len(tests), _shown(out), _shown(errors), time.monotonic() - begun)


def _order(folder: str, limits: Limits) -> dict[str, Any]:
    mega = 2**20
    order = {**asdict(limits), "memory": limits.memory * mega, "file": limits.file * mega}
    return {**order, "folder": folder, "readable": _readable(limits.packages), "parent": os.getpid()}


def _command(payload: IO[bytes], report: IO[bytes], limits: Limits) -> list[str]:
    start = START.format(payload.fileno(), report.fileno())
    options = ["-I", "-X", "utf8", *([] if limits.packages else ["-S"])]
    return [sys.executable, *options, "-c", start, str(Path(__file__).parent)]


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours: it holds keys."""
    return {"PATH": "", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _readable(packages: bool) -> list[str]:
    """The standard library and the libraries that it loads, with the installed packages if they are asked for."""
    paths = sysconfig.get_paths()
    own = [paths["stdlib"], str(Path(sys.base_prefix) / "lib")]
    return [*own, *([paths["purelib"], paths["platlib"]] if packages else []), *SYSTEM]


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)


def _end_of(process: subprocess.Popen, seconds: float) -> int | None:
    """Its exit code; None where it had to be stopped. Whatever it started ends with it."""
    in_time = _wait(process, seconds)
    # Before its id is free for another: a process that has ended keeps it until it is waited for.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if in_time else None


def _wait(process: subprocess.Popen, seconds: float) -> bool:
    """Whether it ended in time. Where the system can tell, without taking its exit code yet."""
    if hasattr(os, "pidfd_open"):
        fd = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(fd)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


# --- what it left -------------------------------------------------------------------------------------------------


def _lines(report: IO[bytes], word: str) -> list[tuple[str, Any]]:
    report.seek(0)
    found = []
    for line in report.read(2**24).splitlines():
        with contextlib.suppress(ValueError):  # the program's own writing
            parts = json.loads(line)
            if isinstance(parts, list) and len(parts) == 3 and parts[0] == word:
                found.append((parts[1], parts[2]))
    return found


def _shown(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(SHOWN).decode("utf-8", "replace")


def _ran(code: int | None, lines: list[tuple[str, Any]], tests: int, out: str, errors: str, seconds: float) -> Ran:
    said: dict[str, list] = {"isolation": [], "program": [], "test": []}
    for kind, value in lines:
        said[kind].append(value)
    results = (said["test"] + [None] * tests)[:tests]  # None: it did not come to it
    error = next((e for e in [*said["program"], *results] if e), "") or _ending(code, results)
    passed = tuple(result == "" for result in results)
    held = tuple(said["isolation"][0]) if said["isolation"] else ()
    return Ran(not error, passed, code, error, out, errors, seconds, held)


def _ending(code: int | None, results: list[str | None]) -> str:
    if code is None:
        return "it ran out of time"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    if code:
        return f"it ended with exit code {code}"
    return "it ended before its tests did" if None in results else ""
