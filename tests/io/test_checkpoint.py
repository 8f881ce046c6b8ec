"""Checkpoints restore the saved state exactly on any mesh, and the requested number is kept."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import cut, exact, mesh_of, saved, state, target
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refuses

from dovetail.core.errors import CheckpointError, FileError
from dovetail.io.checkpoint import Checkpoints
from dovetail.io.checkpoint_tier import steps_to_keep
from dovetail.io.manifest import digest

# tensorstore reports a damaged checkpoint's other reads to an event loop that Orbax has closed by then.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
]


# --- save and restore -------------------------------------------------------------------------------------------------


def test_a_restored_state_is_bitwise_what_was_saved_with_its_meta(open_at, problems):
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


def test_a_checkpoint_of_another_model_is_an_error_not_damage(open_at, problems):
    checkpoints = saved(open_at(), 1)
    with pytest.raises(
        CheckpointError, match=r"params\.layers\.0\.norm is bfloat16\[64\] .* bfloat16\[32\] in this run"
    ):
        checkpoints.restore(target(state(1, rows=32)))
    with refuses(None, CheckpointError, naming="moments.0"):
        checkpoints.restore(target({"params": state(1).params, "step": jnp.int32(0)}))
    assert problems == []


def test_bad_arguments_are_refused(open_at, tmp_path):
    with refuses("keep"):
        Checkpoints(tmp_path, keep=0)
    with refuses("durable"):
        Checkpoints(tmp_path, durable="x")
    checkpoints = open_at()
    with refuses("meta"):
        checkpoints.save(1, state(1), {"x": object()})
    with refuses("state"):
        checkpoints.save(1, {"step": 3}, {})
    with refuses("durable"):
        checkpoints.save(1, state(1), {}, durable=True)
    with refuses():
        checkpoints.restore({"x": jax.ShapeDtypeStruct((1,), jnp.float32)})
    with refuses(None, FileError):
        checkpoints.restore(target(state(1)))


# --- retention and tiers ----------------------------------------------------------------------------------------------


def test_the_newest_and_the_milestones_are_kept(open_at):
    assert steps_to_keep([10, 20, 30, 40, 50], 2, 20) == {20, 40, 50}
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
