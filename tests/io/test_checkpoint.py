"""Checkpoints are whole or not there, exactly what was saved or not used, and never what stops a run."""

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.io.checkpoint import Checkpoints
from dovetail.io.checkpoint_tier import kept
from dovetail.io.digest import digest

# Of a damaged checkpoint's other reads tensorstore tells an event loop that Orbax has closed by then.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: dict
    moments: tuple
    step: jax.Array


def state(step: int, rows: int = 64) -> State:
    """Every value follows from the step, so that what is read back says which step wrote it."""
    wave = jnp.sin(jnp.arange(rows * 32, dtype=jnp.float32) + step).reshape(rows, 32)
    layers = tuple({"q": wave * (i + 1), "norm": wave[:, 0].astype(jnp.bfloat16)} for i in range(2))
    return State({"layers": layers, "on": wave[0] > 0}, (wave + 1, None, ()), jnp.int32(step))


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:devices]), ("x",))


def target(like: Any, devices: int = 1) -> Any:
    """The same tree to restore into, its rows split over so many devices."""
    mesh = mesh_of(devices)

    def place(x):
        spec = PartitionSpec("x") if x.ndim and x.shape[0] % devices == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, like)


def exact(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.fixture
def problems():
    return []


@pytest.fixture
def open_at(tmp_path, problems):
    """Checkpoints in tmp_path; all are closed at the end."""
    opened = []

    def make(name="run", **options) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / name, on_problem=problems.append, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def saved(checkpoints: Checkpoints, *steps: int, **options) -> Checkpoints:
    for step in steps:
        checkpoints.save(step, state(step), {"cursor": step * 10}, **options)
    checkpoints.wait()
    return checkpoints


def data_files(folder):
    """The array data of a checkpoint, largest first."""
    return sorted(folder.glob("ocdbt.process_*/d/*"), key=lambda path: -path.stat().st_size)


# --- save and restore -------------------------------------------------------------------------------------------------


def test_what_is_restored_is_bitwise_what_was_saved_with_its_meta(open_at, problems):
    meta = {"cursor": 12, "skipped": [3, 4], "recipe": "abc", "seed": 7, "versions": {"jax": "0.10"}}
    checkpoints = open_at()
    assert checkpoints.latest() is None and checkpoints.steps() == []
    checkpoints.save(5, state(5), meta)
    got, got_meta, step = checkpoints.restore(target(state(0)))
    assert step == 5 and got_meta == meta and exact(got, state(5)) and problems == []
    assert open_at().latest() == 5


def test_nan_and_negative_zero_keep_their_bits(open_at):
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0x7F800000, 0x00000001, 0x00000000], np.uint32)
    odd = {"x": jnp.asarray(bits.view(np.float32)), "y": jnp.asarray(bits.view(np.uint16)).view(jnp.bfloat16)}
    checkpoints = open_at()
    checkpoints.save(1, odd, {})
    assert exact(checkpoints.restore(target(odd))[0], odd)


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_restore_is_onto_any_mesh(open_at, devices):
    split = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), state(3), target(state(3), 2))
    checkpoints = open_at()
    checkpoints.save(3, split, {})
    got, _, _ = checkpoints.restore(target(state(3), devices))
    assert exact(got, state(3))
    assert len(got.params["layers"][0]["q"].sharding.device_set) == devices


def test_a_digest_is_the_same_on_any_mesh_and_sees_every_bit():
    x = state(1).moments[0]
    spread = jax.device_put(x, NamedSharding(mesh_of(4), PartitionSpec("x")))
    assert int(digest(x)) == int(digest(spread))
    flipped = np.array(x)
    for bit in (0, 1, 15, 31):
        flipped.view(np.uint32)[7, 3] ^= 1 << bit
        assert int(digest(jnp.asarray(flipped))) != int(digest(x))
        flipped.view(np.uint32)[7, 3] ^= 1 << bit
    assert int(digest(x[::-1])) != int(digest(x)), "the order counts"


