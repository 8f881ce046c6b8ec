"""One folder of jobs and several Unix users: what is private, what a group shares, and whose jobs are whose."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.jobs import modes
from dovetail.jobs.store import Store

ALICE, BOB, EVE, LAB = 61101, 61102, 61103, 61200
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as several Unix users")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Which every user can reach: pytest's own belongs to who runs it."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        (Path(made) / "code").mkdir(mode=0o755)
        (Path(made) / "code" / "say.sh").write_text("echo said\n")
        (Path(made) / "code" / "say.sh").chmod(0o644)
        yield Path(made)


def as_users(home: Path, *turns: tuple[int, int, list[tuple[str, ...]]], umask: str = "022") -> list[list[str]]:
    """What each step of each turn, (uid, gid, steps), printed."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "as_user.py"), umask], input=json.dumps(turns),
        capture_output=True, text=True, cwd=home.parent / "code", check=False,
        env=os.environ | {"DOVETAIL_JOBS": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_root
def test_a_group_shares_a_folder_whatever_the_umask(folder):
    home = folder / "jobs"
    home.mkdir()
    os.chown(home, 0, LAB)
    home.chmod(0o2770)
    (hers,), said, again, (refused,) = as_users(
        home,
        (ALICE, LAB, [("create", "name=hers", "command=sh say.sh", "--json")]),
        (BOB, LAB, [
            ("create", "name=his", "command=sh say.sh", "--json"), ("queue", "add", "q", "--name", "t", "id -u"),
            ("queue", "work", "q"), ("list",), ("show", "hers"), ("logs", "hers"), ("delete", "hers", "--yes"),
            ("cancel", "hers"),
        ]),
        (ALICE, LAB, [("queue", "add", "q", "true"), ("queue", "work", "q"), ("list",)]),
        (EVE, 0, [("list",)]),
        umask="077",
    )  # fmt: skip
    id = json.loads(hers)["id"]
    assert (json.loads(hers)["user"], json.loads(said[0])["user"]) == (str(ALICE), str(BOB))
    assert said[2] == "1 tasks ended here\n" and "hers" in said[3] and f"folder: {home}/jobs/{id}" in said[4]
    assert f"no supervisor of {ALICE} runs" in said[3] and "has 0 attempts" in said[5]
    assert f"is {ALICE}'s, and only {ALICE} may delete it" in said[6] and f"job {id} is cancelled" in said[7]
    assert again[1] == "1 tasks ended here\n" and "his" in again[2] and "is shared by the group" in refused
    for path in (home / "jobs.sqlite", *home.glob("queues/q/*/*"), *home.glob("snapshots/*")):
        assert mode(path) == 0o660 and path.stat().st_gid == LAB
    for path in (home / "jobs", home / "jobs" / id, home / "queues/q/1"):
        assert mode(path) == 0o2770 and path.stat().st_gid == LAB


@needs_root
def test_a_folder_that_is_not_shared_says_so_in_a_sentence_and_can_be_shared(folder):
    home = folder / "jobs"
    home.mkdir(mode=0o755)
    os.chown(home, ALICE, ALICE)
    _, _, (said,), _, _, worked = as_users(
        home,
        (ALICE, LAB, [("queue", "add", "q", "true")]),
        (0, 0, [("chmod", "777", str(home))]),  # even where the folder itself could be written, the store is hers
        (BOB, LAB, [("list",)]),
        (0, 0, [("chgrp", str(LAB), str(home)), ("chmod", "2770", str(home))]),
        (ALICE, LAB, [("list",)]),  # her next command gives what is there the group and the modes
        (BOB, LAB, [("queue", "work", "q")]),
    )
    assert said.startswith(f"ValueError: {home}/jobs.sqlite belongs to {ALICE} (mode 0600)") and "chmod 2770" in said
    assert worked == ["1 tasks ended here\n"]


def test_a_home_is_private_unless_it_is_shared_on_purpose(tmp_path, store):
    before = os.umask(0)
    try:
        Store(tmp_path / "new").close()
        modes.make_folder(tmp_path / "new" / "jobs" / "a")
        modes.touch(tmp_path / "new" / "jobs" / "a" / "log")
    finally:
        os.umask(before)
    assert [mode(path) for path in (tmp_path / "new", tmp_path / "new/jobs/a")] == [0o700] * 2
    assert [mode(path) for path in (tmp_path / "new/jobs.sqlite", tmp_path / "new/jobs/a/log")] == [0o600] * 2
    (tmp_path / "new/jobs.sqlite").chmod(0o644)  # as an earlier version left it
    Store(tmp_path / "new").close()
    assert mode(tmp_path / "new/jobs.sqlite") == 0o600


def test_each_user_supervises_their_own_jobs(store):
    from dovetail.jobs.spec import make

    spec = make({"name": "x", "command": "true", "code": {"path": ""}})
    mine, theirs = store.add(spec), store.add(spec, user="somebody-else")
    assert [job.id for job in store.active()] == [mine.id] and store.busy_users() == {mine.user, theirs.user}
