"""Test a run's folder: one run at a time writes into it, and a failed last checkpoint is an error."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys

import pytest
from refusals import refuses
from train.runs import model_folder, run, settings_for
from xla_flags import flags

from dovetail.core.errors import FileError
from dovetail.train.launch import only_run

pytestmark = pytest.mark.slow

HOLD = """
import sys
from pathlib import Path
from dovetail.train.launch import only_run
with only_run(Path(sys.argv[1]), True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        owner = f"pid {holder.pid} on {platform.node()}"
        with refuses("run_dir", FileError, naming=owner), only_run(tmp_path / "run", True):
            pytest.fail("two hold it")
        with only_run(tmp_path / "run", False):  # a further process of the first run
            pass
        holder.kill()
    with only_run(tmp_path / "run", True):
        assert f"pid {os.getpid()} " in (tmp_path / "run/.lock").read_text()


def test_a_failed_last_checkpoint_is_retried(tmp_path, monkeypatch):
    settings = settings_for(tmp_path, steps=6, checkpoint={"every": 4})
    limits, writes = resource.getrlimit(resource.RLIMIT_FSIZE), []
    from dovetail.io.checkpoint_tier import Tier

    real = Tier.save

    def save(self, step, arrays, meta):
        writes.append(step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if writes.count(6) == 1 else limits[0], limits[1]))
        real(self, step, arrays, meta)

    monkeypatch.setattr(Tier, "save", save)
    try:
        code, one = run(settings, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 0 and writes == [4, 6, 6] and one.checkpoints.steps() == [4, 6]


def test_a_full_disk_at_the_end_is_an_error_with_its_reason_last(tmp_path):
    """Run the command on a disk with room for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    model = model_folder(tmp_path)
    mount = 'mount -t tmpfs -o size=700k tmpfs "$0" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, str(disk)]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    command = [
        sys.executable, "-m", "dovetail", "pretrain", "tiny", f"model={model}", "steps=6", "batch=4", "length=32",
        "schedule.warmup=0", "eval.every=0", "checkpoint.every=2", "checkpoint.keep=9", "--run-dir", str(disk / "run"),
    ]  # fmt: skip
    environment = os.environ | {"DOVETAIL_HOME": str(tmp_path / "home"), "XLA_FLAGS": flags(1)}
    ended = subprocess.run([*inside, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr[-3000:]
    # (a library may still warn about interrupted work whenever Python collects it)
    last = [line for line in ended.stderr.splitlines() if line.startswith("error")][-1]
    assert last.startswith("error: the last checkpoint, of step 6, could not be written (no space is left there)"), last
    assert "Traceback" not in ended.stderr and "step 6/6" in ended.stderr
