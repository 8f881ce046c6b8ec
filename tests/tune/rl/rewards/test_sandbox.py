"""Code that nobody has read: what it can do, and what it cannot."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dovetail.tune.rl.rewards import sandbox
from dovetail.tune.rl.rewards.sandbox import Limits, isolation_here, run_python

QUICK = Limits(seconds=10.0)


@pytest.fixture(autouse=True)
def _enforced():
    if not sandbox.ENFORCED.issubset(isolation_here()):
        pytest.skip("this machine's kernel does not enforce the sandbox")


def test_a_program_runs_and_says_what_held():
    ran = run_python("import sys\nprint(sys.stdin.read() * 2)\nprint('!', file=sys.stderr)", stdin="ab", limits=QUICK)
    assert (ran.ok, ran.stdout, ran.stderr, ran.code, ran.error) == (True, "abab\n", "!\n", 0, "")
    assert ran.isolated and {"limits", "landlock", "seccomp"} <= set(ran.isolation)


def test_ordinary_programs_work():
    program = """
        import asyncio, decimal, json, random, tempfile, threading, time, os, zoneinfo
        box = []
        thread = threading.Thread(target=box.append, args=(1,)); thread.start(); thread.join()
        asyncio.run(asyncio.sleep(0))
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "a"), "w") as file: file.write("x")
            os.rename(os.path.join(folder, "a"), "b")
        assert open("b").read() == "x" and box == [1] and os.getcwd() == os.environ["HOME"]
        if __name__ == "__main__": print("done")
    """
    ran = run_python("if 1:\n" + program, limits=QUICK)
    assert ran.ok and ran.stdout == "done\n", ran.stderr


FORBIDDEN = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "unix": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "read": "open({secret!r}).read()",
    "list": "import os; os.listdir({folder!r})",
    "overwrite": "open({secret!r}, 'w')",
    "beside": "open({folder!r} + '/new', 'w')",
    "unlink": "import os; os.unlink({secret!r})",
    "chmod": "import os; os.chmod({secret!r}, 0)",
    "touch": "import os; os.utime({secret!r}, (0, 0))",
    "truncate": "import os; os.truncate({secret!r}, 0)",
    "truncate by reading": "import os; open('a', 'w').close(); os.open('a', os.O_RDONLY | os.O_TRUNC)",
    "link": "import os; os.link({secret!r}, 'mine')",
    "symlink": "import os; os.symlink({secret!r}, 'mine'); open('mine').read()",
    "proc": "open('/proc/self/environ', 'rb').read()",
    "parent's memory": "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "fork": "import os; os.fork()",
    "program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "shell": "import os; assert os.system('true') == 0, 'no shell'",
    "processes": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "kill": "import os; os.kill(os.getppid(), 0)",
    "kill all": "import os; os.kill(-1, 0)",
    "session": "import os; os.setsid()",
    "memory": "bytearray(10 * 2**30)",
    "more memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "shared memory": "from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=100)",
    "big file": "open('big', 'wb').write(bytes(20 * 2**20))",
    "package": "import numpy",
    "name space": "import ctypes; l = ctypes.CDLL(None); assert l.unshare(0x10000000) == 0, 'no'",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_it_cannot_do(what, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    with listening() as port:
        program = FORBIDDEN[what].format(port=port, secret=str(secret), folder=str(tmp_path))
        ran = run_python(program + "\nprint('it could')", limits=QUICK)
    assert not ran.ok and ran.stdout == "" and ran.error, ran
    assert "s3cret" not in ran.stderr and list(tmp_path.iterdir()) == [secret]
    assert secret.read_text() == "s3cret" and secret.stat().st_mode & 0o777


def test_the_environment_and_open_files_stay_out(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    program = "for fd in range(3, 4096):\n    try: print(fd, os.fstat(fd))\n    except OSError: pass"
    program = f"import os\nprint(dict(os.environ))\n{program}"
    ran = run_python(program, limits=QUICK)
    assert ran.ok and "s3cret" not in ran.stdout
    assert len(ran.stdout.splitlines()) == 2, "the environment, and the file that it reports to"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_what_does_not_end_is_ended(program):
    begun = time.monotonic()
    ran = run_python(program, limits=Limits(seconds=0.5))
    assert not ran.ok and ran.error and ran.code in (None, -24) and time.monotonic() - begun < 40


def test_endless_printing_is_bounded():
    ran = run_python("while True: print('x' * 1000)", limits=Limits(seconds=10, file=1))
    assert not ran.ok and len(ran.stdout) <= sandbox.SHOWN and "File too large" in ran.error


def test_tests_run_in_the_programs_names():
    ran = run_python("def add(a, b): return a + b", tests=["assert add(1, 2) == 3", "assert add(1, 1) == 3", "add(1)"])
    assert ran.passed == (True, False, False) and not ran.ok and "AssertionError" in ran.error
    assert run_python("x = 1", tests=["assert x == 1"]).ok


@pytest.mark.parametrize(
    "program",
    ["import os; os._exit(0)", "import sys; sys.exit(0)", "def f(): import sys; sys.exit(0)", "raise ValueError", "1 +",
     "import os\ndef f(): os._exit(0)", "print('[\"word\", \"test\", \"\"]')\ndef f(): assert 0", "def f(): f()"],
)  # fmt: skip
def test_a_program_that_avoids_its_tests_passes_none(program):
    ran = run_python(program, tests=["f()"], limits=QUICK)
    assert ran.passed == (False,) and not ran.ok and ran.error


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    others = set(children())  # of other tests in this process
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_python("import os\nos.makedirs('a/b')\nos.mkdir('closed', 0)\nopen('a/b/c', 'w').write('x')", limits=QUICK)
    run_python("import time; time.sleep(60)", limits=Limits(seconds=0.3))
    assert list(tmp_path.iterdir()) == []
    assert set(children()) <= others


def test_installed_packages_by_request():
    ran = run_python(
        "import numpy; print(numpy.arange(3).sum())", limits=Limits(seconds=30, memory=2048, packages=True)
    )
    assert ran.ok and ran.stdout == "3\n", ran.stderr


def test_it_ends_with_the_process_that_started_it(tmp_path):
    """Killed, that process cannot end it."""
    program = "import time; open('begun', 'w').close(); time.sleep(60)"
    script = f"""
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
from dovetail.tune.rl.rewards.sandbox import *
run_python({program!r}, limits=Limits(seconds=60))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: list(tmp_path.glob("*/begun")))
        (child,) = children(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text())


