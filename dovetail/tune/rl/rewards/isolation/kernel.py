"""Restrict this process by the Linux kernel, without root: namespaces, no capabilities, Landlock and seccomp.

- Namespaces give the process its own users, network, IPC and mounts, where the machine permits it.
- Landlock (Linux 5.13) opens only the files below the given folders, for root too. It does not cover a file's mode,
  owner and times, which seccomp forbids to change, nor `stat`: a program can still learn that a path exists.
- Seccomp refuses the system calls that reach other processes: sockets, other programs, child processes (threads are
  fine), signals to others (also those that the kernel sends for a file: `F_SETOWN`, `O_ASYNC`), memory that outlives
  the process or escapes its limit, writes that `sandbox.bytes_written` does not count, and changes that Landlock does
  not cover: a file's mode, owner, times. The filter lists the refused calls rather than the allowed ones, so that it
  works with newer versions of Python and libc. It needs no rights and works in containers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from typing import Any

# --- calls of the C library -------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38


def prctl(option: int, *arguments: Any) -> None:
    """Call prctl with up to four arguments; raise OSError where it fails."""
    words = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_ulong(a) for a in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    _require_success(_libc().prctl(option, *words))


def _syscall(number: int, *arguments: Any) -> int:
    result = _libc().syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise _last_error()
    return result


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _require_success(result: int) -> None:
    if result != 0:
        raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# --- namespaces and capabilities --------------------------------------------------------------------------------------

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
NO_SUID, NO_DEVICES, RECURSIVE, PRIVATE = 0x2, 0x4, 0x4000, 0x40000
MAX_FILES = 4096  # that the process may create
CAPABILITIES_VERSION = 0x20080522


def enter_namespaces() -> None:
    """Enter new namespaces; raise OSError where that is not permitted, as in many containers."""
    user, group = os.getuid(), os.getgid()
    _require_success(_libc().unshare(NEW_USER | NEW_NET | NEW_IPC | NEW_MOUNTS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_bounded_folder(folder: str, size: int) -> None:
    """Mount a file system of `size` bytes in memory over `folder`, visible to this process alone."""
    _mount(b"none", b"/", None, RECURSIVE | PRIVATE, None)
    options = f"size={size},nr_inodes={MAX_FILES},mode=700"
    _mount(b"tmpfs", os.fsencode(folder), b"tmpfs", NO_SUID | NO_DEVICES, options.encode())


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _require_success(_libc().mount(source, target, kind, ctypes.c_ulong(flags), options))


def drop_capabilities() -> None:
    """Drop the capabilities of root or of a new namespace, with which a program could lift its limits."""
    head = struct.pack("Ii", CAPABILITIES_VERSION, 0)
    _require_success(_libc().capset(head, struct.pack("6I", *[0] * 6)))


# --- Landlock ---------------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
ASK_VERSION, PATH_BENEATH = 1, 1
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
FILE_RIGHTS = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # a rule for a file must not name a right of folders
TCP = 0b11  # bind, connect
SCOPES = 0b11  # abstract sockets and signals reach only processes in the same Landlock domain


def restrict_files(readable: Iterable[str], folder: str) -> None:
    """Allow this process to read below `readable` and to use `folder` freely, and to open no other file.

    Raises:
        OSError: The kernel has no Landlock.
    """
    version = _syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ASK_VERSION))
    handled = _handled_rights(version)
    words = [handled, TCP, SCOPES][: 1 + (version >= 4) + (version >= 6)]
    attributes = struct.pack(f"{len(words)}Q", *words)
    ruleset = _syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for path in readable:
        # A path that this user cannot open is not readable for the program either: the other paths still are.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            _allow(ruleset, path, (READ_FILE | READ_DIR) & handled)
    _allow(ruleset, folder, handled & ~IOCTL_DEV)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _handled_rights(version: int) -> int:
    """Return every right over files that this version can withhold: 13, then REFER, TRUNCATE and IOCTL_DEV."""
    return (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= FILE_RIGHTS
        rule = struct.pack("=Qi", rights, fd)
        _syscall(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(fd)


# --- seccomp ----------------------------------------------------------------------------------------------------------

FILTER_MODE = 2
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
LOAD, EQUAL, ANY_BIT, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06  # BPF opcodes
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in seccomp_data, in bytes
CLONE_THREAD = 0x10000
SOCK_STREAM = 1
O_ACCMODE, O_TRUNC, O_ASYNC = 0o3, 0o1000, 0o20000
F_SETFL = 4
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
IOCTL_REFUSED = (0x5452, 0x8901, 0x8902, 0x5412, 0x541C)  # FIOASYNC, FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
MAP_SHARED, MAP_ANONYMOUS = 0x1, 0x20

# Numbers of the refused calls, for each machine.
_X86 = """
    socket 41 connect 42 bind 49 listen 50 accept 43 accept4 288 socketpair 53
    clone 56 fork 57 vfork 58 execve 59 execveat 322 setsid 112 setpgid 109 unshare 272 setns 308
    kill 62 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 tkill 200 prlimit64 302
    ptrace 101 process_vm_readv 310 process_vm_writev 311 kcmp 312
    fcntl 72 ioctl 16 mmap 9 migrate_pages 256 move_pages 279
    fallocate 285 copy_file_range 326 sendfile 40 splice 275 vmsplice 278 tee 276 io_setup 206 io_submit 209
    mount 165 umount2 166 pivot_root 155 chroot 161 name_to_handle_at 303 open_by_handle_at 304 mknod 133 mknodat 259
    bpf 321 perf_event_open 298 userfaultfd 323 add_key 248 request_key 249 keyctl 250 personality 135
    memfd_create 319 shmget 29 shmat 30 msgget 68 semget 64 mq_open 240
    setpriority 141 sched_setaffinity 203 sched_setscheduler 144 sched_setparam 142 sched_setattr 314 ioprio_set 251
    open 2 openat 257 truncate 76 chmod 90 fchmod 91 fchmodat 268 chown 92 fchown 93 lchown 94 fchownat 260
    utime 132 utimes 235 futimesat 261 utimensat 280
    setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197 lremovexattr 198 fremovexattr 199
