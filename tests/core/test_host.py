"""The memory that this process may take: what the host has, or less where a control group says so."""

import os
import time

import pytest

from dovetail.core.host import host_memory, process_age

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
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    if own is not None:
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(own)
    for name, text in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    assert host_memory(proc, groups) == expected


def test_a_process_knows_how_long_it_has_run():
    before = process_age()
    time.sleep(0.05)
    assert 0 < before < process_age() < 24 * 3600
