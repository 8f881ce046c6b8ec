"""Test that fine-tuning killed with -9 resumes bitwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tune.small_models import chats, metrics, model_folder, pairs
from xla_flags import flags

pytestmark = pytest.mark.slow
STEPS = 40
OVERRIDES = [
    "batch=2", "length=48", f"steps={STEPS}", "checkpoint.every=4", "checkpoint.keep=20", "precision.compute=f32",
    "lora.r=4", "lora.lora_dropout=0.1",
]  # fmt: skip
RECORDS = {"sft": chats, "dpo": pairs}


def start(kind: str, place: Path, folder: Path) -> subprocess.Popen:
    data = place / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[kind]()))
    environment = os.environ | {"DOVETAIL_HOME": str(place / "home"), "XLA_FLAGS": flags(1)}
    own = [f"model={model_folder(place)}", f"data.path={data}", *OVERRIDES, "--run-dir", str(folder)]
    with (place / f"{folder.name}.log").open("a") as log:
        command = [sys.executable, "-m", "dovetail", kind, *own]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finish(process: subprocess.Popen, folder: Path) -> dict[str, np.ndarray]:
    assert process.wait(timeout=240) == 0, folder.with_suffix(".log").read_text()[-2000:]
    return load_file(folder / f"export/step_{STEPS}/adapter_model.safetensors")


def steps(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_killed_run_resumes_bitwise(kind, tmp_path):
    straight, killed = tmp_path / f"{kind}-straight", tmp_path / f"{kind}-killed"
    expected = finish(start(kind, tmp_path, straight), straight)
    process = start(kind, tmp_path, killed)
    while len(steps(killed)) < 9 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "export").exists()
    found = finish(start(kind, tmp_path, killed), killed)
    assert "continuing after step" in killed.with_suffix(".log").read_text()
    assert metrics(killed) == metrics(straight)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