"""
_ARM = """
    socket 198 connect 203 bind 200 listen 201 accept 202 accept4 242 socketpair 199
    clone 220 execve 221 execveat 281 setsid 157 setpgid 154 unshare 97 setns 268
    kill 129 tgkill 131 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 tkill 130 prlimit64 261
    ptrace 117 process_vm_readv 270 process_vm_writev 271 kcmp 272
    fcntl 25 ioctl 29 mmap 222 migrate_pages 238 move_pages 239
    fallocate 47 copy_file_range 285 sendfile 71 splice 76 vmsplice 75 tee 77 io_setup 0 io_submit 2
    mount 40 umount2 39 pivot_root 41 chroot 51 name_to_handle_at 264 open_by_handle_at 265 mknodat 33
    bpf 280 perf_event_open 241 userfaultfd 282 add_key 217 request_key 218 keyctl 219 personality 92
    memfd_create 279 shmget 194 shmat 196 msgget 186 semget 190 mq_open 180
    setpriority 140 sched_setaffinity 122 sched_setscheduler 119 sched_setparam 118 sched_setattr 274 ioprio_set 30
    openat 56 truncate 45 fchmod 52 fchmodat 53 fchown 55 fchownat 54 utimensat 88
    setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16
"""
_EVERYWHERE = """
    pidfd_send_signal 424 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 open_tree 428 move_mount 429
    fsopen 430 fsconfig 431 fsmount 432 fspick 433 pidfd_open 434 clone3 435 openat2 437 pidfd_getfd 438
    process_madvise 440 mount_setattr 442 memfd_secret 447 fchmodat2 452 setxattrat 463 removexattrat 466
    open_tree_attr 467 file_setattr 469
