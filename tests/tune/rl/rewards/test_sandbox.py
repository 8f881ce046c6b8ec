"""The sandbox: untrusted programs run within their limits and reach nothing outside."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.tune.rl.rewards import sandbox
from dovetail.tune.rl.rewards.sandbox import Limits, bytes_written, isolation_here, run_python

pytestmark = pytest.mark.slow

QUICK = Limits(seconds=10.0)


@pytest.fixture(autouse=True)
def _needs_kernel():
    if not sandbox.ENFORCED.issubset(isolation_here()):
        pytest.skip("this machine's kernel does not enforce the sandbox")


def test_a_program_runs_and_reports_its_isolation():
    result = run_python(
        "import sys\nprint(sys.stdin.read() * 2)\nprint('!', file=sys.stderr)", stdin="ab", limits=QUICK
    )
    assert (result.ok, result.stdout, result.stderr, result.code, result.error) == (True, "abab\n", "!\n", 0, "")
    assert result.isolated and {"limits", "landlock", "seccomp"} <= set(result.isolation)


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
    result = run_python("if 1:\n" + program, limits=QUICK)
    assert result.ok and result.stdout == "done\n", result.stderr


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
    "big file": "open('big', 'wb').write(bytes(65 * 2**20))",
    "package": "import numpy",
    "signal by a file": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "shared mapping of a file": "import mmap; f = open('a', 'w+b'); f.truncate(9); mmap.mmap(f.fileno(), 9)",
    "name space": "import ctypes; l = ctypes.CDLL(None); assert l.unshare(0x10000000) == 0, 'no'",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_operations_fail(what, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    with listening() as port:
        program = FORBIDDEN[what].format(port=port, secret=str(secret), folder=str(tmp_path))
        result = run_python(program + "\nprint('it could')", limits=QUICK)
    assert not result.ok and result.stdout == "" and result.error, result
    assert "s3cret" not in result.stderr and list(tmp_path.iterdir()) == [secret]
    assert secret.read_text() == "s3cret" and secret.stat().st_mode & 0o777


def test_a_program_sees_no_environment_variable_and_no_open_file(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    program = "for fd in range(3, 4096):\n    try: print(fd, os.fstat(fd))\n    except OSError: pass"
    program = f"import os\nprint(dict(os.environ))\n{program}"
    result = run_python(program, limits=QUICK)
    assert result.ok and "s3cret" not in result.stdout
    assert len(result.stdout.splitlines()) == 2, "the environment, and the file that it reports to"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_without_end_is_stopped(program):
    begun = time.monotonic()
    result = run_python(program, limits=Limits(seconds=0.5))
    assert not result.ok and result.error and result.code in (None, -24) and time.monotonic() - begun < 40


def test_endless_printing_is_bounded():
    result = run_python("while True: print('x' * 1000)", limits=Limits(seconds=10, disk=1))
    assert not result.ok and len(result.stdout) <= sandbox.SHOWN
    assert "File too large" in result.error or result.error == "it wrote more than 1 MB"


MANY_FILES = """
while True:
    with open("one", "wb") as file: file.write(bytes(2**19))
    {then}
