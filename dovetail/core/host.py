"""Query the host of this process: memory limits, the age of the process, and whether it has a TPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's mallopt
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """Name the files of a control group, which differ by version."""

    limit: str
    usage: str
    cache: str  # in memory.stat: file pages that the kernel drops when memory is short


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def host_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the memory in bytes of this host or container; None where the system does not say.

    It is the installed memory, or the lowest limit of a control group above this process.
    """
    try:
        built_in = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError, AttributeError):  # Windows has none of it
        built_in = []
    limits = [limit for _, limit, _ in _limited_groups(proc, groups)]
    return min([*built_in, *limits], default=None)


def available_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the bytes that this process can still allocate, or `host_memory` where the system does not say.

    It is what the kernel calls available, which includes the page cache, or less if a control group's limit is lower.
    """
    known = [int(line.split()[1]) << 10 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    for folder, limit, names in _limited_groups(proc, groups):
        used = _number(folder / names.usage) or 0
        cached = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == names.cache]
        known.append(max(0, limit - used + sum(cached)))
    return min(known) if known else host_memory(proc, groups)


def return_zeros(address: int, nbytes: int) -> None:
    """Return the memory of zeros to the system, which gives zeros back where they are read or written next.

    Only Linux does so for memory that stays allocated; elsewhere nothing happens.

    Args:
        address: Of private memory that no file backs, as malloc returns it.
        nbytes: Its size; parts of memory pages at both ends are kept.
    """
    if not sys.platform.startswith("linux"):
        return
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + nbytes) // page * page
    if start < end:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def return_freed() -> None:
    """Return freed memory to the system: glibc keeps what a compiler has used, hundreds of megabytes."""
    if sys.platform.startswith("linux") and hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(ctypes.c_size_t(0))


def keep_little_freed() -> None:
    """Have glibc return freed blocks of a megabyte or more to the system; call it before threads start.

    It would keep those of up to 32 MB for later, each thread its own: a hundred megabytes of the buffers of steps.
    """
    if sys.platform.startswith("linux") and hasattr(_libc(), "mallopt"):
        _libc().mallopt(M_MMAP_THRESHOLD, 2**20)
        _libc().mallopt(M_ARENA_MAX, 2)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _limited_groups(proc: Path, groups: Path) -> Iterator[tuple[Path, int, _Names]]:
    """Yield the control groups above this process that have a limit.

    In a container the path may be the host's, of which only the top is visible: that is the container's own group.
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = groups, _V2
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", _V1
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            limit = _number(top / group / names.limit)  # "max" means no limit
            if limit is not None:
                yield top / group, limit, names


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def process_age() -> float:
    """Return the seconds since this process started, which Python and its imports took; 0 without /proc."""
    try:
        # the name, in brackets, may hold anything; the start is the 22nd field, counted in ticks since the boot
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


GOOGLE = "0x1ae0"  # the PCI vendor of TPUs, by which jax finds them too
# Neither chips nor metadata to look for.
NO_CHIPS = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
}  # fmt: skip


def quiet_libtpu(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Silence libtpu's warnings on a machine without a TPU; call it before jax is imported.

    libtpu prints a page of warnings when jax asks it for chips, unless these variables say that there is nothing to
    look for. Variables that are set are kept.
    """
    if "JAX_FORCE_TPU_INIT" in environ or importlib.util.find_spec("libtpu") is None or _has_tpu(root):
        return
    for name, value in NO_CHIPS.items():
        environ.setdefault(name, value)


def _has_tpu(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == GOOGLE for vendor in vendors) or bool(list((root / "dev").glob("accel*")))
