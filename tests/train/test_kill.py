"""Kill the command with -9 at random moments and restart it, also on another number of processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corners import corners
from safetensors.numpy import load_file
from train.runs import metrics, model_folder
from xla_flags import flags

from dovetail.train.guard.exits import PREEMPTED

pytestmark = pytest.mark.slow
STEPS = 40
OVERRIDES = [
    "batch=4", "length=64", f"steps={STEPS}", "schedule.warmup=5", "checkpoint.every=4", "eval.every=0",
    f"checkpoint.export_hf={STEPS}", "checkpoint.keep=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kill")


def start(place: Path, folder: Path, **more: str) -> subprocess.Popen:
    environment = os.environ | {"DOVETAIL_HOME": str(place / "home"), "XLA_FLAGS": flags(1)} | more
    command = [sys.executable, "-m", "dovetail", "pretrain", "tiny", f"model={model_folder(place)}", *OVERRIDES]
    with (place / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen([*command, "--run-dir", str(folder)], env=environment, stdout=log, stderr=log)


def finish(process: subprocess.Popen, place: Path, folder: Path) -> None:
    code = process.wait(timeout=240)
    assert code == 0, (place / f"{folder.name}.log").read_text()[-2000:]


@pytest.fixture(scope="module")
def straight(place) -> Path:
    folder = place / "straight"
    finish(start(place, folder), place, folder)
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    return folder


def exported(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / f"export/step_{STEPS}/model.safetensors")


def steps_said(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("times", corners([1, 2], [1]))
def test_a_killed_run_ends_bitwise_as_the_straight_run(place, straight, times):
    folder, dice = place / f"killed {times}", random.Random(5)
    for turn in range(times):
        process = start(place, folder)
        until = dice.randint(15 * turn + 3, 15 * turn + 12)
        while steps_said(folder) < until and process.poll() is None:
            time.sleep(0.02)
        time.sleep(dice.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < steps_said(folder) < STEPS
    finish(start(place, folder), place, folder)
    assert metrics(folder) == metrics(straight)
    ours, theirs = exported(folder), exported(straight)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def start_both(place: Path, folder: Path) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        start(place, folder, DOVETAIL_COORDINATOR=where, DOVETAIL_NUM_PROCESSES="2", DOVETAIL_PROCESS_ID=str(i))
        for i in range(2)
    ]


@pytest.mark.thorough  # two processes go on in test_processes, other meshes read a checkpoint in test_meshes
def test_two_processes_resume_the_run_of_one(place, straight):
    folder = place / "two"
    shutil.copytree(straight, folder)
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name.split("_")[1]) > STEPS // 2:
            shutil.rmtree(path)
    shutil.rmtree(folder / "export")
    both = start_both(place, folder)
    while steps_said(folder) != STEPS // 2 + 3 and all(process.poll() is None for process in both):
        time.sleep(0.005)  # the lines of the steps that were taken away go first
    both[1].send_signal(signal.SIGTERM)  # one of them hears it, both stop after the same step
    assert [process.wait(timeout=120) for process in both] == [PREEMPTED, PREEMPTED]
    assert STEPS // 2 + 3 < steps_said(folder) < STEPS
    for process in start_both(place, folder):
        finish(process, place, folder)
    log = (place / "two.log").read_text()
    assert f"continuing after step {STEPS // 2}" in log
    for ours, theirs in zip(metrics(folder), metrics(straight), strict=True):
        assert ours["step"] == theirs["step"]
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    weights, expected = exported(folder), exported(straight)
    for name, value in weights.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
