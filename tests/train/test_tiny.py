"""Test that the recipe `tiny` reaches the loss that docs/pretraining.md states."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from xla_flags import flags


@pytest.mark.thorough  # a minute
def test_tiny_reaches_its_stated_loss(tmp_path):
    command = [sys.executable, "-m", "dovetail", "pretrain", "tiny", "--run-dir", str(tmp_path / "run")]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags(1, quick=False)}, check=True, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    held_out = [line["held_out_loss"] for line in lines if line.get("kind") == "eval"]
    assert len(held_out) == 4 and held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < 0.8  # nats a byte; 0.72 where it was written
