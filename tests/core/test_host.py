"""The memory that this process may use: that of the host, or the limit of its control group."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dovetail.core.host import available_memory, host_memory, process_age, return_freed, return_zeros

BUILT_IN = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1 = "4:memory:/jobs/one\n3:cpu:/\n0::/\n"
V2 = "0::/jobs/one\n"


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        (V2, {"jobs/one/memory.max": "max"}, BUILT_IN),
        (V2, {"jobs/one/memory.max": "1000000"}, 1_000_000),
        (V2, {"jobs/one/memory.max": "max", "jobs/memory.max": "2000000"}, 2_000_000),  # a limit binds those below
        (V2, {"jobs/one/memory.max": "3000000", "jobs/memory.max": "2000000"}, 2_000_000),
        (V2, {"memory.max": "500000"}, 500_000),  # a container that sees only its own group
        (V1, {"memory/jobs/one/memory.limit_in_bytes": "700000"}, 700_000),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, BUILT_IN),  # none, as version 1 writes it
        (V1, {"jobs/one/memory.max": "1000", "cpu/memory.limit_in_bytes": "1000"}, BUILT_IN),  # no group of ours
        (None, {}, BUILT_IN),  # no such groups here
    ],
)
def test_the_least_of_what_is_built_in_and_what_groups_allow(tmp_path, own, limits, expected):
    assert host_memory(*roots(tmp_path, own, limits)) == expected


MEMINFO = "MemTotal:       65536000 kB\nMemFree:          100000 kB\nMemAvailable:   32768000 kB\n"
AVAILABLE = 32768000 << 10
GIB = 1 << 30


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {}, AVAILABLE),  # with the page cache, of which MemFree has none
        # a container of 4 GiB on a large host, 1 GiB used, of which a quarter is page cache
        (
            V2,
            {
                "memory.max": f"{4 * GIB}",
                "memory.current": f"{GIB}",
                "memory.stat": f"anon 5\nfile {GIB}\ninactive_file {GIB // 4}",
            },
            4 * GIB - GIB + GIB // 4,
        ),
        (V2, {"jobs/memory.max": f"{4 * GIB}", "jobs/memory.current": f"{5 * GIB}"}, 0),
        (V2, {"memory.max": f"{1 << 50}", "memory.current": "0"}, AVAILABLE),
        (
            V1,
            {
                "memory/jobs/one/memory.limit_in_bytes": f"{2 * GIB}",
                "memory/jobs/one/memory.usage_in_bytes": f"{GIB}",
                "memory/jobs/one/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}",
            },
            GIB + GIB // 2,
        ),
    ],
)
def test_available_memory_counts_the_page_cache_and_the_cgroup_limit(tmp_path, own, files, expected):
    proc, groups = roots(tmp_path, own, files)
    (proc / "meminfo").write_text(MEMINFO)
    assert available_memory(proc, groups) == expected


def test_without_proc_all_that_is_built_in_is_available(tmp_path):
    assert available_memory(tmp_path, tmp_path) == BUILT_IN


def roots(folder: Path, own: str | None, files: dict[str, str]) -> tuple[Path, Path]:
    """Write /proc and /sys/fs/cgroup as a system would show them."""
    proc, groups = folder / "proc", folder / "groups"
    if own is not None:
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(own)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    return proc, groups


def test_a_process_knows_how_long_it_has_run():
    before = process_age()
    time.sleep(0.05)
    assert 0 < before < process_age() < 24 * 3600


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives zeros for memory that was returned")
def test_whole_pages_are_returned_and_read_as_zeros():
    page = mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, 8 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = 1
    return_zeros(memory.ctypes.data + 10, 4 * page)  # the first page and the fifth are not whole
    assert memory.reshape(8, page).any(1).tolist() == [True, False, False, False, True, True, True, True]
    return_freed()
    assert memory.sum() == 5 * page


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_large_blocks_that_are_freed_go_back_to_the_system():
    code = """
import ctypes
from dovetail.core.host import keep_little_freed
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
held = lambda: next(int(x.split()[1]) >> 10 for x in open("/proc/self/status") if x.startswith("RssAnon"))
keep_little_freed()
libc.free(libc.malloc(30 << 20))  # by default glibc keeps blocks of this size from now on
before, blocks = held(), [libc.malloc(4 << 20) for _ in range(9)]
last = libc.malloc(1000)  # behind them, so that they are not at the end of the heap
for block in blocks:
    ctypes.memset(block, 1, 4 << 20)
assert held() - before >= 30, held()
for block in blocks:
    libc.free(block)
assert held() - before < 4, held()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