def test_where_the_kernel_cannot_it_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_here", lambda: ("limits", "audit"))
    with pytest.raises(ValueError, match="needs landlock, seccomp of the kernel"):
        run_python("print(1)")
    assert run_python("print(1)", limits=Limits(isolation="any")).ok


@pytest.mark.parametrize(
    "attempt",
    ["open({secret!r})", "open({folder!r} + '/new', 'w')", "import os; os.listdir({folder!r})", "import os; os.fork()",
     "import subprocess; subprocess.run(['true'])", "import socket; socket.socket().connect(('127.0.0.1', 9))",
     "import os; os.system('true')", "import os; os.remove({secret!r})", "import ctypes; ctypes.CDLL(None)"],
)  # fmt: skip
def test_the_hook_that_stands_in_for_the_kernel(attempt, tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "own").mkdir()
    cage, own = Path(sandbox.__file__).parent, str(tmp_path / "own")
    attempt = attempt.format(secret=str(tmp_path / "secret"), folder=str(tmp_path))
    script = f"""
import sys; sys.path.insert(0, {str(cage)!r})
from cage import audit
audit.restrict({sandbox._readable(False)!r}, {own!r})
open({own!r} + "/a", "w").close(); import json
try:
    {attempt}
except PermissionError as error: print(error)
"""
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=30)
    assert "is not permitted here" in ran.stdout, ran


def test_limits_that_make_no_sense():
    with pytest.raises(ValueError, match="memory must be above 0"):
        Limits(memory=0)
    with pytest.raises(ValueError, match="isolation must be one of"):
        Limits(isolation="none")


# --- helpers ----------------------------------------------------------------------------------------------------------


class listening:
    """A port of this machine that somebody listens on."""

    def __enter__(self):
        import socket

        self.socket = socket.create_server(("127.0.0.1", 0))
        return self.socket.getsockname()[1]

    def __exit__(self, *_):
        self.socket.close()


def children(pid: int | None = None) -> list[int]:
    """Of this process, or of another."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parts[1]) == (pid or os.getpid()):
            found.append(int(path.parent.name))
    return found


def wait_for(holds, seconds: float = 20.0):
    end, event = time.monotonic() + seconds, threading.Event()
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        event.wait(0.02)
    return found