@pytest.mark.parametrize("devices", [1, 4])
def test_arrays_may_be_donated_as_soon_as_save_returns(open_at, devices):
    """Several megabytes, so that the write is still under way when the buffers are overwritten."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    place = target({"a": jnp.zeros((1024, 512)), "b": jnp.zeros((2048, 512))}, devices)
    checkpoints = open_at()
    for step in range(3):
        big = jax.tree.map(lambda t, s=step: jax.device_put(jnp.full(t.shape, s + 0.5), t.sharding), place)
        checkpoints.save(step, big, {})
        big = overwrite(overwrite(big))
        jax.block_until_ready(big)
        got, _, at = checkpoints.restore(place)
        assert at == step and all(bool((leaf == step + 0.5).all()) for leaf in jax.tree.leaves(got))


def test_the_callers_meta_may_change_after_save(open_at):
    checkpoints, meta = open_at(), {"skipped": [1]}
    checkpoints.save(1, state(1), meta)
    meta["skipped"].append(2)
    assert checkpoints.restore(target(state(1)))[1] == {"skipped": [1]}


def test_saving_a_step_again_replaces_it(open_at):
    checkpoints = saved(open_at(), 4)
    checkpoints.save(4, state(40), {"cursor": 1})
    got, meta, step = checkpoints.restore(target(state(0)))
    assert step == 4 and meta == {"cursor": 1} and exact(got, state(40)) and checkpoints.steps() == [4]


def test_another_models_checkpoint_is_an_error_and_not_damage(open_at, problems):
    checkpoints = saved(open_at(), 1)
    with pytest.raises(ValueError, match=r"params\.layers\.0\.norm is bfloat16\[64\] .* bfloat16\[32\] in this run"):
        checkpoints.restore(target(state(1, rows=32)))
    with pytest.raises(ValueError, match=r"the checkpoint has moments\.0 and this run does not"):
        checkpoints.restore(target({"params": state(1).params, "step": jnp.int32(0)}))
    assert problems == []


def test_bad_arguments_are_refused(open_at, tmp_path):
    with pytest.raises(ValueError, match="keep must be"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="belong together"):
        Checkpoints(tmp_path, durable="x")
    checkpoints = open_at()
    with pytest.raises(ValueError, match=r"meta must be JSON"):
        checkpoints.save(1, state(1), {"x": object()})
    with pytest.raises(ValueError, match=r"jax arrays; step is int"):
        checkpoints.save(1, {"step": 3}, {})
    with pytest.raises(ValueError, match=r"no durable folder"):
        checkpoints.save(1, state(1), {}, durable=True)
    with pytest.raises(ValueError, match=r"has no sharding"):
        checkpoints.restore({"x": jax.ShapeDtypeStruct((1,), jnp.float32)})
    with pytest.raises(OSError, match="no good checkpoint"):
        checkpoints.restore(target(state(1)))


# --- retention and tiers ----------------------------------------------------------------------------------------------


def test_the_newest_and_the_milestones_are_kept(open_at):
    assert kept([10, 20, 30, 40, 50], 2, 20) == {20, 40, 50}
    checkpoints = saved(open_at(keep=2, keep_every=4), 1, 2, 3, 4, 5, 6, 7)
    assert checkpoints.steps() == [4, 6, 7]


def test_two_tiers_each_with_its_own_retention_and_the_newest_of_both_is_taken(open_at, tmp_path):
    options = {"durable": str(tmp_path / "durable"), "durable_every": 4, "keep": 2}
    checkpoints = saved(open_at(**options), 1, 2, 3, 4, 5, 6)
    names = {tier: sorted(p.name for p in (tmp_path / tier).glob("step*")) for tier in ("run", "durable")}
    assert names == {"run": ["step_5", "step_6"], "durable": ["step_4"]}
    assert checkpoints.restore(target(state(0)))[2] == 6
    shutil.rmtree(tmp_path / "run")  # the machine with the fast disk is gone
    got, _, step = open_at(**options).restore(target(state(0)))
    assert step == 4 and exact(got, state(4))


def test_a_durable_copy_can_be_asked_for(open_at, tmp_path):
    saved(open_at(durable=str(tmp_path / "durable"), durable_every=100), 7, durable=True)
    assert (tmp_path / "durable" / "step_7" / "manifest.json").exists()


def test_the_durable_copy_stands_in_for_a_damaged_local_one(open_at, tmp_path, problems):
    checkpoints = saved(open_at(durable=str(tmp_path / "durable"), durable_every=2), 1, 2)
    cut(tmp_path / "run" / "step_2")
    got, _, step = checkpoints.restore(target(state(0)))
    assert step == 2 and exact(got, state(2)) and len(problems) == 1


def test_after_going_back_later_steps_are_dropped_once_a_new_one_is_whole(open_at, tmp_path):
    options = {"durable": str(tmp_path / "durable"), "durable_every": 30, "keep": 1, "keep_every": 10}
    checkpoints = saved(open_at(**options), 10, 20, 30)
    assert checkpoints.restore(target(state(0)), step=10)[2] == 10
    assert checkpoints.steps() == [10, 20, 30], "reading removes nothing"
    assert saved(checkpoints, 15).steps() == [10, 15]


# --- damage -----------------------------------------------------------------------------------------------------------


def cut(folder):
    with data_files(folder)[0].open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)


def flip(folder, place=None):
    path = data_files(folder)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 4
    path.write_bytes(content)


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
def test_a_damaged_newest_gives_way_to_the_one_before(open_at, tmp_path, problems, damage):
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


def test_when_all_are_damaged_it_says_so_and_does_not_start_anew(open_at, tmp_path):
    checkpoints = saved(open_at(), 1, 2)
    flip(tmp_path / "run" / "step_1")
    cut(tmp_path / "run" / "step_2")
    with pytest.raises(OSError, match=r"no good checkpoint.*step 2.*bytes.*step 1.*bits of"):
        checkpoints.restore(target(state(0)))
    with pytest.raises(OSError, match=r"no good checkpoint of step 1"):
        checkpoints.restore(target(state(0)), step=1)


def test_a_damaged_one_does_not_push_a_good_one_out(open_at, tmp_path):
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


# Orbax closes its event loop at the first error, while tensorstore still has others to tell it of.
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
    assert len(problems) == 2 and all("no space is left" in p for p in problems), problems
    assert checkpoints.steps() == [1], checkpoints.steps()
    assert [p.name for p in (disk / "run").glob("step*")] == ["step_1"], list((disk / "run").iterdir())
    ballast.unlink()
    save(4)
    assert checkpoints.steps() == [4] and len(problems) == 2
    print("survived")
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 40_000, 1_000_000])
def test_a_full_disk(tmp_path, room):
    """A disk of 16 MiB in a mount namespace of its own, with `room` bytes left when the second save begins."""
    mount = 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    command = [*inside, sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path), str(room)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.stdout == "survived\n", found.stderr[-3000:]


# --- kill -9, and several processes -----------------------------------------------------------------------------------

SAVE_FOREVER = """
    import itertools, sys
    sys.path.insert(0, sys.argv[2])
    from test_checkpoint import state
    from dovetail.io.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1], keep=2)
    for step in itertools.count((checkpoints.latest() or 0) + 1):
        checkpoints.save(step, state(step, rows=4096), {"cursor": step})
        print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_during_save_leaves_the_last_good_one(tmp_path, open_at, problems):
    draw, last = random.Random(5), 0
    command = [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(tmp_path / "run"), os.path.dirname(__file__)]
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for _ in range(3):
                begun = int(process.stdout.readline())
            time.sleep(draw.random() * 0.3)
            process.send_signal(signal.SIGKILL)
            begun = int((process.stdout.read().split() or [begun])[-1])
        got, meta, step = open_at().restore(target(state(0, rows=4096)))
        assert begun - 1 <= step <= begun + 1 and step > last, "at most the save under way is lost"
        assert meta == {"cursor": step} and exact(got, state(step, rows=4096))
        last = step
    assert problems == []


