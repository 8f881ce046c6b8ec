"""Test the judgement of bad steps on the device and the decision after the replay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.training import Health
from dovetail.train.guard import exits, health
from dovetail.train.guard.doctor import Decision, Doctor, StepResult, disagreement, read

SETTINGS = Health(spike=10.0, warmup=5, max_skips=4, max_rollbacks=1)
STEP = jax.jit(health.judge, static_argnums=3)


def after(pairs, state=None):
    """The verdicts on a run of (loss, grad norm), and the state at its end."""
    state, verdicts = state or health.init(), []
    for loss, norm in pairs:
        ok, state = STEP(state, jnp.float32(loss), jnp.float32(norm), SETTINGS)
        verdicts.append(bool(ok))
    return verdicts, state


def usual(n):
    """An ordinary start: loss falls, the norm wanders within a factor of 2."""
    return [(8.0 - 0.1 * i, 1.5 + math.sin(i)) for i in range(n)]


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# --- judge ------------------------------------------------------------------------------------------------------------


def test_ordinary_steps_are_good():
    verdicts, state = after(usual(60))
    assert all(verdicts) and not state.halted and int(state.count) == 60


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (3.0, math.nan), (math.inf, 1.0), (3.0, math.inf), (-math.inf, 1.0)])
@pytest.mark.parametrize("before", [0, 2, 30])
def test_non_finite_steps_are_bad_and_change_no_statistics(bad, before):
    _, state = after(usual(before))
    (ok,), halted = after([bad], state)
    assert not ok and bool(halted.halted)
    assert same(health.cleared(halted), state)


def test_a_spike_is_bad_only_after_the_warmup():
    assert after([*usual(4), (7.0, 500.0)])[0][-1]
    assert not after([*usual(6), (7.0, 500.0)])[0][-1]


def test_the_norm_is_compared_with_its_geometric_mean():
    steady = [(2.0, 2.0)] * 30
    assert after([*steady, (2.0, 19.9)])[0][-1]
    assert not after([*steady, (2.0, 20.1)])[0][-1]


def test_a_loss_spike_is_bad_and_usual_noise_is_not():
    noisy = [(3.0 + 0.1 * (-1) ** i, 1.0) for i in range(40)]  # mean 3, mean deviation about 0.1: the limit is near 4
    assert after([*noisy, (3.8, 1.0)])[0][-1]
    assert not after([*noisy, (4.3, 1.0)])[0][-1]
    assert after([*noisy, (1.0, 1.0)])[0][-1], "a fall is no fault"


def test_after_a_bad_step_nothing_changes_until_it_is_cleared():
    _, halted = after([*usual(10), (math.nan, 1.0)])
    verdicts, still = after(usual(3), halted)
    assert verdicts == [False] * 3 and same(still, halted)
    assert after(usual(3), health.cleared(halted))[0] == [True] * 3


def test_a_spike_does_not_raise_the_threshold():
    state = after(usual(30))[1]
    for _ in range(5):
        (ok,), halted = after([(5.0, 1e4)], state)
        assert not ok
        assert same(health.cleared(halted), state)


def test_a_batch_without_targets_is_good_and_changes_no_statistics():
    _, state = after(usual(20))
    (ok,), next_state = after([(0.0, 0.0)], state)
    assert ok and same(next_state, state)


def test_the_state_can_be_donated():
    donating = jax.jit(health.judge, static_argnums=3, donate_argnums=0)
    ok, state = donating(health.init(), jnp.float32(1.0), jnp.float32(1.0), SETTINGS)
    assert ok and int(state.count) == 1


# --- checksums --------------------------------------------------------------------------------------------------------

MESH = jax.make_mesh((4, 2), ("data", "fsdp"))
SPECS = {"w": PartitionSpec("fsdp"), "b": PartitionSpec()}


def gradients(flip: int | None = None):
    """A tree over MESH; with `flip`, one bit of device `flip`'s copy of b differs from the other copies."""
    w = jax.device_put(jnp.arange(16, dtype=jnp.float32), NamedSharding(MESH, SPECS["w"]))
    copies = [np.arange(6, dtype=np.float32).reshape(2, 3) for _ in MESH.devices.flat]
    if flip is not None:
        copies[flip].view(np.uint32)[1, 2] ^= 1 << 3  # the last bits of the mantissa: no norm would show it
    sharding = NamedSharding(MESH, SPECS["b"])
    parts = [jax.device_put(copy, device) for copy, device in zip(copies, MESH.devices.flat, strict=True)]
    return {"w": w, "b": jax.make_array_from_single_device_arrays((2, 3), sharding, parts)}


