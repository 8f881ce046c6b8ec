"""Test the command in several processes: started, resumed, signalled, killed, and with one failure."""

from __future__ import annotations

import json
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

from dovetail.train.guard.exits import LOST, PREEMPTED

pytestmark = pytest.mark.slow
LONG = 5000  # steps: more than any test waits for
ENDS_S = 30.0  # when one has failed, the others end within this


def whole_checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoints/*/manifest.json") if path.parent.name.partition("_")[2].isdigit()]


class Processes:
    """A run of `count` processes. `more`: overrides by the index of a process."""

    def __init__(self, place: Path, name: str, count: int, steps: int, more=lambda index: []):
        self.folder, self.logs = place / name, [place / f"{name}.{i}.log" for i in range(count)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{free.getsockname()[1]}"
        home = os.environ | {"DOVETAIL_HOME": str(place / "home"), "XLA_FLAGS": flags(1)}
        self.running = []
        for index, log in enumerate(self.logs):
            own = {
                "DOVETAIL_COORDINATOR": where,
                "DOVETAIL_NUM_PROCESSES": str(count),
                "DOVETAIL_PROCESS_ID": str(index),
            }
            command = [
                sys.executable, "-m", "dovetail", "pretrain", "tiny", f"model={model_folder(place)}", f"steps={steps}",
                "batch=4", "length=32", "schedule.warmup=0", "eval.every=4", "eval.batches=1", "checkpoint.every=4",
                "health.lost_seconds=8", f"checkpoint.export_hf={steps}", *more(index), "--run-dir", str(self.folder),
            ]  # fmt: skip
            with log.open("w") as out:
                self.running.append(subprocess.Popen(command, env=home | own, stdout=out, stderr=out))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def wait_for(self, step: int) -> None:
        until = time.monotonic() + 120
        while max(self.steps(), default=0) < step and time.monotonic() < until:
            assert all(process.poll() is None for process in self.running), self.log()
            time.sleep(0.02)

    def wait_for_checkpoint(self) -> None:
        """Wait for a complete checkpoint: a run killed before one starts from the beginning."""
        until = time.monotonic() + 120
        while not whole_checkpoints(self.folder) and time.monotonic() < until:
            assert all(process.poll() is None for process in self.running), self.log()
            time.sleep(0.02)

    def codes(self, within: float) -> list[int]:
        until = time.monotonic() + within
        try:
            return [process.wait(max(0.1, until - time.monotonic())) for process in self.running]
        except subprocess.TimeoutExpired:
            pytest.fail(f"not all ended within {within} s: {self.log()}")

    def last_lines(self) -> list[str]:
        return [log.read_text().rstrip().rpartition("\n")[2] for log in self.logs]

    def log(self) -> str:
        return "\n---\n".join(log.read_text()[-4000:] for log in self.logs)

    def metrics(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics() if "loss" in line]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.mark.thorough  # the tests that kill a run also start and finish one
def test_several_processes_start_and_resume(place):
    """Train, evaluate, save and export; the same command with more steps resumes."""
    with Processes(place, "fresh", 2, 6) as two:
        assert two.codes(180) == [0, 0], two.log()
        assert two.steps() == [1, 2, 3, 4, 5, 6]
        assert [line["step"] for line in two.metrics() if "held_out_loss" in line] == [4, 6]
        assert (two.folder / "export/step_6/model.safetensors").exists()
    with Processes(place, "fresh", 2, 8) as again:
        assert again.codes(180) == [0, 0], again.log()
        assert again.steps() == [1, 2, 3, 4, 5, 6, 7, 8] and "continuing after step 6" in again.log()
        assert (again.folder / "export/step_8/model.safetensors").exists()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_kill_9_of_one_process_ends_all_and_they_resume(place, count):
    with Processes(place, f"killed{count}", count, LONG) as run:
        run.wait_for(6)
        run.wait_for_checkpoint()
        run.running[-1].send_signal(signal.SIGKILL)
        assert run.codes(ENDS_S) == [LOST] * (count - 1) + [-signal.SIGKILL], run.log()
        assert all(f"process {count - 1} sent no heartbeat" in line for line in run.last_lines()[:-1]), run.log()
        before = max(run.steps())
    with Processes(place, f"killed{count}", count, before + 4) as run:
        assert run.codes(180) == [0] * count, run.log()
        assert "continuing after step" in run.log() and run.steps() == list(range(1, before + 5))
        assert next(line["step"] for line in run.metrics() if "held_out_loss" in line) == 4
        assert (run.folder / f"export/step_{before + 4}/model.safetensors").exists()


@pytest.mark.thorough
def test_a_signal_to_one_stops_all_after_the_same_step(place):
    with Processes(place, "told", 2, LONG) as run:
        run.wait_for(2)
        run.running[-1].send_signal(signal.SIGTERM)
        assert run.codes(60) == [PREEMPTED] * 2, run.log()


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 4])
def test_kill_9_of_the_first_ends_all(place, count):
    with Processes(place, f"headless{count}", count, LONG) as run:
        run.wait_for(6)
        run.wait_for_checkpoint()
        run.running[0].send_signal(signal.SIGKILL)
        assert run.codes(ENDS_S) == [-signal.SIGKILL] + [LOST] * (count - 1), run.log()
        assert all("process 0 sent no heartbeat" in line for line in run.last_lines()[1:]), run.log()
    with Processes(place, f"headless{count}", count, max(run.steps()) + 2) as run:
        assert run.codes(180) == [0] * count, run.log()


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_the_error_of_one_is_the_last_line_of_all(place, failing):
    def more(index: int) -> list[str]:
        return ["data.sources=[{path: /nowhere}]"] if index == failing else []

    with Processes(place, f"failing{failing}", 2, LONG, more) as run:
        assert run.codes(120) == [2, 2], run.log()
        for line in run.last_lines():
            assert line.startswith("error:") and "there is no '/nowhere'" in line and f"process {failing} of 2" in line
