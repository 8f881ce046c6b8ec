"""Run untrusted Python code in a process with limits, without network, and without access to other files.

    result = run_python("print(6 * 7)")
    result.ok, result.stdout.strip()                                # True, "42"
    run_python(code, tests=["assert add(2, 2) == 4"]).passed        # (True,)

On Linux the kernel enforces it, without root: rlimits, Landlock (5.13), seccomp and, where permitted, namespaces;
`SandboxResult.isolation` names the active ones. With `isolation="kernel"` a program does not start where one of
ENFORCED is missing. Elsewhere an audit hook stops programs that do not try to escape, which is not a security boundary:
see `Limits.isolation`. The program sees the standard library and what it writes below its folder, which is removed at
the end with every process of its group. docs/security.md lists the promises.
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
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from dovetail.core.choice import one_of, require
from dovetail.core.errors import FileError, UnsupportedError
from dovetail.tune.rl.rewards.checks import Check, ProgramReport

ENFORCED = {"capabilities", "limits", "landlock", "seccomp"}
MEGA = 2**20
SHOWN = 65_536  # bytes of the output that are kept
START = "import sys; sys.path.insert(0, sys.argv[1]); from isolation.program import main; del sys.path[0]; main({}, {})"
SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache",
    "/etc/localtime", "/dev/null", "/dev/urandom",
)  # fmt: skip

START_SECONDS = 60.0  # for the interpreter and its restrictions; the program's own time begins afterwards
POLL_SECONDS = 0.02  # between two readings of the count of written bytes
MAX_REPORT = 2**24  # bytes


@dataclass(frozen=True)
class Limits:
    """Limits of a sandboxed program.

    Attributes:
        seconds: Wall time, and CPU time.
        memory: MB of address space.
        disk: MB that it may write, all files and its output together.
        packages: Whether it may import installed packages besides the standard library.
        isolation: kernel: nothing runs where the kernel cannot enforce the limits. any: an audit hook is enough.
    """

    seconds: float = 5.0
    memory: int = 512
    disk: int = 64
    packages: bool = False
    isolation: str = "kernel"

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "disk"):
            require(getattr(self, name) > 0, f"{name} must be above 0; got {getattr(self, name)}", param=name)
        one_of("isolation", self.isolation, ("kernel", "any"))


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a sandboxed program.

    Attributes:
        ok: Whether it reached its end and every test passed.
        passed: Whether each test passed.
        code: Its exit code; below 0 a signal; None if it was stopped at a limit.
        error: The first error, in one line.
        stdout: The start of its output.
        stderr: The start of its error output.
        seconds: Its wall time, with the start of the interpreter.
        isolation: The restrictions that were active.
    """

    ok: bool
    passed: tuple[bool, ...]
    code: int | None
    error: str
    stdout: str
    stderr: str
    seconds: float
    isolation: tuple[str, ...]

    @property
    def isolated(self) -> bool:
        """Whether the kernel kept it from the network, other processes and other files."""
        return ENFORCED.issubset(self.isolation)


def run_python(
    source: str, *, tests: Sequence[str] = (), stdin: str = "", limits: Limits | None = None
) -> SandboxResult:
    """Run the program, then each test in its namespace. A program that ends its process passes no test.

    `assert EXPRESSION == LITERAL` is compared in this process, with a value that the program cannot see. Any other test
    shares its interpreter with the program, which can make it pass without solving the task: see `checks.py`.

    Args:
        source: The program.
        tests: Statements to run after it.
        stdin: The program's standard input.
        limits: Default: `Limits()`.

    Raises:
        UnsupportedError: The kernel must enforce the limits and cannot.
    """
    limits = limits or Limits()
    require_isolation(limits)
    result = _run(source, tests, stdin, limits)
    if limits.isolation == "kernel" and not result.isolated:
        missing = ", ".join(sorted(ENFORCED - set(result.isolation)))
        raise FileError(f"the sandbox could not be set up ({missing} failed), so the program did not start")
    return result


def require_isolation(limits: Limits) -> None:
    """Raise an UnsupportedError where the kernel must enforce the limits and cannot."""
    if limits.isolation == "kernel" and not ENFORCED.issubset(isolation_here()):
        missing = ", ".join(sorted(ENFORCED - set(isolation_here())))
        raise UnsupportedError(
            f"isolation=kernel requires {missing}, which this kernel does not offer: use Linux 5.13 or newer on "
            "x86-64 or arm64, or set isolation to 'any' if you trust the code not to break out",
            param="isolation",
        )


@cache
def isolation_here() -> tuple[str, ...]:
    """Return the restrictions that this machine supports, by trying them."""
    return _run("", (), "", Limits(isolation="any", seconds=30.0)).isolation


# --- one program ------------------------------------------------------------------------------------------------------


def _run(source: str, tests: Sequence[str], stdin: str, limits: Limits) -> SandboxResult:
    secret, checks = secrets.token_hex(16), [Check.parse(test) for test in tests]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-", ignore_cleanup_errors=True))
        payload, given, out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        report, reports = (
            stack.enter_context(open(fd, "rb" if end == 0 else "wb")) for end, fd in enumerate(os.pipe())
        )
        steps = [check.steps for check in checks]
        _fill(payload, json.dumps({**_payload(folder, limits), "source": source, "tests": steps, "secret": secret}))
        _fill(given, stdin)
        begun = time.monotonic()
        process = subprocess.Popen(
            _command(payload, reports, limits), stdin=given, stdout=out, stderr=errors, start_new_session=True,
            pass_fds=(payload.fileno(), reports.fileno()), env=_environment(folder), cwd=folder,
        )  # fmt: skip
        reports.close()
        monitor = _Monitor(process, report.fileno(), limits.seconds, limits.disk * MEGA)
        code = monitor.wait()
        read = ProgramReport.parse(bytes(monitor.text), secret)
        return _result(code, monitor.stopped, read, checks, _shown(out), _shown(errors), time.monotonic() - begun)


