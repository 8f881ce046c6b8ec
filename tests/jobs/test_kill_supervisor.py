"""kill -9 of the supervisor at every point, then a restart: the same end, and nothing is made twice or leaked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def ends(folder: Path, stride: int) -> list[dict]:
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    done = subprocess.run(
        [sys.executable, str(HERE / "killed.py"), str(folder), str(stride)], capture_output=True, text=True,
        check=False, timeout=300, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(folder: Path, stride: int) -> None:
    whole, *killed = ends(folder, stride)
    assert whole["end"]["jobs"] == {
        "train": ["succeeded", 4, 2, 1, 0, "preemption", "fault", "preemption", "success"],
        "bug": ["failed", 2, 0, 0, 2, "failure", "failure"],
        "cancel": ["cancelled", 1, 0, 0, 0, "stopped"],
    }
    assert whole["end"]["open"] == [] and whole["end"]["held"] == []
    assert set(whole["end"]["made"].values()) == {1}
    assert len(killed) >= whole["points"] // stride
    for one in killed:
        assert one["killed"] == -9 and one["again"] == 0, one
        assert one["end"] == whole["end"], f"killed at point {one['at']} of {whole['points']}"


def test_killed_at_many_points_it_ends_the_same(tmp_path):
    check(tmp_path, 13)


@pytest.mark.thorough
def test_killed_at_every_point_it_ends_the_same(tmp_path):
    check(tmp_path, 1)