def sums(tree):
    found = jax.jit(lambda t: health.checksums(t, MESH, SPECS))(tree)
    return dict(zip((d.id for d in MESH.devices.flat), np.asarray(found).tolist(), strict=True))


def test_replicas_agree_and_a_flipped_bit_in_one_is_named():
    groups = health.replicas(MESH, SPECS)
    assert sorted(len(g) for g in groups) == [4, 4]
    good, bad = sums(gradients()), sums(gradients(flip=5))
    assert all(disagreement({d: good[d] for d in group}) == [] for group in groups)
    named = [d for group in groups for d in disagreement({d: bad[d] for d in group})]
    assert named == [MESH.devices.flat[5].id]


def test_fully_sharded_values_have_no_replicas():
    assert all(len(g) == 1 for g in health.replicas(MESH, {"w": PartitionSpec(("data", "fsdp"))}))
    assert [len(g) for g in health.replicas(MESH, {"w": PartitionSpec()})] == [8]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_a_checksum_takes_any_type(dtype):
    x = jnp.ones((3, 2), dtype)
    assert int(health.checksum({"x": x})) != int(health.checksum({"x": x.at[0, 0].set(jnp.zeros((), dtype))}))


def test_disagreement_is_with_the_majority():
    assert disagreement({}) == []
    assert disagreement({0: 7, 1: 7, 2: 7}) == []
    assert disagreement({0: 7, 1: 9, 2: 7}) == [1]
    assert disagreement({0: 7, 1: 9}) == [0, 1]  # no majority


# --- the doctor -------------------------------------------------------------------------------------------------------

NAN = StepResult(math.nan, math.nan)


def test_an_equal_replay_blames_the_batch_which_is_skipped(tmp_path):
    doctor = Doctor(SETTINGS, tmp_path)
    verdict = doctor.examine(step=12, batch=13, results=[NAN, NAN], back_to=10)
    assert verdict.decision is Decision.SKIP and verdict.exit_code is None and "batch 13" in verdict.reason
    assert doctor.skips(13) and not doctor.skips(12)
    (record,) = read(tmp_path)
    assert (record["step"], record["batch"], record["what"], record["kind"]) == (12, 13, "skip", "non-finite loss")
    assert record["host"] and record["time"] > 0 and len(record["values"]) == 2
    assert record["values"][0]["loss"] == "nan" and record["values"][0]["loss_bits"] == "7fc00000"


def test_a_different_replay_blames_hardware_and_names_the_device(tmp_path):
    owners = {0: (0, "alpha"), 1: (0, "alpha"), 2: (1, "beta"), 3: (1, "beta")}
    first = StepResult(2.0, 900.0, {0: 5, 1: 6, 2: 7, 3: 8})
    again = StepResult(2.0, 1.0, {0: 5, 1: 6, 2: 70, 3: 8})
    verdict = Doctor(SETTINGS, tmp_path, process=0, owners=owners).examine(3, 3, [first, again], back_to=0)
    assert verdict.decision is Decision.QUARANTINE
    assert (verdict.hosts, verdict.processes, verdict.devices) == (("beta",), (1,), (2,))
    assert verdict.exit_code == exits.PREEMPTED, "this host is well: it is to be started again"
    other = Doctor(SETTINGS, tmp_path, process=1, owners=owners).examine(3, 3, [first, again], back_to=0)
    assert other.exit_code == exits.QUARANTINE
    (record,) = read(tmp_path)  # process 0 alone writes
    assert record["at_fault"] == {"hosts": ["beta"], "processes": [1], "devices": [2]} and record["kind"] == "spike"


def test_replays_are_compared_bitwise_on_deterministic_platforms(tmp_path):
    near = [StepResult(2.0, 50.0), StepResult(float(np.nextafter(np.float32(2), np.float32(3))), 50.0)]
    assert Doctor(SETTINGS, tmp_path).examine(1, 1, near).decision is Decision.QUARANTINE
    assert Doctor(SETTINGS, tmp_path, exact=False).examine(1, 1, near).decision is Decision.SKIP
    far = [StepResult(2.0, 50.0), StepResult(2.0, 1.0)]
    assert Doctor(SETTINGS, tmp_path, exact=False).examine(1, 1, far).decision is Decision.QUARANTINE
    gone = [NAN, StepResult(2.0, 1.0)]
    assert Doctor(SETTINGS, tmp_path, exact=False).examine(1, 1, gone).decision is Decision.QUARANTINE


