"""The process of a sandboxed program: it gives up what it can, runs the program, and reports on each of its tests.

Started by `sandbox.py`, which passes two open files: what to do, and where to report. A line of the report counts only
with the word that came with the first of them, so that a program that prints what looks like one gains nothing.
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
from collections.abc import Callable
from typing import Any

# All at the start: once the process is restricted it cannot read its own source.
from . import audit, landlock, namespaces, seccomp
from .libc import PR_SET_PDEATHSIG, prctl

Payload = dict[str, Any]


def main(payload_fd: int, report_fd: int) -> None:
    with open(payload_fd, encoding="utf-8") as file:
        payload = json.load(file)
    _die_with(payload["parent"])
    os.chdir(payload["folder"])
    say = _reporter(report_fd, payload.pop("word"))
    say("isolation", _restrict(payload))
    sys.exit(_run(payload["source"], payload["tests"], say))


# --- giving up ----------------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _restrict(payload: Payload) -> list[str]:
    """Which of the ways hold. Namespaces come first: their set-up needs files and rights that the others take away."""
    held = ["namespaces"] if _try(_own_namespaces) else []
    _limits(payload)
    held.append("limits")
    if _try(lambda: landlock.restrict(payload["readable"], payload["folder"])):
        held.append("landlock")
    if _try(seccomp.restrict):
        held.append("seccomp")
    else:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if not {"landlock", "seccomp"} <= set(held):
        audit.restrict(payload["readable"], payload["folder"])
        held.append("audit")
    return held


def _try(act: Callable[[], None]) -> bool:
    if sys.platform != "linux":
        return False
    try:
        act()
    except (OSError, AttributeError):  # not this kernel, not permitted, or not this C library
        return False
    return True


def _own_namespaces() -> None:
    try:
        namespaces.enter()
    finally:
        namespaces.drop_capabilities()


def _limits(payload: Payload) -> None:
    cpu = math.ceil(payload["seconds"])
    limits = {
        "RLIMIT_CPU": cpu, "RLIMIT_AS": payload["memory"], "RLIMIT_FSIZE": payload["file"], "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }  # fmt: skip
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (ValueError, OSError):
            if sys.platform == "linux":  # macOS has no limit of the address space
                raise


# --- running ------------------------------------------------------------------------------------------------------


def _reporter(fd: int, word: str) -> Callable[[str, Any], None]:
    def say(kind: str, value: Any) -> None:
        os.write(fd, (json.dumps([word, kind, value]) + "\n").encode())

    return say


def _run(source: str, tests: list[str], say: Callable[[str, Any], None]) -> int:
    """The exit code. Each test runs after the program, in its names."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["program.py"]
    code, error = _execute(source, "<program>", main.__dict__)
    say("program", error)
    if error or (code is not None and tests):  # one that ends its process has not come to its tests
        return code or 1
    for number, test in enumerate(tests):
        code, error = _execute(test, f"<test {number}>", main.__dict__)
        say("test", error or ("it ended the process" if code is not None else ""))
    sys.stdout.flush()
    return code or 0


def _execute(source: str, name: str, names: dict[str, Any]) -> tuple[int | None, str]:
    """The code that it ended its process with, if it did, and what it raised, if anything."""
    try:
        exec(compile(source, name, "exec"), names)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return code, f"SystemExit: {end.code}" if code else ""
    except BaseException as error:
        return None, _told(error)
    return None, ""


def _told(error: BaseException) -> str:
    try:
        traceback.print_exception(error)
        return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    except BaseException:  # a class of the program's own, that cannot be printed
        return "an error that cannot be printed"
