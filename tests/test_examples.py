"""The scripts of examples/ as a user runs them; each takes minutes, most use SmolLM2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from xla_flags import flags

pytestmark = pytest.mark.thorough
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, tmp_path: Path, *more: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--run-dir", str(tmp_path), *more]
    env = os.environ | {"XLA_FLAGS": flags(1, quick=False)}  # one device, as most who try them have
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800, env=env)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def test_sft_teaches_a_form_that_the_model_does_not_know(tmp_path):
    before, after = (int(share) for share in re.findall(r"(\d+)% of the answers", run("sft.py", tmp_path)))
    assert before < 10 and after > 90


def test_dpo_turns_a_preference_around(tmp_path):
    share, margin = re.findall(r"(\d+)% are in the right order, by (-?[\d.]+)", run("dpo.py", tmp_path))[0]
    assert int(share) == 100 and float(margin) > 0.5


def test_distillation_lowers_the_students_divergence(tmp_path):
    first = run("distill.py", tmp_path / "one", "--steps", "1")
    last = run("distill.py", tmp_path / "many")
    apart = [float(re.findall(r"from the teacher: ([\d.]+)", text)[0]) for text in (first, last)]
    assert apart[1] < 0.5 * apart[0]


@pytest.mark.parametrize("name", ["rl_calculator", "rl_grid", "rl_repair"])
def test_an_agent_learns_from_rewards(name, tmp_path):
    first, last = (int(share) for share in re.findall(r"(\d+)%", run(f"{name}.py", tmp_path).splitlines()[-1]))
    assert last > first + 12
