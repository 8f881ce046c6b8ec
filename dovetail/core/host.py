"""The machine that this process runs on: the memory it may take there, and how long the process has been alive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the processes of this host, or of this container, can have together: what is built in, or the least
    limit of a control group above this process. None where the system does not say."""
    try:
        built_in = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError, AttributeError):  # Windows has none of it
        built_in = []
    return min([*built_in, *_group_limits(proc / "self" / "cgroup", groups)], default=None)


def _group_limits(own: Path, groups: Path) -> Iterator[int]:
    """A group's limit binds the groups below it. In a container the path may be the host's, of which only the top is to
    be seen: that is then the container's own group."""
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            file = top / group / name
            if file.is_file() and (text := file.read_text().strip()).isdecimal():  # "max" is no limit
                yield int(text)


def process_age() -> float:
    """Seconds since the system started this process: what Python itself and the imports before this call took. 0 where
    there is no /proc."""
    try:
        # the name, in brackets, may hold anything; the start is the 22nd field, counted in ticks since the boot
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
