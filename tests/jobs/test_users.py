"""Test one folder of jobs with several Unix users: privacy, sharing by group, and ownership."""

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

from dovetail.jobs import files
from dovetail.jobs.store import JobStore

pytestmark = pytest.mark.slow

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


def shared(folder: Path) -> Path:
    """Make a folder of jobs that the group LAB shares."""
    home = folder / "jobs"
    home.mkdir()
    os.chown(home, 0, LAB)
    home.chmod(0o2770)
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_root
def test_a_group_shares_a_folder_under_any_umask(folder):
    home = shared(folder)
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
    assert f"only {ALICE} may delete job {id}" in said[6] and f"job {id} is cancelled" in said[7]
    assert again[1] == "1 tasks ended here\n" and "his" in again[2] and "The group" in refused
    for path in (home / "jobs.sqlite", *home.glob("queues/q/*/*")):
        assert mode(path) == 0o660 and path.stat().st_gid == LAB
    modes = {home / "jobs": 0o3770, home / "queues/q/1": 0o2770, home / "jobs" / id: 0o3750}
    modes |= {home / f"snapshots.{ALICE}": 0o3750, home / "jobs" / id / "asked.yaml": 0o640}
    for path, expected in modes.items():
        assert mode(path) == expected and path.stat().st_gid == LAB


@needs_root
def test_a_spec_changed_by_another_user_is_not_run(folder):
    """By a command, in the files, and in the tables, which every user of the store can write."""
    home = shared(folder)
    spec = '{name: x, command: id, code: {path: ""}}'
    forged = (
        'INSERT INTO jobs (id, name, "user", backend, accelerator, status, created, changed, site) '
        "SELECT '{0}', 'forged', \"user\", backend, accelerator, 'queued', created, changed, site FROM jobs LIMIT 1"
    )
    made, said, _, shown = as_users(
        home,
        (ALICE, LAB, [("create", "name=hers", "command=sh say.sh", "--json"), ("cancel", "hers"), ("tick",)]),
        (BOB, LAB, [
            ("resume", "hers", "command=id"), ("resume", "hers", "notify=id"),
            ("!", "sh", "-c", f"cd {home}/jobs/*/ && echo >> asked.yaml"),
            ("!", "sh", "-c", f"cd {home}/jobs/*/ && touch new"),
            ("!", "sh", "-c", f"mv {home}/jobs/* {home}/away"),
            ("!", "sh", "-c", f"echo >> {home}/snapshots.{ALICE}/*"),
            ("!", "sh", "-c", f"cat {home}/jobs/*/asked.yaml"),
            ("sql", forged.format("forged")), ("sql", f"INSERT INTO specs VALUES ('forged', '{spec}')"),
            ("sql", forged.format("../../forged")), ("sql", f"INSERT INTO specs VALUES ('../../forged', '{spec}')"),
            ("resume", "hers"),
            ("sql", "UPDATE specs SET text = replace(text, 'sh say.sh', 'sh evil.sh')"),
        ]),
        (ALICE, LAB, [("tick",)]),
        (ALICE, LAB, [("list", "--json"), ("resume", "hers")]),
    )  # fmt: skip
    id = json.loads(made[0])["id"]
    assert all(f"so only {ALICE} may change its spec" in one for one in said[:2]), said
    assert all(one[0] != "0" and ("denied" in one or "not permitted" in one) for one in said[2:6]), said
    assert said[6].startswith("0 # code:") and "is queued" in said[11], "the group may read, and run it again as it is"
    found = {job["id"]: job for job in json.loads(shown[0])}
    assert found[id]["status"] == found["forged"]["status"] == "failed", found
    assert f"differs from the one that {ALICE} requested" in found[id]["detail"] and "differs from" in shown[1]
    assert f"no asked.yaml of {ALICE}" in found["forged"]["detail"]
    assert found["../../forged"]["status"] in ("queued", "error", "failed") and not (folder / "forged").exists()
    assert not list(home.glob("jobs/*/attempts/*/script.sh"))


@needs_root
def test_a_private_folder_is_refused_to_others_and_can_be_shared(folder):
    home = folder / "jobs"
    home.mkdir(mode=0o755)
    os.chown(home, ALICE, ALICE)
    _, _, (said,), _, _, worked = as_users(
        home,
        (ALICE, LAB, [("queue", "add", "q", "true")]),
        (0, 0, [("chmod", "777", str(home))]),  # even where the folder itself could be written, the store is hers
        (BOB, LAB, [("list",)]),
        (0, 0, [("chgrp", str(LAB), str(home)), ("chmod", "2770", str(home))]),
        (ALICE, LAB, [("list",)]),  # her next command sets the group and modes of existing files
        (BOB, LAB, [("queue", "work", "q")]),
    )
    assert (
        said.startswith(f"NotPermittedError: {home}/jobs.sqlite belongs to {ALICE} (mode 0600)")
        and "chmod 3770" in said
    )
    assert worked == ["1 tasks ended here\n"]


def test_a_home_is_private_unless_it_is_shared_on_purpose(tmp_path, store):
    before = os.umask(0)
    try:
        JobStore(tmp_path / "new").close()
        files.make_folder(tmp_path / "new" / "jobs" / "a")
        files.touch(tmp_path / "new" / "jobs" / "a" / "log")
    finally:
        os.umask(before)
    assert [mode(path) for path in (tmp_path / "new", tmp_path / "new/jobs/a")] == [0o700] * 2
    assert [mode(path) for path in (tmp_path / "new/jobs.sqlite", tmp_path / "new/jobs/a/log")] == [0o600] * 2
    (tmp_path / "new/jobs.sqlite").chmod(0o644)  # as an earlier version left it
    JobStore(tmp_path / "new").close()
    assert mode(tmp_path / "new/jobs.sqlite") == 0o600


def test_each_user_supervises_their_own_jobs(store):
    from dovetail.jobs.spec import make

    spec = make({"name": "x", "command": "true", "code": {"path": ""}})
    mine, theirs = store.add(spec), store.add(spec, user="somebody-else")
    assert [job.id for job in store.active()] == [mine.id] and store.busy_users() == {mine.user, theirs.user}