def _payload(folder: str, limits: Limits) -> dict[str, Any]:
    payload = {**asdict(limits), "memory": limits.memory * MEGA, "disk": limits.disk * MEGA, "parent": os.getpid()}
    required = sorted(ENFORCED) if limits.isolation == "kernel" else []
    return {**payload, "folder": folder, "readable": _readable(limits.packages), "required": required}


def _command(payload: IO[bytes], report: IO[bytes], limits: Limits) -> list[str]:
    start = START.format(payload.fileno(), report.fileno())
    options = ["-I", "-X", "utf8", *([] if limits.packages else ["-S"])]
    return [sys.executable, *options, "-c", start, str(Path(__file__).parent)]


def _environment(folder: str) -> dict[str, str]:
    """Return the program's environment, without any variable of ours: some hold keys."""
    return {"PATH": "", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _readable(packages: bool) -> list[str]:
    """Return the paths of the standard library and its shared libraries, and of installed packages if wanted."""
    paths = sysconfig.get_paths()
    own = [paths["stdlib"], str(Path(sys.base_prefix) / "lib")]
    return [*own, *([paths["purelib"], paths["platlib"]] if packages else []), *SYSTEM]


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)


def _shown(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(SHOWN).decode("utf-8", "replace")


def _result(
    code: int | None,
    stopped: str,
    report: ProgramReport,
    checks: Sequence[Check],
    out: str,
    errors: str,
    seconds: float,
) -> SandboxResult:
    results = [error or check.error(values) for check, (error, values) in zip(checks, report.tests, strict=False)]
    is_early = len(results) < len(checks)  # it did not reach the last test
    error = next((e for e in [report.program, *results] if e), "") or stopped or _ending(code, is_early)
    passed = tuple([not result for result in results] + [False] * (len(checks) - len(results)))
    return SandboxResult(not error, passed, code, error, out, errors, seconds, report.isolation)


def _ending(code: int | None, is_early: bool) -> str:
    if code and code < 0:
        names = {each.value: each.name for each in signal.Signals}  # a real-time signal has no name
        return f"it was ended by {names.get(-code, f'signal {-code}')}"
    if code:
        return f"it ended with exit code {code}"
    return "it ended before its tests did" if is_early else ""


# --- the process ------------------------------------------------------------------------------------------------------


@dataclass
class _Monitor:
    """Read the report of one process, and kill it where it exceeds a limit.

    The report comes through a pipe: lines from before the program's start cannot be changed by the program. Later lines
    may be the program's own, so they are read as text of a bounded length.
    """

    process: subprocess.Popen
    report: int  # the pipe's end to read from
    seconds: float
    disk: int  # bytes
    stopped: str = ""  # the limit at which it was killed
    text: bytearray = field(default_factory=bytearray)

    def wait(self) -> int | None:
        """Wait for the end of the process, or kill it. Return its exit code; None if it was killed."""
        self._follow()
        # Before its id is free for another: a process that has ended keeps it until it is waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        os.set_blocking(self.report, False)
        while len(self.text) <= MAX_REPORT and self._read():
            pass
        return None if self.stopped else code

    def _follow(self) -> None:
        end, started = time.monotonic() + START_SECONDS, False
        with _Events(self.process, self.report) as events:
            while not self.stopped:
                readable, ended = events.wait(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
                if readable and not self._read():
                    events.ignore_report()
                if not started and b"\n" in self.text:
                    end, started = time.monotonic() + self.seconds, True
                if ended:
                    return
                self.stopped = self._exceeded(end, started)

    def _read(self) -> bool:
        """Return whether anything was read."""
        try:
            data = os.read(self.report, 65_536)
        except BlockingIOError:
            return False
        self.text += data
        return bool(data)

    def _exceeded(self, end: float, started: bool) -> str:
        """Return the limit that the process has exceeded, if any."""
        if len(self.text) > MAX_REPORT:
            return f"it reported more than {MAX_REPORT >> 20} MB"
        if bytes_written(self.process.pid) > self.disk:
            return f"it wrote more than {self.disk >> 20} MB"
        if time.monotonic() > end:
            return "it ran out of time" if started else f"it did not start within {START_SECONDS:.0f} s"
        return ""


class _Events:
    """Wait for the report and for the end of a process, without reaping the process where the system allows it."""

    def __init__(self, process: subprocess.Popen, report: int):
        self._process, self._report, self._poll = process, report, select.poll()
        self._pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None

    def __enter__(self) -> _Events:
        for fd in (self._report, self._pidfd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    def ignore_report(self) -> None:
        """Stop waiting for the report, which the program has closed."""
        self._poll.unregister(self._report)

    def wait(self, seconds: float) -> tuple[bool, bool]:
        """Return whether there is something to read, and whether the process has ended."""
        ready = {fd for fd, _ in self._poll.poll(seconds * 1000)}
        ended = self._pidfd in ready if self._pidfd is not None else self._process.poll() is not None
        return self._report in ready, ended


def bytes_written(pid: int) -> int:
    """Return how many bytes a process has written to any file, as Linux counts them; elsewhere 0."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            counts = dict(line.split(b": ") for line in file.read().splitlines())
    except (OSError, ValueError):  # it has ended, or this system has no such count
        return 0
    return max(int(counts[b"wchar"]), int(counts[b"write_bytes"]))
