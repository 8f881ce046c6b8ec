"""Checks of a machine's setup and of other work on it: what makes jax fail, use the wrong chip, or run slowly."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dovetail.doctor import Finding

GIB = 1 << 30
LOCKS = ("tmp/libtpu_lockfile",)  # below the root
HOLDERS = "other processes on the device"
CHIP_FILES = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*")
OTHER_WORK = "other work"
BUSY_LOAD = 0.5  # running or waiting processes per core: from here on, measured speeds are too low
BUSY_SHARE = 0.25  # of all cores, used by other processes
NAMED = 0.1  # of a core: a process that uses less is not listed
MOST_NAMED = 3
SCARCE = 0.1  # of the memory: below this, a large allocation fails or swaps
PRESSED = 5.0  # percent of the last 10 s in which a process waited for memory
WATCH_S = 0.5  # during which processes are watched


def system(root: Path = Path("/"), coordinator: str = "") -> list[Finding]:
    """Check the setup of this machine.

    Args:
        root: The folder that holds /proc, /sys and /dev.
        coordinator: host:port of a run with several hosts.
    """
    found = [*_versions(), *_backend(root), *_holders(root), *_locks(root), *_limits(), *_kernel(root)]
    return [*found, *_coordinator(coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", ""))]


# --- software ---------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    jax, jaxlib = _version("jax"), _version("jaxlib")
    text = f"jax {jax}, jaxlib {jaxlib}" + "".join(f", {p} {_version(p)}" for p in ("libtpu",) if _version(p))
    if jaxlib and jax and jax != jaxlib:
        yield Finding("fault", "versions", f"{text}: different releases", f"pip install jax=={jax} jaxlib=={jax}")
    else:
        yield Finding("good", "versions", text)
    plugins = {name: _version(name) for name in ("jax-cuda13-plugin", "jax-cuda12-plugin")}
    for name, has in plugins.items():
        if has and jax and has != jax:
            yield Finding("fault", "versions", f"{name} {has} beside jax {jax}", f"pip install {name}=={jax}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend(root: Path) -> Iterator[Finding]:
    """Check that jax uses the machine's accelerator: running on the CPU by mistake is a common and silent fault."""
    import jax

    backend = jax.default_backend()
    kinds = sorted({device.device_kind for device in jax.devices()})
    text = f"jax runs on {jax.device_count()} x {', '.join(kinds)} ({backend})"
    wanted = os.environ.get("JAX_PLATFORMS", "")
    for name, pattern, extra in (("NVIDIA GPU", "dev/nvidia[0-9]*", "cuda"), ("TPU", "dev/accel*", "tpu")):
        if backend == "cpu" and any(root.glob(pattern)):
            how = f"unset JAX_PLATFORMS, which is {wanted!r}" if wanted else f"pip install 'dovetail[{extra}]'"
            yield Finding("warning", "backend", f"{text}, but this machine has a {name}", how)
            return
    yield Finding("good", "backend", text)


# --- other processes on the devices -----------------------------------------------------------------------------------


def _holders(root: Path) -> Iterator[Finding]:
    """List other processes that hold a chip: a TPU runs one program, and a GPU's memory often holds only one."""
    chips = {str(path) for pattern in CHIP_FILES for path in root.glob(pattern)}
    holders: dict[int, str] = {}
    for process in root.glob("proc/[0-9]*") if chips else ():
        if int(process.name) not in (os.getpid(), os.getppid()) and _opens(process, chips):
            holders[int(process.name)] = _command(process)
    for pid, command in sorted(holders.items()):
        yield Finding("warning", HOLDERS, f"process {pid}: {command}", f"end it (kill {pid}), or wait for it")
    if chips and not holders:
        yield Finding("good", HOLDERS, "none")


