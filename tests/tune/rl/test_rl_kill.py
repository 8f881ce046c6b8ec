"""An RL run that is killed with SIGKILL in every part of a step ends like one that is not."""

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


def finishes_after_kills(place: Path, name: str) -> bool:
    """Run a scenario; return whether both runs finished and every kill happened."""
    environment = os.environ | {"XLA_FLAGS": flags(1), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, killed_run.__file__, str(place), name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=1200)
    kills = SCENARIOS[name].kills
    return json.loads(done.stdout.splitlines()[-1]) == [0, *(-signal.SIGKILL for _ in kills), 0]


def weights(place: Path, run: str, name: str) -> dict[str, np.ndarray]:
    return load_file(place / run / f"export/step_{SCENARIOS[name].steps}/model.safetensors")


def completions(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def metrics_without_times(folder: Path) -> list[dict]:
    clock = ("rollout_seconds", "reward_seconds", "sync_seconds", "rollout_tokens_per_second")
    clock += ("drafter_seconds", "accepted_length", "seconds_saved")  # of completions that are sampled again only
    return [{name: value for name, value in line.items() if name not in clock} for line in metrics(folder)]


@pytest.mark.parametrize("scenario", ["one update", "speculation", pytest.param("drafter", marks=pytest.mark.thorough)])
def test_a_run_killed_in_every_part_ends_the_same(tmp_path, scenario):
    assert finishes_after_kills(tmp_path, scenario)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert completions(killed) == completions(straight)
    for found, expected in zip(metrics_without_times(killed), metrics_without_times(straight), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), expected["step"]
    found = weights(tmp_path, "killed", scenario)
    for name, expected in weights(tmp_path, "straight", scenario).items():
        # the sampler's log-probabilities differ in their last bits between steps of different shapes
        np.testing.assert_allclose(found[name], expected, atol=5e-5, err_msg=name)
    drafted = [line for line in metrics(straight) if line.get("accepted_length", 0) > 1]
    assert bool(drafted) == (scenario != "one update")


@pytest.mark.thorough
def test_a_run_killed_between_updates_of_a_rollout_ends_bit_for_bit_the_same(tmp_path):
    """Later updates need the policy before the first one, which no checkpoint has: the journal has its scores."""
    assert finishes_after_kills(tmp_path, "several passes")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert completions(killed) == completions(straight)
    assert (
        metrics_without_times(killed) == metrics_without_times(straight)
        and len({line["loss"] for line in metrics_without_times(straight)}) == 8
    )
    found = weights(tmp_path, "killed", "several passes")
    for name, expected in weights(tmp_path, "straight", "several passes").items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