"""


@pytest.mark.parametrize("then", ["os.rename('one', f'{os.times()[4]}')", "os.unlink('one')"])
def test_the_sum_of_written_bytes_is_bounded(then):
    result = run_python("import os" + MANY_FILES.format(then=then), limits=Limits(seconds=30, disk=2))
    assert "No space left" in result.error or result.error == "it wrote more than 2 MB"


def test_written_bytes_are_counted_where_nothing_can_be_mounted(tmp_path):
    """Bytes in files that were removed since count too."""
    write = "open('a', 'wb').write(bytes(2**20)); import os; os.unlink('a'); print(flush=True); input()"
    command = [sys.executable, "-c", write]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout and process.stdout.readline()
        assert bytes_written(process.pid) >= 2**20
    assert bytes_written(process.pid) == 0


def test_tests_run_in_the_programs_namespace():
    result = run_python(
        "def add(a, b): return a + b", tests=["assert add(1, 2) == 3", "assert add(1, 1) == 3", "add(1)"]
    )
    assert result.passed == (True, False, False) and not result.ok and result.error == "add(1, 1) must be 3, got 2"
    assert run_python("x = 1", tests=["assert x == 1"]).ok


@pytest.mark.parametrize(
    "program",
    ["import os; os._exit(0)", "import sys; sys.exit(0)", "def f(): import sys; sys.exit(0)", "raise ValueError", "1 +",
     "import os\ndef f(): os._exit(0)", "print('[\"word\", \"test\", \"\"]')\ndef f(): assert 0", "def f(): f()"],
)  # fmt: skip
def test_a_program_that_avoids_its_tests_passes_none(program):
    result = run_python(program, tests=["f()"], limits=QUICK)
    assert result.passed == (False,) and not result.ok and result.error


FORGER = """
import os, sys
frame = sys._getframe()
while "report" not in frame.f_locals: frame = frame.f_back
report = frame.f_locals["report"]
fd = dict(zip(report.__code__.co_freevars, report.__closure__))["fd"].cell_contents
"""
FORGED = {
    "passes": "report('program', ''); report('test', ['', []]); report('test', ['', ['True']]); os._exit(0)",
    "deep brackets": "os.write(fd, b'[' * 200_000 + b'\\n')",
    "an unknown kind": "report('else', 1); report(['test'], 1); report({}, 1)",
    "another form": "report('test', 1); report('program', [1]); report('test', [[], {}]); report('isolation', 7)"
    "; os._exit(0)",
    "no text": "os.write(fd, bytes(range(256)) * 99); os.close(fd); os._exit(0)",
    "a signal without a name": "os.kill(os.getpid(), 40)",
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_report_gains_nothing_and_raises_nothing(what):
    result = run_python(FORGER + FORGED[what], tests=["assert f(2) == 4", "assert f(3) == 9"], limits=QUICK)
    assert result.passed == (False, False) and not result.ok and result.error and result.isolated


EQUALS_ALL = "class All:\n    def __eq__(self, other): return True\ndef f(*_): return All()"


def test_expected_values_are_compared_outside_the_program():
    result = run_python(EQUALS_ALL, tests=["assert f(2) == 4", "assert 4 == f(2), 'no'", "assert f(2)"], limits=QUICK)
    assert result.passed == (False, False, True) and "All cannot be compared" in result.error
    nosy = FORGER.replace('"report"', '"payload"').partition("report =")[0] + "payload = frame.f_locals['payload']\n"
    nosy += "def f(n): return [n, '31337' in str(payload['tests'])]"
    check = "def check(candidate):\n    assert candidate(2) == 31337\ncheck(f)"
    for test in ("assert f(2) == 31337", check):
        result = run_python(nosy, tests=[test], limits=QUICK)
        assert result.passed == (False,) and result.error == "f(2) must be 31337, got [2, 0]"


def test_a_test_of_several_statements():
    program = "from collections import Counter\ndef f(n): return [n, {'a': n}, (1.0, n)]"
    one = "import math\nx = f(2)\nassert x == [2, {'a': 2}, (True, 2.0)]\nassert set(x[2]) == set([1, 2])\nassert x"
    result = run_python(
        program, tests=[one, "x = 1\nassert f(x)[0] == 2\nassert 1", "assert f(1)[0] == "], limits=QUICK
    )
    assert result.passed == (True, False, False) and result.error == "f(x)[0] must be 2, got 1"


def test_a_function_of_asserts_is_compared_outside_the_program():
    check = (
        "M = {}\ndef check(candidate):\n    'all'\n    assert candidate(2) == 4, 'two'\n    assert candidate(3) == 9\n"
    )
    forged = FORGER + "report('program', ''); report('test', ['', []]); os._exit(0)"
    for program, passed in (("def f(n): return n * n", True), (EQUALS_ALL, False), (forged, False)):
        assert run_python(program, tests=[check + "check(f)"], limits=QUICK).passed == (passed,)
    other = "def check(candidate):\n    n = 3\n    assert candidate(n) == 9\ncheck(f)"
    assert run_python("n = 2\ndef f(n): return n * n", tests=[other, "assert n == 2"], limits=QUICK).ok


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    others = set(children())  # of other tests in this process
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_python("import os\nos.makedirs('a/b')\nos.mkdir('closed', 0)\nopen('a/b/c', 'w').write('x')", limits=QUICK)
    run_python("import time; time.sleep(60)", limits=Limits(seconds=0.3))
    assert list(tmp_path.iterdir()) == []
    assert set(children()) <= others


def test_installed_packages_on_request():
    result = run_python(
        "import numpy; print(numpy.arange(3).sum())", limits=Limits(seconds=30, memory=2048, packages=True)
    )
    assert result.ok and result.stdout == "3\n", result.stderr


def test_it_ends_with_the_process_that_started_it(tmp_path):
    """A process that is killed cannot stop its children itself."""
    program = "import time; time.sleep(60)"
    script = f"""
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
from dovetail.tune.rl.rewards.sandbox import *
run_python({program!r}, limits=Limits(seconds=60))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        (child,) = wait_for(lambda: [one for one in children(process.pid) if is_restricted(one)])
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not (text := status(child)) or "zombie" in text)


