"""Kill -9 the supervisor at every point and restart it: same end, nothing created twice or leaked."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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
        "train": ["succeeded", 3, 1, 1, 0, "preemption", "fault", "success"],
        "bug": ["failed", 1, 0, 0, 1, "failure"],
        "cancel": ["cancelled", 1, 0, 0, 0, "stopped"],
    }
    assert whole["end"]["open"] == [] and whole["end"]["held"] == []
    assert set(whole["end"]["made"].values()) == {1}
    assert len(killed) >= whole["points"] // stride
    for one in killed:
        assert one["killed"] == -9 and one["again"] == 0, one
        assert one["end"] == whole["end"], f"killed at point {one['at']} of {whole['points']}"


def test_a_supervisor_killed_at_any_point_ends_in_the_same_state():
    memory = "/dev/shm"  # hundreds of short lives, whose files need not reach a disk
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        check(Path(folder), 1)
