"""Damaged or half-written checkpoints and full disks: none is restored from, none stops a run."""

import random
import resource
import shutil
import subprocess
import sys
import textwrap

import pytest
from checkpoint_cases import cut, data_files, exact, flip, saved, state, target
from refusals import refuses

from dovetail.core.errors import FileError

# tensorstore reports a damaged checkpoint's other reads to an event loop that Orbax has closed by then.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
]


# --- damage -----------------------------------------------------------------------------------------------------------


def lose(folder):
    data_files(folder)[0].unlink()


def spoil_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"cursor": 30', '"cursor": 31'))


def empty_manifest(folder):
    (folder / "manifest.json").write_text("")


def spoil_metadata(folder):
    (folder / "_METADATA").write_bytes((folder / "_METADATA").read_bytes().replace(b"layers", b"player"))


DAMAGES = [cut, flip, lose, spoil_manifest, empty_manifest, spoil_metadata]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(open_at, tmp_path, problems, damage):
    checkpoints = saved(open_at(), 1, 2, 3)
    damage(tmp_path / "run" / "step_3")
    got, meta, step = checkpoints.restore(target(state(0)))
    assert step == 2 and meta == {"cursor": 20} and exact(got, state(2))
    assert len(problems) == 1 and "step 3" in problems[0] and "damaged" in problems[0]


def test_a_flipped_bit_anywhere_in_the_data_never_gives_wrong_weights(open_at, tmp_path):
    checkpoints, draw = saved(open_at(), 1, 2), random.Random(0)
    pristine, newest = tmp_path / "pristine", tmp_path / "run" / "step_2"
    shutil.copytree(newest, pristine)
    for _ in range(12):
        path = draw.choice([p for p in newest.rglob("*") if p.is_file() and p.stat().st_size])
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        got, _, step = checkpoints.restore(target(state(0)))
        assert exact(got, state(step)), path
        shutil.rmtree(newest)
        shutil.copytree(pristine, newest)


def test_restore_fails_when_all_checkpoints_are_damaged(open_at, tmp_path):
    checkpoints = saved(open_at(), 1, 2)
    flip(tmp_path / "run" / "step_1")
    cut(tmp_path / "run" / "step_2")
    with pytest.raises(FileError, match=r"no good checkpoint.*step 2.*bytes.*step 1.*bits of"):
        checkpoints.restore(target(state(0)))
    with refuses(None, FileError, naming="step 1"):
        checkpoints.restore(target(state(0)), step=1)


def test_a_damaged_checkpoint_does_not_evict_a_good_one(open_at, tmp_path):
    checkpoints = saved(open_at(keep=2), 1, 5)
    cut(tmp_path / "run" / "step_5")
    assert checkpoints.restore(target(state(0)))[2] == 1
    assert saved(checkpoints, 6).steps() == [1, 6]
    cut(tmp_path / "run" / "step_6")
    assert checkpoints.restore(target(state(0)))[2] == 1
    assert saved(checkpoints, 2).steps() == [1, 2]
    got, _, step = checkpoints.restore(target(state(0)))
    assert step == 2 and exact(got, state(2))


def test_half_written_ones_are_ignored_and_then_removed(open_at, tmp_path):
    saved(open_at(), 1).close()
    run = tmp_path / "run"
    shutil.copytree(run / "step_1", run / "step_2.orbax-checkpoint-tmp")
    shutil.copytree(run / "step_1", run / "step_3")
    (run / "step_3" / "manifest.json").unlink()
    (run / "notes.txt").write_text("mine")
    again = open_at()
    assert again.steps() == [1] and again.restore(target(state(0)))[2] == 1
    assert (run / "step_3").exists(), "a reader leaves another's writing alone"
    saved(again, 4)
    assert sorted(path.name for path in run.iterdir()) == [".writable", "notes.txt", "step_1", "step_4"]


def test_a_step_set_aside_is_found_when_its_second_save_never_ended(open_at, tmp_path):
    saved(open_at(), 4).close()
    (tmp_path / "run" / "step_4").rename(tmp_path / "run" / "step_4.old")
    again = open_at()
    assert again.restore(target(state(0)))[2] == 4
    assert saved(again, 5).steps() == [4, 5]


# --- a disk that takes no more ----------------------------------------------------------------------------------------


# Orbax closes its event loop at the first error, while tensorstore still has others to report.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_write_is_reported_and_the_next_save_tried(open_at, tmp_path, problems):
    checkpoints = saved(open_at(keep=1), 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))  # no file may grow past this: less than one array
    try:
        saved(checkpoints, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.failures == 1 and checkpoints.steps() == [1]
    assert len(problems) == 1 and "step 2 was not written" in problems[0] and "step 1" in problems[0]
    assert [path.name for path in (tmp_path / "run").glob("step*")] == ["step_1"], "nothing half-written is left"
    saved(checkpoints, 3)
    assert checkpoints.failures == 0 and checkpoints.steps() == [3] and len(problems) == 1
    assert exact(checkpoints.restore(target(state(0)))[0], state(3))


def test_a_folder_that_cannot_be_made_is_reported(open_at, tmp_path, problems):
    (tmp_path / "run").write_text("a file")
    checkpoints = saved(open_at(), 1)
    assert checkpoints.failures == 1 and len(problems) == 1


FULL_DISK = """
    import pathlib, sys
    import jax.numpy as jnp
    from dovetail.io.checkpoint import Checkpoints
    disk = pathlib.Path(sys.argv[1])
    problems = []
    checkpoints = Checkpoints(disk / "run", keep=1, on_problem=problems.append)
    save = lambda step: (checkpoints.save(step, {"x": jnp.full((1 << 20,), float(step))}, {}), checkpoints.wait())
    save(1)
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16)); file.flush()
        except OSError:
            pass
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - int(sys.argv[2]))
    save(2), save(3)
    # Orbax may report the first save's end (its folder is gone) only in the second
    assert len(problems) == 2 and all("was not written" in p for p in problems), problems
    assert "no space is left" in problems[0], problems
    assert checkpoints.steps() == [1], checkpoints.steps()
    assert [p.name for p in (disk / "run").glob("step*")] == ["step_1"], list((disk / "run").iterdir())
    ballast.unlink()
    save(4)
    assert checkpoints.steps() == [4] and len(problems) == 2
    print("survived")
"""


@pytest.mark.parametrize("room", [0, 40_000, 1_000_000])
def test_a_full_disk(tmp_path, room):
    """A disk of 16 MiB in a mount namespace of its own, with `room` bytes left when the second save begins."""
    mount = 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a small disk")
    command = [*inside, sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path), str(room)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.stdout == "survived\n", found.stderr[-3000:]
