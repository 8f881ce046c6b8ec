"""Whether other work keeps this machine busy: its load, the processes that use its CPU, and how much memory is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dovetail.doctor.finding import Finding

ABOUT = "other work"
BUSY_LOAD = 0.5  # processes that run or wait, for each core: from here on, what is measured is too slow
BUSY_SHARE = 0.25  # of all cores, used by other processes
NAMED = 0.1  # of a core: a process that uses less is not named
MOST_NAMED = 3
SCARCE = 0.1  # of the memory: below it, a large allocation fails or swaps
PRESSED = 5.0  # percent of the last 10 s in which something waited for memory
SECONDS = 0.5  # over which processes are watched
GIB = 1 << 30


def load(root: Path = Path("/"), cores: int = 0, wait: Callable[[float], object] = time.sleep) -> list[Finding]:
    """Return what is found of the CPU and of the memory. `root`: where /proc is; `wait`: between two looks."""
    return [*_work(root, cores or _cores(), wait), *_memory(root)]


def is_busy(findings: Sequence[Finding]) -> bool:
    """Whether `load` found other work."""
    return any(one.about == ABOUT and one.severity == "warning" for one in findings)


def _work(root: Path, cores: int, wait: Callable[[float], object]) -> Iterator[Finding]:
    average = root / "proc/loadavg"
    if not average.is_file():  # not Linux
        return
    waiting = float(average.read_text().split()[0])
    shares = _shares(root, wait)
    used = sum(shares.values())
    told = f"load average {waiting:.1f} on {cores} core{'s' if cores > 1 else ''} ({waiting / cores:.1f} per core)"
    values = {"load": waiting, "cores": float(cores), "used_by_others": used}
    if waiting / cores < BUSY_LOAD and used / cores < BUSY_SHARE:
        yield Finding("good", ABOUT, told, values=values)
        return
    most = sorted(shares, key=lambda pid: -shares[pid])[:MOST_NAMED]
    named = ", ".join(f"{pid} {_name(root, pid)} ({shares[pid]:.0%})" for pid in most if shares[pid] >= NAMED)
    if used >= NAMED:
        told += f"; other processes use {used:.0%} of a core" + (f": {named}" if named else "")
    yield Finding(
        "warning",
        ABOUT,
        told,
        "speeds measured now are too low: wait until it is done, or measure where nothing else runs",
        values,
    )


def _memory(root: Path) -> Iterator[Finding]:
    told = _sizes(root / "proc/meminfo")
    total, free = told.get("MemTotal", 0), told.get("MemAvailable", 0)
    if not total:
        return
    swapped, pressed = told.get("SwapTotal", 0) - told.get("SwapFree", 0), _pressure(root / "proc/pressure/memory")
    values = {"total": float(total), "available": float(free), "swapped": float(swapped), "pressure": pressed}
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    if swapped:
        found += f", {swapped / GIB:.1f} GiB swapped out"
    if free / total >= SCARCE and pressed < PRESSED:
        yield Finding("good", "memory of the host", found, values=values)
        return
    if pressed >= PRESSED:
        found += f"; processes waited for memory in {pressed:.0f}% of the last 10 s"
    yield Finding("warning", "memory of the host", found, "end what holds it, or use a smaller model or batch", values)


# --- what the kernel tells --------------------------------------------------------------------------------------------


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shares(root: Path, wait: Callable[[float], object]) -> dict[int, float]:
    """Return the share of a core that each other process used between two looks."""
    before, start = _ticks(root), time.monotonic()
    wait(SECONDS)
    after, seconds = _ticks(root), max(time.monotonic() - start, SECONDS)
    each = os.sysconf("SC_CLK_TCK") * seconds
    return {pid: (ticks - before[pid]) / each for pid, ticks in after.items() if pid in before and pid != os.getpid()}


def _ticks(root: Path) -> dict[int, int]:
    """Return the time that each process has used."""
    found = {}
    for process in root.glob("proc/[0-9]*"):
        try:
            # the name, in brackets, may hold anything; user and system time are the 14th and 15th field
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            found[int(process.name)] = int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return found


def _name(root: Path, pid: int) -> str:
    """Return the program of a process, without its arguments: they may hold a secret."""
    try:
        return (root / f"proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(ended)"


def _sizes(path: Path) -> dict[str, int]:
    """Return what /proc/meminfo says, in bytes; nothing where there is no such file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def _pressure(path: Path) -> float:
    """Return the percentage of the last 10 s in which a process waited; 0 where the kernel does not say."""
    try:
        some = path.read_text().splitlines()[0].split()
        return float(next(word for word in some if word.startswith("avg10=")).partition("=")[2])
    except (OSError, ValueError, IndexError, StopIteration):  # not built in, or turned off
        return 0.0
