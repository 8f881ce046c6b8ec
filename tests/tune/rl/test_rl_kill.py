"""Reinforcement learning killed with -9 amid each of its parts: it ends as the run that nothing disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tune.small_models import metrics
from xla_flags import flags

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "killed_run.py"
KILLS = (("rollout", 2), ("reward", 4), ("train", 5), ("sync", 7))


def start(place: Path, name: str, *kill: object) -> int:
    """The exit code."""
    environment = os.environ | {"XLA_FLAGS": flags(1), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(SCRIPT), str(place), name, *map(str, kill)]
    return subprocess.run(command, env=environment, timeout=240).returncode


def said(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def learnt(folder: Path) -> list[dict]:
    clock = ("rollout_seconds", "reward_seconds", "sync_seconds", "rollout_tokens_per_second")
    return [{name: value for name, value in line.items() if name not in clock} for line in metrics(folder)]


def test_killed_amid_each_part_it_ends_as_if_nothing_had_been(tmp_path):
    assert start(tmp_path, "straight") == 0
    for where, step in KILLS:
        assert start(tmp_path, "killed", where, step) == -signal.SIGKILL, f"not killed in {where} of step {step}"
    assert start(tmp_path, "killed") == 0
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert said(killed) == said(straight)
    for found, expected in zip(learnt(killed), learnt(straight), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), expected["step"]
    for name, expected in load_file(straight / "export/step_7/model.safetensors").items():
        found = load_file(killed / "export/step_7/model.safetensors")[name]
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)
