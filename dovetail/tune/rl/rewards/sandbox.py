"""Runs Python code that nobody has read: in a process with limits, without network, and without files but its own.

    ran = run_python("print(6 * 7)")
    ran.ok, ran.stdout                                      # True, "42\\n"
    run_python(code, tests=["assert add(2, 2) == 4"]).passed       # (True,)

On Linux the kernel enforces it, without root: rlimits, Landlock (5.13), seccomp and, where permitted, namespaces;
`Ran.isolation` names those that held. With `isolation="kernel"` a program does not start where one of ENFORCED is
missing. Elsewhere an audit hook stops programs that do not try to escape, which is no security boundary: see
`Limits.isolation`. The program sees the standard library and what it writes below its folder, which is removed at the
end with every process of its group. docs/security.md says what is promised.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
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
from dovetail.core.errors import FileError, UserError
from dovetail.tune.rl.rewards.checks import Check
from dovetail.tune.rl.rewards.watch import Report, Watch, report_of

ENFORCED = {"capabilities", "limits", "landlock", "seccomp"}
MEGA = 2**20
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
    disk: int = 64  # MB that it may write, all files and what it prints together
    packages: bool = False  # whether it may import what is installed beside the standard library
    # kernel: nothing runs where the kernel cannot enforce it. any: an audit hook is enough
    isolation: str = "kernel"

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "disk"):
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

    `assert EXPRESSION == LITERAL` is compared in this process, with a value that the program cannot see. Any other test
    shares its interpreter with the program, which can make it pass without doing what it asks: see `checks.py`.
    """
    limits = limits or Limits()
    require_isolation(limits)
    ran = _run(source, tests, stdin, limits)
    if limits.isolation == "kernel" and not ran.isolated:
        missing = ", ".join(sorted(ENFORCED - set(ran.isolation)))
        raise FileError(f"the sandbox could not be set up, so the program did not start: {missing} did not hold")
    return ran


def require_isolation(limits: Limits) -> None:
    """ValueError where the kernel must enforce the limits and cannot."""
    if limits.isolation == "kernel" and not ENFORCED.issubset(isolation_here()):
        missing = ", ".join(sorted(ENFORCED - set(isolation_here())))
        raise UserError(
            f"code runs in a sandbox that needs {missing} of the kernel, which this machine does not offer; use Linux "
            "5.13 or newer on x86-64 or arm64, or set isolation to 'any' if you trust the code not to break out"
        )


@cache
def isolation_here() -> tuple[str, ...]:
    """What holds on this machine, by trying."""
    return _run("", (), "", Limits(isolation="any", seconds=30.0)).isolation


# --- one run ------------------------------------------------------------------------------------------------------


def _run(source: str, tests: Sequence[str], stdin: str, limits: Limits) -> Ran:
    word, checks = secrets.token_hex(16), [Check.of(test) for test in tests]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-", ignore_cleanup_errors=True))
        payload, given, out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        report, reports = (
            stack.enter_context(open(fd, "rb" if end == 0 else "wb")) for end, fd in enumerate(os.pipe())
        )
        steps = [check.steps for check in checks]
        _fill(payload, json.dumps({**_order(folder, limits), "source": source, "tests": steps, "word": word}))
        _fill(given, stdin)
        begun = time.monotonic()
        process = subprocess.Popen(
            _command(payload, reports, limits), stdin=given, stdout=out, stderr=errors, start_new_session=True,
            pass_fds=(payload.fileno(), reports.fileno()), env=_environment(folder), cwd=folder,
        )  # fmt: skip
        reports.close()
        watch = Watch(process, report.fileno(), limits.seconds, limits.disk * MEGA)
        code = watch.end()
        said = report_of(bytes(watch.text), word)
        return _ran(code, watch.stopped, said, checks, _shown(out), _shown(errors), time.monotonic() - begun)


def _order(folder: str, limits: Limits) -> dict[str, Any]:
    order = {**asdict(limits), "memory": limits.memory * MEGA, "disk": limits.disk * MEGA, "parent": os.getpid()}
    required = sorted(ENFORCED) if limits.isolation == "kernel" else []
    return {**order, "folder": folder, "readable": _readable(limits.packages), "required": required}


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


# --- what it left -------------------------------------------------------------------------------------------------


def _shown(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(SHOWN).decode("utf-8", "replace")


def _ran(
    code: int | None, stopped: str, said: Report, checks: Sequence[Check], out: str, errors: str, seconds: float
) -> Ran:
    results = [error or check.error_of(values) for check, (error, values) in zip(checks, said.tests, strict=False)]
    late = len(results) < len(checks)  # it did not come to the last of its tests
    error = next((e for e in [said.program, *results] if e), "") or stopped or _ending(code, late)
    passed = tuple([not result for result in results] + [False] * (len(checks) - len(results)))
    return Ran(not error, passed, code, error, out, errors, seconds, said.isolation)


def _ending(code: int | None, late: bool) -> str:
    if code and code < 0:
        names = {one.value: one.name for one in signal.Signals}  # a real-time signal has no name
        return f"it was ended by {names.get(-code, f'signal {-code}')}"
    if code:
        return f"it ended with exit code {code}"
    return "it ended before its tests did" if late else ""