def test_of_two_differing_replicas_the_one_that_changed_is_at_fault(tmp_path):
    doctor = Doctor(SETTINGS, tmp_path, replicas=[[0, 1]])
    runs = [StepResult(2.0, 90.0, {0: 5, 1: 6}), StepResult(2.0, 1.0, {0: 5, 1: 5})]
    assert doctor.examine(1, 1, runs).devices == (1,)


def test_replicas_that_disagree_are_found_without_a_replay(tmp_path):
    doctor = Doctor(SETTINGS, tmp_path, replicas=[[0, 1, 2]])
    verdict = doctor.examine(1, 1, [StepResult(2.0, 1.0, {0: 5, 1: 5, 2: 4})])
    assert verdict.decision is Decision.QUARANTINE and verdict.devices == (2,) and "replicas" in verdict.reason


def test_too_many_bad_batches_roll_back_and_then_stop(tmp_path):
    doctor = Doctor(SETTINGS, tmp_path)  # 4 skips, 1 rollback
    decisions = [doctor.examine(b, b, [NAN, NAN], back_to=8).decision for b in (10, 20, 30, 40, 50)]
    assert decisions == [Decision.SKIP] * 4 + [Decision.ROLLBACK]
    assert [b for b in range(60) if doctor.skips(b)] == list(range(8, 51)), "past all batches up to the trouble"
    again = [doctor.examine(b, b, [NAN, NAN], back_to=60) for b in (60, 70, 80, 90, 100)]
    assert [v.decision for v in again] == [Decision.SKIP] * 4 + [Decision.STOP]
    assert again[-1].exit_code == exits.TROUBLE and "max_rollbacks" in again[-1].reason


def test_bad_batches_far_apart_do_not_add_up(tmp_path):
    doctor = Doctor(SETTINGS, tmp_path)
    assert {doctor.examine(b, b, [NAN]).decision for b in range(0, 10000, 500)} == {Decision.SKIP}


def test_three_bad_batches_in_a_row_blame_the_state(tmp_path):
    doctor = Doctor(SETTINGS, tmp_path)
    decisions = [doctor.examine(b, b, [NAN, NAN], back_to=0).decision for b in (7, 8, 9)]
    assert decisions == [Decision.SKIP, Decision.SKIP, Decision.ROLLBACK]


def test_without_a_checkpoint_there_is_no_rollback(tmp_path):
    doctor = Doctor(Health(max_skips=0), tmp_path)
    verdict = doctor.examine(1, 1, [NAN, NAN], back_to=None)
    assert verdict.decision is Decision.STOP and "no checkpoint" in verdict.reason


def test_a_restarted_run_keeps_its_counts(tmp_path):
    first = Doctor(SETTINGS, tmp_path)
    for batch in (3, 10, 11, 12):
        first.examine(batch, batch, [NAN, NAN], back_to=5)
    with (tmp_path / "health.jsonl").open("a") as file:
        file.write('{"what": "sk')  # a full disk cut it short
    second = Doctor(SETTINGS, tmp_path)
    assert [b for b in range(20) if second.skips(b)] == [3, 5, 6, 7, 8, 9, 10, 11, 12]
    second.examine(20, 20, [NAN, NAN], back_to=15)
    second.examine(21, 21, [NAN, NAN], back_to=15)
    assert second.examine(22, 22, [NAN, NAN], back_to=15).decision is Decision.STOP, "the one rollback is spent"
    assert [record["what"] for record in read(tmp_path)] == ["skip"] * 3 + ["rollback"] + ["skip"] * 2 + ["stop"]


def test_a_record_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    doctor = Doctor(SETTINGS, tmp_path)
    (tmp_path / "health.jsonl").mkdir()  # root may write where permissions say no, but not to a folder
    assert doctor.examine(1, 1, [NAN, NAN]).decision is Decision.SKIP and doctor.skips(1)
    assert "could not write" in caplog.text


def test_every_exit_code_has_its_meaning():
    for code in (exits.PREEMPTED, exits.QUARANTINE, exits.HUNG, exits.TROUBLE):
        assert exits.meaning(code).startswith(f"exit {code}: ")
