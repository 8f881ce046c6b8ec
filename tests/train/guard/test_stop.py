"""Test signals before the first step: the process ends soon, as on a preemption."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train.runs import model_folder
from xla_flags import flags

from dovetail.train.guard.exits import PREEMPTED

pytestmark = pytest.mark.slow

CHILD = """
import hashlib, signal, sys, time
from dovetail.train.guard import stop
stop.GRACE_S = 0.3
with stop.Stop({}, tell=lambda code, line: print("told", code, flush=True)) as one, one:
    try:
        print("in", flush=True)
        {}
    finally:
        print("out", flush=True)
"""
PYTHON = "time.sleep(60)"
# C code that neither looks at signals nor holds Python's lock, as XLA's; for minutes
C = "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)"
FAILS = """
        try:
            time.sleep(60)
        except BaseException:
            raise RuntimeError('broken off') from None
"""
LOOP = "one.begin(); time.sleep(1); print('flag', one.signal, flush=True)"


def child(body: str, ends_process: bool = True) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD.format(ends_process, body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "in\n"
    time.sleep(0.1)
    return process


@pytest.mark.parametrize(
    ("body", "number", "code", "said"),
    [
        (PYTHON, signal.SIGTERM, PREEMPTED, f"out\ntold {PREEMPTED}\n"),
        (PYTHON, signal.SIGINT, 130, "out\ntold 130\n"),
        (FAILS, signal.SIGTERM, PREEMPTED, f"out\ntold {PREEMPTED}\n"),  # the signal was the reason
        (C, signal.SIGTERM, PREEMPTED, f"told {PREEMPTED}\n"),
        (C, signal.SIGINT, 130, "told 130\n"),
    ],
)
def test_a_signal_before_the_first_step_ends_the_process(body, number, code, said):
    process = child(body)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, said)
    assert f"exit {code}: stopped before the first step, nothing to save" in err


def test_an_import_is_not_broken_off_by_an_exception(tmp_path, monkeypatch):
    """jaxlib's crashes on one (SIGSEGV, once in sixty starts)."""
    (tmp_path / "slow_module.py").write_text(
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    print('broken off', flush=True)\n    raise\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = child("import slow_module")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (PREEMPTED, f"told {PREEMPTED}\n")
    assert "stopped before the first step" in err


@pytest.mark.parametrize("body", [PYTHON, FAILS])
def test_in_a_users_program_a_signal_is_an_exception(body):
    process = child(body, ends_process=False)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (PREEMPTED, "out\n")


def test_a_signal_can_be_deferred():
    process = child("with one.deferred(): time.sleep(0.5); print('over', flush=True)", ends_process=False)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (PREEMPTED, "over\nout\n")


def test_in_the_loop_a_signal_is_a_flag():
    process = child(LOOP)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"flag {int(signal.SIGTERM)}\nout\n", "")


def start(tmp_path: Path, **more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "dovetail", "pretrain", "tiny", f"model={model_folder(tmp_path)}", "batch=4"]
    return subprocess.Popen(
        [*command, "length=64", "--run-dir", str(tmp_path / "run")], env=os.environ | {"XLA_FLAGS": flags(1)} | more,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_the_command_stops_on_a_signal_during_startup(tmp_path, count):
    """One of the processes hears it and all end so, and nothing is left but the ledger of time and the lock."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    more = {"DOVETAIL_COORDINATOR": where, "DOVETAIL_NUM_PROCESSES": "2"} if count == 2 else {}
    processes = [start(tmp_path, **more, **({"DOVETAIL_PROCESS_ID": str(i)} if more else {})) for i in range(count)]
    while not (tmp_path / "run" / "goodput.json").exists() and processes[0].poll() is None:
        time.sleep(0.01)
    processes[-1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [PREEMPTED] * count, said
    for each in said:
        assert "stopped before the first step" in each.strip().splitlines()[-1]
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"goodput.json", ".lock", "checkpoints"}