TWO_PROCESSES = """
    import resource, sys
    import jax
    process, port, folder, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    sys.path.insert(0, tests)
    import pathlib
    from test_checkpoint import Checkpoints, flip, state, target
    problems = []
    checkpoints = Checkpoints(folder, keep=2, on_problem=problems.append)
    assert checkpoints.latest() == 5
    def held(got, step):  # each process can compare only what it holds
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state(step))):
            assert all(bool((s.data == jax.device_get(b)[s.index]).all()) for s in a.addressable_shards)
    again, meta, step = checkpoints.restore(target(state(0), 4))
    held(again, 5); assert (meta, step) == ({"cursor": 50}, 5)
    for step in (6, 7, 8):
        checkpoints.save(step, again, {"cursor": step})
    checkpoints.wait()
    assert not problems, problems
    if process == 0:
        assert checkpoints.steps() == [7, 8]
        flip(pathlib.Path(folder) / "step_8")
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("damaged")
    again, meta, step = checkpoints.restore(target(state(0), 4))
    held(again, 5); assert step == 7 and len(problems) == 1, (step, problems)
    problems.clear()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process == 1:  # one of the two cannot write; the other must not wait for it
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    checkpoints.save(9, again, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(problems) == 1 and "step 9 was not written" in problems[0], problems
    assert checkpoints.latest() == 8
    checkpoints.save(10, again, {})
    checkpoints.wait()
    assert checkpoints.latest() == 10 and len(problems) == 1
    checkpoints.close()
    print("agreed", flush=True)
"""


@pytest.mark.slow
def test_two_processes_save_and_restore_what_one_saved(tmp_path, open_at):
    saved(open_at(), 5).close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    arguments = [port, str(tmp_path / "run"), os.path.dirname(__file__)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), str(i), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert all(out.endswith("agreed\n") for out, _ in outputs), "\n---\n".join(err[-2500:] for _, err in outputs)
    got, _, step = open_at().restore(target(state(0)), step=7)  # and one process reads what two wrote
    assert step == 7 and exact(got, state(5))
