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
from tune.rl.killed_run import SCENARIOS
from tune.small_models import metrics
from xla_flags import flags

pytestmark = pytest.mark.slow


def killed_as_said(place: Path, name: str) -> bool:
    """Play a scenario; whether the run that nothing disturbs ended well, and the other after all its kills."""
    environment = os.environ | {"XLA_FLAGS": flags(1), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, killed_run.__file__, str(place), name]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=1200)
    kills = SCENARIOS[name].kills
    return json.loads(told.stdout.splitlines()[-1]) == [0, *(-signal.SIGKILL for _ in kills), 0]


def weights(place: Path, run: str, name: str) -> dict[str, np.ndarray]:
    return load_file(place / run / f"export/step_{SCENARIOS[name].steps}/model.safetensors")


def said(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def learnt(folder: Path) -> list[dict]:
    clock = ("rollout_seconds", "reward_seconds", "sync_seconds", "rollout_tokens_per_second")
    return [{name: value for name, value in line.items() if name not in clock} for line in metrics(folder)]


def test_killed_amid_each_part_it_ends_as_if_nothing_had_been(tmp_path):
    assert killed_as_said(tmp_path, "one update")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert said(killed) == said(straight)
    for found, expected in zip(learnt(killed), learnt(straight), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), expected["step"]
    found = weights(tmp_path, "killed", "one update")
    for name, expected in weights(tmp_path, "straight", "one update").items():
        np.testing.assert_allclose(found[name], expected, atol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_killed_between_the_updates_of_a_rollout_it_ends_bit_for_bit_the_same(tmp_path):
    """Ratios, values and returns of later updates are to the policy before the first, which no checkpoint holds."""
    assert killed_as_said(tmp_path, "several passes")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert said(killed) == said(straight)
    assert learnt(killed) == learnt(straight) and len({line["loss"] for line in learnt(straight)}) == 8
    found = weights(tmp_path, "killed", "several passes")
    for name, expected in weights(tmp_path, "straight", "several passes").items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
