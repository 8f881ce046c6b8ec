"""Run a sandboxed program: restrict this process, execute the program, and report on each of its tests.

`sandbox.py` starts this process with an open file that holds the payload, and a pipe for the report. A line of the
report counts only with the payload's secret, so a program does not write one by accident. A hostile program can find
the secret in this interpreter: see `checks.py` for the tests that it cannot forge even so.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

# All at the start: once the process is restricted it cannot read its own source.
from . import kernel
from .canonical import MAX_CHARACTERS, canonical

Payload = dict[str, Any]
WriteReport = Callable[[str, Any], None]


def main(payload_fd: int, report_fd: int) -> None:
    """Read the payload, restrict this process, run the program and exit with its code."""
    with open(payload_fd, encoding="utf-8") as file:
        payload = json.load(file)
    _die_with(payload["parent"])
    report = _reporter(report_fd, payload.pop("secret"))
    active = _restrict(payload)
    report("isolation", active)
    if not set(payload["required"]) <= set(active):  # the program must not start with less isolation than required
        os._exit(1)
    sys.exit(_run(payload["source"], payload["tests"], report))


# --- restrictions -----------------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _restrict(payload: Payload) -> list[str]:
    """Return the restrictions that are active.

    Namespaces come first: their set-up needs files and rights that the others take away.
    """
    active = ["namespaces"] if _try(kernel.enter_namespaces) else []
    if active and _try(lambda: kernel.mount_bounded_folder(payload["folder"], payload["disk"])):
        active.append("disk")
    if _try(kernel.drop_capabilities):
        active.append("capabilities")
    os.chdir(payload["folder"])
    _set_limits(payload)
    active.append("limits")
    if _try(lambda: kernel.restrict_files(payload["readable"], payload["folder"])):
        active.append("landlock")
    if _try(kernel.restrict_calls):
        active.append("seccomp")
    else:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if not {"landlock", "seccomp"} <= set(active):
        add_audit_hook(payload["readable"], payload["folder"])
        active.append("audit")
    return active


def _try(restrict: Callable[[], None]) -> bool:
    if sys.platform != "linux":
        return False
    try:
        restrict()
    except (OSError, AttributeError):  # not this kernel, not permitted, or not this C library
        return False
    return True


def _set_limits(payload: Payload) -> None:
    cpu = math.ceil(payload["seconds"]) + 1  # including the start of the interpreter
    limits = {
        "RLIMIT_CPU": cpu, "RLIMIT_AS": payload["memory"], "RLIMIT_FSIZE": payload["disk"], "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }  # fmt: skip
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (ValueError, OSError):
            if sys.platform == "linux":  # macOS has no limit of the address space
                raise


# --- audit hook -------------------------------------------------------------------------------------------------------

REFUSED = (
    "socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.chmod",
    "os.chown", "os.utime", "ctypes.", "pty.", "signal.pthread_kill",
)  # fmt: skip
ALLOWED = ("socket.__new__",)  # asyncio's own pair of sockets; to connect, bind or send is refused
PATH_EVENTS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link",
               "os.symlink", "os.truncate", "shutil.")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def add_audit_hook(readable: Iterable[str], folder: str) -> None:
    """Refuse files, sockets and processes by an audit hook, where the kernel cannot.

    It stops a program that does not try to escape. It is not a security boundary: code can reach past any hook that
    lives in its own interpreter. `sandbox.py` allows it only with `isolation="any"`.
    """
    own = os.path.realpath(folder) + os.sep
    library = tuple(os.path.realpath(path) + os.sep for path in readable)
    # Bound here: the program may replace them in their modules.
    realpath, text, startswith = os.path.realpath, (str, bytes), str.startswith

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if startswith(event, REFUSED) and not startswith(event, ALLOWED):
            raise PermissionError(f"{event} is not permitted here")
        if not startswith(event, PATH_EVENTS):
            return
        reads = event in ("os.listdir", "os.scandir") or (event == "open" and not (arguments[2] or 0) & WRITES)
        for path in arguments[:2] if event != "open" else arguments[:1]:
            if isinstance(path, text):
                resolved = realpath(os.fsdecode(path)) + os.sep
                if not startswith(resolved, own) and not (reads and startswith(resolved, library)):
                    raise PermissionError(f"{event} of {path!r} is not permitted here")

    sys.addaudithook(hook)


# --- the program and its tests ----------------------------------------------------------------------------------------


def _reporter(fd: int, secret: str) -> WriteReport:
    def report(kind: str, value: Any) -> None:
        line = (json.dumps([secret, kind, value]) + "\n").encode()
        while line:
            line = line[os.write(fd, line) :]

    return report


def _run(source: str, tests: list[list[tuple[str, str]]], report: WriteReport) -> int:
    """Run the program, then the steps of each test in its namespace. Return the exit code."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["program.py"]
    code, error = _execute(lambda: exec(compile(source, "<program>", "exec"), main.__dict__))
    report("program", error)
    if error or (code is not None and tests):  # a program that exits has not reached its tests
        return code or 1
    for number, steps in enumerate(tests):
        code, error, values = _run_test(steps, f"<test {number}>", main.__dict__)
        report("test", [error or ("it ended the process" if code is not None else ""), values])
    sys.stdout.flush()
    return code or 0


def _run_test(steps: list[tuple[str, str]], name: str, namespace: dict[str, Any]) -> tuple[int | None, str, list[str]]:
    """Return the exit code and the error as `_execute` does, and the values of the steps that have one."""
    values: list[str] = []

    def run() -> None:
        for kind, source in steps:
            if kind == "run":
                exec(compile(source, name, "exec"), namespace)
            else:
                value = canonical(eval(compile(source, name, "eval"), namespace))
                if len(value) > MAX_CHARACTERS:
                    raise ValueError(f"a value of {len(value)} characters is too long to compare")
                values.append(value)

    return *_execute(run), values


def _execute(run: Callable[[], None]) -> tuple[int | None, str]:
    """Return the code of a SystemExit, if there was one, and the message of any exception."""
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return code, f"SystemExit: {end.code}"[:200] if code else ""
    except BaseException as error:
        return None, _message(error)
    return None, ""


def _message(error: BaseException) -> str:
    try:
        traceback.print_exception(error)
        return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    except BaseException:  # an exception class of the program that cannot be printed
        return "an error that cannot be printed"
