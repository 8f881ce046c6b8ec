"""The process of a sandboxed program: it gives up what it can, runs the program, and reports on each of its tests.

Started by `sandbox.py`, which passes an open file that says what to do, and a pipe to report through. A line of the
report counts only with the word that came with that file, so a program does not write one by accident. One that means
to can find the word in this interpreter: see `checks.py` for the tests that this does not help with.
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
from .values import LONGEST, canonical

Payload = dict[str, Any]


def main(payload_fd: int, report_fd: int) -> None:
    with open(payload_fd, encoding="utf-8") as file:
        payload = json.load(file)
    _die_with(payload["parent"])
    say = _reporter(report_fd, payload.pop("word"))
    held = _restrict(payload)
    say("isolation", held)
    if not set(payload["required"]) <= set(held):  # the program must not start with less than was asked for
        os._exit(1)
    sys.exit(_run(payload["source"], payload["tests"], say))


# --- giving up ----------------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _restrict(payload: Payload) -> list[str]:
    """Return what holds. Namespaces come first: their set-up needs files and rights that the others take away."""
    held = ["namespaces"] if _try(namespaces.enter) else []
    if held and _try(lambda: namespaces.bound_folder(payload["folder"], payload["disk"])):
        held.append("disk")
    if _try(namespaces.drop_capabilities):
        held.append("capabilities")
    os.chdir(payload["folder"])
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


def _limits(payload: Payload) -> None:
    cpu = math.ceil(payload["seconds"]) + 1  # of which the start takes a part
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


# --- running ------------------------------------------------------------------------------------------------------


def _reporter(fd: int, word: str) -> Callable[[str, Any], None]:
    def say(kind: str, value: Any) -> None:
        line = (json.dumps([word, kind, value]) + "\n").encode()
        while line:
            line = line[os.write(fd, line) :]

    return say


def _run(source: str, tests: list[list[tuple[str, str]]], say: Callable[[str, Any], None]) -> int:
    """Run the program, then the steps of each test in its names. Return the exit code."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["program.py"]
    code, error = _execute(lambda: exec(compile(source, "<program>", "exec"), main.__dict__))
    say("program", error)
    if error or (code is not None and tests):  # one that ends its process has not come to its tests
        return code or 1
    for number, steps in enumerate(tests):
        code, error, values = _test(steps, f"<test {number}>", main.__dict__)
        say("test", [error or ("it ended the process" if code is not None else ""), values])
    sys.stdout.flush()
    return code or 0


def _test(steps: list[tuple[str, str]], name: str, names: dict[str, Any]) -> tuple[int | None, str, list[str]]:
    """Return the exit code and the error as `_execute` does, and the values of the steps that have one."""
    values: list[str] = []

    def run() -> None:
        for kind, source in steps:
            if kind == "run":
                exec(compile(source, name, "exec"), names)
            else:
                value = canonical(eval(compile(source, name, "eval"), names))
                if len(value) > LONGEST:
                    raise ValueError(f"a value of {len(value)} characters is too long to compare")
                values.append(value)

    return *_execute(run), values


def _execute(run: Callable[[], None]) -> tuple[int | None, str]:
    """Return the code that it ended its process with, if it did, and what it raised, if anything."""
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return code, f"SystemExit: {end.code}"[:200] if code else ""
    except BaseException as error:
        return None, _told(error)
    return None, ""


def _told(error: BaseException) -> str:
    try:
        traceback.print_exception(error)
        return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    except BaseException:  # a class of the program's own, that cannot be printed
        return "an error that cannot be printed"
