"""GRPO on arithmetic, as examples/rl.py has it: a model that has learnt the form of an answer learns the right ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from xla_flags import flags

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
EXAMPLE = Path(__file__).parents[3] / "examples" / "rl.py"


def test_rewards_alone_teach_sums(tmp_path):
    """Run as a user would, on one device whose programs are optimised: it is minutes of computing."""
    environment = os.environ | {"XLA_FLAGS": flags(1, quick=False), "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, str(EXAMPLE), "--run-dir", str(tmp_path)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert told.returncode == 0, told.stderr[-2000:]
    shares = {when: int(share) for when, share in re.findall(r"^(before|after): (\d+)%", told.stdout, re.MULTILINE)}
    assert shares["before"] < 20 and shares["after"] > 70, shares