"""
# machine -> (AUDIT_ARCH constant, call numbers)
MACHINES = {"x86_64": (0xC000003E, _X86), "aarch64": (0xC00000B7, _ARM)}
X32 = 0x40000000  # offset of x86-64's second set of call numbers
SELF_ONLY = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")  # allowed to this process: abort() needs it


def restrict_calls() -> None:
    """Install the filter; raise OSError where the kernel or the machine does not support it."""
    program = b"".join(_filter_program(platform.machine(), os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.c_char_p(filter))


def _filter_program(machine: str, pid: int) -> list[bytes]:
    if machine not in MACHINES:
        raise OSError(f"the system call numbers of {machine} are unknown")
    name, text = MACHINES[machine]
    words = (text + _EVERYWHERE).split()
    calls = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    lines = [_do(LOAD, ARCHITECTURE), _do(EQUAL, name, 1, 0), _do(RETURN, KILL), _do(LOAD, NUMBER)]
    if machine == "x86_64":
        lines += [_do(AT_LEAST, X32, 0, 1), _do(RETURN, ERROR | EPERM)]
    for newer in ("clone3", "openat2"):  # their flags are in memory, which a filter cannot read; libc falls back
        lines += [_do(EQUAL, calls.pop(newer), 0, 1), _do(RETURN, ERROR | ENOSYS)]
    lines += _only_where(calls.pop("clone"), 0, [_do(ANY_BIT, CLONE_THREAD, 0, 1)])
    lines += _only_where(calls.pop("socketpair"), 1, [_do(AND, 0xF), _do(EQUAL, SOCK_STREAM, 0, 1)])
    for call, argument in (("open", 1), ("openat", 2)):
        if call in calls:  # O_RDONLY | O_TRUNC empties a file: the first versions of Landlock allow it
            emptied = (O_TRUNC, O_TRUNC | O_ACCMODE)
            lines += _except_where(calls.pop(call), argument, emptied, mask=O_TRUNC | O_ACCMODE)
    lines += _except_where(calls.pop("mmap"), 3, (MAP_SHARED,), mask=MAP_SHARED | MAP_ANONYMOUS)
    lines += _except_where(calls.pop("ioctl"), 1, IOCTL_REFUSED)
    lines += _except_async(calls["fcntl"])
    lines += _except_where(calls.pop("fcntl"), 1, FCNTL_REFUSED)
    lines += _only_where(calls.pop("prlimit64"), 0, [_do(EQUAL, 0, 0, 1)])
    for call in SELF_ONLY:
        lines += _only_where(calls.pop(call), 0, [_do(EQUAL, pid, 0, 1)])
    for number in calls.values():
        lines += [_do(EQUAL, number, 0, 1), _do(RETURN, ERROR | EPERM)]
    return [*lines, _do(RETURN, ALLOW)]


def _only_where(number: int, argument: int, holds: list[bytes]) -> list[bytes]:
    """Allow the call where its argument passes `holds`, whose last line skips one line if it does not."""
    body = [_do(LOAD, ARGUMENTS + 8 * argument), *holds, _do(RETURN, ALLOW), _do(RETURN, ERROR | EPERM)]
    return [_do(EQUAL, number, 0, len(body)), *body]


def _except_where(number: int, argument: int, refused: tuple[int, ...], mask: int = 0xFFFFFFFF) -> list[bytes]:
    """Allow the call unless its argument, in the bits of `mask`, is one of `refused`."""
    refuse = [line for value in refused for line in (_do(EQUAL, value, 0, 1), _do(RETURN, ERROR | EPERM))]
    body = [_do(LOAD, ARGUMENTS + 8 * argument), _do(AND, mask), *refuse, _do(RETURN, ALLOW)]
    return [_do(EQUAL, number, 0, len(body)), *body]


def _except_async(fcntl: int) -> list[bytes]:
    """Refuse F_SETFL with O_ASYNC, and leave the accumulator at the call's number for any other call."""
    flags = [_do(LOAD, ARGUMENTS + 16), _do(ANY_BIT, O_ASYNC, 0, 1), _do(RETURN, ERROR | EPERM)]
    body = [_do(LOAD, ARGUMENTS + 8), _do(EQUAL, F_SETFL, 0, len(flags)), *flags, _do(LOAD, NUMBER)]
    return [_do(EQUAL, fcntl, 0, len(body)), *body]


def _do(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
