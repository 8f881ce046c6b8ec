"""The seccomp filter of each machine type, interpreted here: a test runs on one machine type only."""

import struct

import pytest

from dovetail.tune.rl.rewards.isolation import kernel
from dovetail.tune.rl.rewards.isolation.kernel import ALLOW, ERROR, KILL, MACHINES

PID = 4321
EPERM, ENOSYS = ERROR | 1, ERROR | 38
THREAD, FORK = 0x3D0F00, 0x1200011  # the flags of clone for each


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return the kernel's verdict by interpreting the BPF program."""
    data = struct.pack("<iIQ6Q", number, architecture or MACHINES[machine][0], 0, *(*arguments, *[0] * 6)[:6])
    lines = [struct.unpack("HBBI", line) for line in kernel._filter_program(machine, PID)]
    at, held = 0, 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == kernel.RETURN:
            return value
        if code == kernel.LOAD:
            (held,) = struct.unpack_from("<I", data, value)
        elif code == kernel.AND:
            held &= value
        else:
            holds = {kernel.EQUAL: held == value, kernel.AT_LEAST: held >= value, kernel.ANY_BIT: held & value}[code]
            at += if_true if holds else if_false


# name -> its number on x86-64 and on arm64, its arguments, the verdict
CALLS = {
    "read": (0, 63, (), ALLOW),
    "private memory": (9, 222, (0, 4096, 3, 0x22), ALLOW),
    "shared memory of its own": (9, 222, (0, 4096, 3, 0x21), ALLOW),
    "a file in memory": (9, 222, (0, 4096, 1, 2), ALLOW),
    "a file in memory, written through": (9, 222, (0, 4096, 3, 1), EPERM),
    "file flags": (72, 25, (3, 4, 0o4000), ALLOW),
    "close on exec": (72, 25, (3, 2, 1), ALLOW),
    "F_SETOWN": (72, 25, (3, 8, 1), EPERM),
    "F_SETSIG": (72, 25, (3, 10, 9), EPERM),
    "F_SETOWN_EX": (72, 25, (3, 15), EPERM),
    "O_ASYNC": (72, 25, (3, 4, 0o24000), EPERM),
    "is it a terminal": (16, 29, (1, 0x5401), ALLOW),
    "FIOASYNC": (16, 29, (1, 0x5452), EPERM),
    "FIOSETOWN": (16, 29, (1, 0x8901), EPERM),
    "splice": (275, 76, (), EPERM),
    "futex": (202, 98, (), ALLOW),
    "exit_group": (231, 94, (), ALLOW),
    "getrandom": (318, 278, (), ALLOW),
    "renameat2": (316, 276, (), ALLOW),
    "ftruncate": (77, 46, (), ALLOW),
    "socket": (41, 198, (2, 1), EPERM),
    "connect": (42, 203, (), EPERM),
    "a pair of streams": (53, 199, (1, 1 | 0o2000000), ALLOW),
    "a pair of datagrams": (53, 199, (1, 2 | 0o2000000), EPERM),
    "a thread": (56, 220, (THREAD,), ALLOW),
    "a fork": (56, 220, (FORK,), EPERM),
    "clone3": (435, 435, (), ENOSYS),
    "execve": (59, 221, (), EPERM),
    "kill itself": (62, 129, (PID, 6), ALLOW),
    "kill another": (62, 129, (1, 9), EPERM),
    "kill all": (62, 129, (2**32 - 1, 9), EPERM),
    "abort": (234, 131, (PID, PID, 6), ALLOW),
    "signal a thread of another": (234, 131, (1, 1, 6), EPERM),
    "own limits": (302, 261, (0,), ALLOW),
    "another's limits": (302, 261, (1,), EPERM),
    "open to read": (257, 56, (0, 0, 0o2000000), ALLOW),
    "open to write": (257, 56, (0, 0, 0o1101), ALLOW),
    "open to read, and empty it": (257, 56, (0, 0, 0o1000), EPERM),
    "open for nothing, and empty it": (257, 56, (0, 0, 0o1003), EPERM),
    "openat2": (437, 437, (), ENOSYS),
    "io_uring_setup": (425, 425, (), EPERM),
    "ptrace": (101, 117, (), EPERM),
    "process_vm_writev": (311, 271, (), EPERM),
    "unshare": (272, 97, (), EPERM),
    "mount": (165, 40, (), EPERM),
    "shmget": (29, 194, (), EPERM),
    "memfd_create": (319, 279, (), EPERM),
    "fchmodat": (268, 53, (), EPERM),
    "utimensat": (280, 88, (), EPERM),
    "truncate": (76, 45, (), EPERM),
    "setxattr": (188, 5, (), EPERM),
    "setsid": (112, 157, (), EPERM),
}


@pytest.mark.parametrize("name", CALLS)
def test_verdicts(name):
    intel, arm, arguments, expected = CALLS[name]
    assert (verdict("x86_64", intel, *arguments), verdict("aarch64", arm, *arguments)) == (expected, expected)


def test_calls_of_x86_64_only():
    for number in (57, 58, 90, 92, 132, 133):  # fork, vfork, chmod, chown, utime, mknod
        assert verdict("x86_64", number) == EPERM
    assert verdict("x86_64", 2, 0, 0o1000) == EPERM and verdict("x86_64", 2, 0, 0) == ALLOW  # open
    assert verdict("x86_64", 0x40000000 + 41) == EPERM, "the second set of numbers"


def test_calls_of_another_architecture_kill_the_process():
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL, "32-bit calls in a 64-bit process"
    with pytest.raises(OSError, match="riscv64"):
        kernel._filter_program("riscv64", PID)