def test_a_path_that_cannot_be_opened_does_not_weaken_the_isolation(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sandbox, "SYSTEM", (*sandbox.SYSTEM, str(tmp_path / "file" / "below"), str(tmp_path / "none")))
    result = run_python("print(1)", limits=QUICK)
    assert result.ok and result.isolated


def test_a_program_does_not_start_if_a_restriction_fails(monkeypatch, tmp_path):
    """The machine supports Landlock, and setting it up fails once."""
    isolation_here()
    monkeypatch.setattr(sandbox, "SYSTEM", (*sandbox.SYSTEM, "a name that is too long" * 999))
    with pytest.raises(OSError, match="landlock failed"):
        run_python(f"open({str(tmp_path / 'ran')!r}, 'w')", limits=QUICK)
    result = run_python("print(1)", limits=Limits(isolation="any"))
    assert result.ok and "landlock" not in result.isolation and "audit" in result.isolation


def test_a_kernel_without_the_restrictions_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_here", lambda: ("limits", "audit"))
    with refuses("isolation", UnsupportedError, naming="capabilities, landlock, seccomp"):
        run_python("print(1)")
    assert run_python("print(1)", limits=Limits(isolation="any")).ok


@pytest.mark.parametrize(
    "attempt",
    ["open({secret!r})", "open({folder!r} + '/new', 'w')", "import os; os.listdir({folder!r})", "import os; os.fork()",
     "import subprocess; subprocess.run(['true'])", "import socket; socket.socket().connect(('127.0.0.1', 9))",
     "import os; os.system('true')", "import os; os.remove({secret!r})", "import ctypes; ctypes.CDLL(None)"],
)  # fmt: skip
def test_the_audit_hook_refuses(attempt, tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "own").mkdir()
    folder, own = Path(sandbox.__file__).parent, str(tmp_path / "own")
    attempt = attempt.format(secret=str(tmp_path / "secret"), folder=str(tmp_path))
    script = f"""
import sys; sys.path.insert(0, {str(folder)!r})
from isolation import program
program.add_audit_hook({sandbox._readable(False)!r}, {own!r})
open({own!r} + "/a", "w").close(); import json
try:
    {attempt}
except PermissionError as error: print(error)
"""
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=30)
    assert "is not permitted here" in result.stdout, result


def test_limits_are_checked():
    with refuses("memory", RecipeError):
        Limits(memory=0)
    with refuses("isolation", RecipeError):
        Limits(isolation="none")


# --- helpers ----------------------------------------------------------------------------------------------------------


class listening:
    """Listen on a local port and return it."""

    def __enter__(self):
        import socket

        self.socket = socket.create_server(("127.0.0.1", 0))
        return self.socket.getsockname()[1]

    def __exit__(self, *_):
        self.socket.close()


def children(pid: int | None = None) -> list[int]:
    """Return the children of this process, or of another."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parts[1]) == (pid or os.getpid()):
            found.append(int(path.parent.name))
    return found


def is_restricted(pid: int) -> bool:
    return "Seccomp:\t2" in status(pid)


def status(pid: int) -> str:
    """Return the status of a process, which may end at any time; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(holds, seconds: float = 20.0):
    end, event = time.monotonic() + seconds, threading.Event()
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        event.wait(0.02)
    return found