def _opens(process: Path, chips: set[str]) -> bool:
    try:
        return any(os.readlink(one) in chips for one in (process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return "(ended)"


def _locks(root: Path) -> Iterator[Finding]:
    for path in (root / name for name in LOCKS):
        if path.exists():
            yield Finding(
                "warning", "lock file", f"{path} was left by a program on the TPU",
                f"if no program uses the TPU: rm {path}",
            )  # fmt: skip


# --- the kernel -------------------------------------------------------------------------------------------------------


def _limits() -> Iterator[Finding]:
    locked, files = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if locked != resource.RLIM_INFINITY and locked < 64 << 20:
        yield Finding(
            "note", "memlock", f"{locked >> 10:,} KiB may be locked; transfers to a TPU or over RDMA need more",
            "ulimit -l unlimited, or a line in /etc/security/limits.conf",
        )  # fmt: skip
    if files != resource.RLIM_INFINITY and files < 4096:
        yield Finding(
            "warning",
            "open files",
            f"at most {files:,}; runs with many shards and streams need more",
            "ulimit -n 65536",
        )


def _kernel(root: Path) -> Iterator[Finding]:
    pages = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if pages.exists() and "[never]" in pages.read_text():
        yield Finding(
            "note", "huge pages", "transparent huge pages are off: checkpoints load slowly, especially on TPU hosts",
            f"echo always > {pages}",
        )  # fmt: skip
    shared = root / "dev/shm"
    if shared.exists():
        free = shutil.disk_usage(shared).free
        good = free >= GIB
        yield Finding(
            "good" if good else "warning", "/dev/shm", f"{free / GIB:.1f} GiB free",
            "" if good else "start the container with --shm-size=8g: processes exchange arrays through it",
        )  # fmt: skip


def _coordinator(address: str) -> Iterator[Finding]:
    """Check the address of the coordinator of a run with several processes."""
    if not address:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        yield Finding("fault", "coordinator", f"{address!r} is not host:port", "give it as 10.0.0.2:8476")
        return
    try:
        place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        yield Finding("fault", "coordinator", f"no address for {host!r} ({error})", "check its DNS name, or give an IP")
        return
    try:
        socket.create_connection((str(place[0]), int(port)), timeout=3).close()
        yield Finding("good", "coordinator", f"{address} answers")
    except OSError as error:
        yield Finding(
            "note", "coordinator", f"no process listens at {address} now ({error})",
            "in a run, process 0 must start first, and firewalls must allow its port",
        )  # fmt: skip


# --- other work -------------------------------------------------------------------------------------------------------


def load(root: Path = Path("/"), cores: int = 0, wait: Callable[[float], object] = time.sleep) -> list[Finding]:
    """Check the use of the CPU and the memory by other processes.

    Args:
        root: The folder that holds /proc.
        cores: The number of cores; of this process if not given.
        wait: Sleeps between two readings.
    """
    return [*_work(root, cores or _cores(), wait), *_memory(root)]


def is_busy(findings: Sequence[Finding]) -> bool:
    """Return whether `load` found other work."""
    return any(one.about == OTHER_WORK and one.severity == "warning" for one in findings)


def _work(root: Path, cores: int, wait: Callable[[float], object]) -> Iterator[Finding]:
    average = root / "proc/loadavg"
    if not average.is_file():  # not Linux
        return
    waiting = float(average.read_text().split()[0])
    shares = _shares(root, wait)
    used = sum(shares.values())
    text = f"load average {waiting:.1f} on {cores} core{'s' if cores > 1 else ''} ({waiting / cores:.1f} per core)"
    values = {"load": waiting, "cores": float(cores), "used_by_others": used}
    if waiting / cores < BUSY_LOAD and used / cores < BUSY_SHARE:
        yield Finding("good", OTHER_WORK, text, values=values)
        return
    most = sorted(shares, key=lambda pid: -shares[pid])[:MOST_NAMED]
    named = ", ".join(f"{pid} {_name(root, pid)} ({shares[pid]:.0%})" for pid in most if shares[pid] >= NAMED)
    if used >= NAMED:
        text += f"; other processes use {used:.0%} of a core" + (f": {named}" if named else "")
    yield Finding(
        "warning",
        OTHER_WORK,
        text,
        "speeds measured now are too low: wait until it has ended, or measure on an idle machine",
        values,
    )


def _memory(root: Path) -> Iterator[Finding]:
    text = _sizes(root / "proc/meminfo")
    total, free = text.get("MemTotal", 0), text.get("MemAvailable", 0)
    if not total:
        return
    swapped, pressed = text.get("SwapTotal", 0) - text.get("SwapFree", 0), _pressure(root / "proc/pressure/memory")
    values = {"total": float(total), "available": float(free), "swapped": float(swapped), "pressure": pressed}
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    if swapped:
        found += f", {swapped / GIB:.1f} GiB swapped out"
    if free / total >= SCARCE and pressed < PRESSED:
        yield Finding("good", "host memory", found, values=values)
        return
    if pressed >= PRESSED:
        found += f"; processes waited for memory in {pressed:.0f}% of the last 10 s"
    yield Finding("warning", "host memory", found, "end processes that use it, or use a smaller model or batch", values)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shares(root: Path, wait: Callable[[float], object]) -> dict[int, float]:
    """Return the share of a core that each other process used between two readings."""
    before, start = _ticks(root), time.monotonic()
    wait(WATCH_S)
    after, seconds = _ticks(root), max(time.monotonic() - start, WATCH_S)
    each = os.sysconf("SC_CLK_TCK") * seconds
    return {pid: (ticks - before[pid]) / each for pid, ticks in after.items() if pid in before and pid != os.getpid()}


def _ticks(root: Path) -> dict[int, int]:
    """Return the CPU ticks that each process has used."""
    found = {}
    for process in root.glob("proc/[0-9]*"):
        try:
            # the name, in brackets, may contain anything; user and system time are fields 14 and 15
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            found[int(process.name)] = int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    return found


def _name(root: Path, pid: int) -> str:
    """Return the program of a process, without its arguments, which may contain a secret."""
    try:
        return (root / f"proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(ended)"


def _sizes(path: Path) -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes; {} if there is no such file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def _pressure(path: Path) -> float:
    """Return the percentage of the last 10 s in which a process waited; 0 if the kernel does not report it."""
    try:
        some = path.read_text().splitlines()[0].split()
        return float(next(word for word in some if word.startswith("avg10=")).partition("=")[2])
    except (OSError, ValueError, IndexError, StopIteration):  # not built in, or turned off
        return 0.0
