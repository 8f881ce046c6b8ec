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
from tune.rl import killed_run
from tune.rl.killed_run import KILLS, STEPS
from tune.small_models import metrics
from xla_flags import flags

pytestmark = pytest.mark.slow


def exit_codes(place: Path) -> list[int]:
    """Of the run that nothing disturbs, of the other as it is killed, and when it is not."""
    environment = os.environ | {"XLA_FLAGS": flags(1), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, killed_run.__file__, str(place)]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=600)
    return json.loads(told.stdout.splitlines()[-1])


def said(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def learnt(folder: Path) -> list[dict]:
    clock = ("rollout_seconds", "reward_seconds", "sync_seconds", "rollout_tokens_per_second")
    return [{name: value for name, value in line.items() if name not in clock} for line in metrics(folder)]


def test_killed_amid_each_part_it_ends_as_if_nothing_had_been(tmp_path):
    assert exit_codes(tmp_path) == [0, *(-signal.SIGKILL for _ in KILLS), 0]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert said(killed) == said(straight)
    for found, expected in zip(learnt(killed), learnt(straight), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), expected["step"]
    for name, expected in load_file(straight / f"export/step_{STEPS}/model.safetensors").items():
        found = load_file(killed / f"export/step_{STEPS}/model.safetensors")[name]
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)
