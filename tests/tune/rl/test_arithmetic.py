"""GRPO on sums (examples/rl.py): a model that knows the format of an answer learns the correct ones."""

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


def test_rewards_raise_the_share_of_correct_sums(tmp_path):
    """Run the script on one device with compiler optimisation: it takes minutes."""
    environment = os.environ | {"XLA_FLAGS": flags(1, quick=False), "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, str(EXAMPLE), "--run-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = {when: int(share) for when, share in re.findall(r"^(before|after): (\d+)%", done.stdout, re.MULTILINE)}
    assert shares["before"] < 20 and shares["after"] > 70, shares
