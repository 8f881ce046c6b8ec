"""Test preference objectives on a small model: packing, accumulation, and a reference on disk or beside the policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from train_cases import CONFIGS, alone, packed, recipe

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.spec import init
from dovetail.core.types import Batch
from dovetail.models.config import ModelConfig, scored
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.train.objective import Objective, step_context
from dovetail.train.step import gradients
from dovetail.tune.preference import preference_objective, target_logprobs
from dovetail.tune.reward import score_objective
from dovetail.tune.sections import Preference, RewardLoss

pytestmark = pytest.mark.slow

CFG = parse_config(CONFIGS["dense"])
JUDGE = scored(CFG)
MOST, LENGTH = 6, 60
LOSSES = {
    "sigmoid": Preference("sigmoid", beta=0.5),
    "ipo": Preference("ipo", beta=0.5),
    "orpo": Preference("orpo", beta=0.5),
    "simpo": Preference("simpo", beta=1.5),
    "kto": Preference("kto", beta=0.5, desirable=1.3),
    "sigmoid + sft": Preference(("sigmoid", "sft"), loss_weights=(1.0, 0.3), beta=0.5),
}


def policy(params, ctx):
    return params


def reference(params, ctx):
    return ctx.frozen


def some_params(seed: int) -> Any:
    return init(spec(CFG), jax.random.key(seed), jnp.float32, std=0.15)


def documents(seed: int, pairs: int) -> list[list[int]]:
    """Chosen and rejected in turn: the same prompt of three words, and completions of 2 to 7."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(pairs):
        prompt = rng.integers(0, CFG.vocab, 3).tolist()
        found += [prompt + rng.integers(0, CFG.vocab, rng.integers(2, 8)).tolist() for _ in range(2)]
    return found


def rows_of(rows: list[list[list[int]]], length: int = LENGTH) -> Batch:
    """The targets of a prompt's words do not count; a document is good if its last word is even."""
    batch = packed(rows, length)
    mask = batch.loss_mask * (np.asarray(batch.positions) >= 2)
    label = np.zeros(mask.shape, np.float32)
    for row, held in enumerate(rows):
        ids = np.asarray(batch.segment_ids[row])
        for number, document in enumerate(held, start=1):
            label[row, ids == number] = 1.0 if document[-1] % 2 == 0 else -1.0
    return dataclasses.replace(batch, loss_mask=mask, columns={"label": label})


def some_rows() -> Batch:
    """Four rows of three, two, one and no pairs."""
    all_pairs = documents(0, 6)
    return rows_of([all_pairs[:6], all_pairs[6:10], all_pairs[10:], []])


def one_per_row() -> Batch:
    """Return the same pairs, one per row."""
    all_pairs = documents(0, 6)
    return rows_of([all_pairs[i : i + 2] for i in range(0, 12, 2)], 24)


def context(frozen: Any = None) -> Any:
    return dataclasses.replace(step_context(recipe(), alone()), frozen=frozen)


def measured(
    objective: Objective, batch: Batch, parts: int = 1, params: Any = None, cfg: ModelConfig = CFG, **changes
) -> tuple[Any, dict]:
    """(gradient, metrics), with a reference that is another model."""
    keep = {name: batch.columns[name] for name in objective.columns}
    batch = dataclasses.replace(batch, columns=keep)
    ctx = dataclasses.replace(context(some_params(1)), **changes)
    params = some_params(0) if params is None else params
    return jax.jit(lambda p, b: gradients(p, cfg, objective, b, ctx, parts)[:2])(params, batch)


def close(ours, theirs, tol=1e-5) -> None:
    def one(a, b):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=tol * np.abs(b).max() + 1e-7, rtol=tol)

    jax.tree.map(one, ours, theirs)


@pytest.mark.parametrize("name", corners(LOSSES, ["sigmoid", "kto"]))
def test_packed_rows_equal_their_documents_alone(name):
    objective = preference_objective(LOSSES[name], policy, reference, MOST)
    grads, told = measured(objective, some_rows())
    want_grads, want = measured(objective, one_per_row())
    close(grads, want_grads)
    close(told, want)
    assert told["loss"] > 0 and 0 <= told["reward_accuracy"] <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "kto"])
def test_parts_add_up_to_the_whole_batch(name):
    objective = preference_objective(LOSSES[name], policy, reference, MOST)
    whole, again = (measured(objective, some_rows(), parts) for parts in (1, 4))
    close(again, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ipo", "kto"])
def test_a_mesh_gives_what_one_device_gives(name):
    placement = Placement(make_mesh(dict(fsdp=2, context=2, tensor=2)), TRAIN)
    objective = preference_objective(LOSSES[name], policy, reference, MOST)
    close(measured(objective, some_rows(), placement=placement), measured(objective, some_rows()), tol=5e-5)


@pytest.mark.thorough
def test_microsteps_of_kto_add_up_given_their_kl():
    """The estimate of KL is each part's own; with rows that are all alike it is the whole batch's."""
    held = documents(0, 3)
    objective = preference_objective(LOSSES["kto"], policy, reference, MOST)
    whole, again = (measured(objective, rows_of([held, held]), parts) for parts in (1, 2))
    close(again, whole)


def test_the_kl_of_kto_is_estimated_on_mismatched_documents():
    batch, objective = some_rows(), preference_objective(LOSSES["kto"], policy, reference, MOST)
    label = np.array(batch.columns["label"])
    label[0, np.asarray(batch.segment_ids[0]) == 2] = 0.0
    grads, told = measured(objective, dataclasses.replace(batch, columns={"label": label}))
    logps, refs = (target_logprobs(some_params(i), CFG, batch, context()) for i in (0, 1))
    ratio = jnp.sum(jnp.where(batch.segment_ids[0] == 2, (logps - refs)[0], 0.0))
    np.testing.assert_allclose(told["kl"], max(ratio, 0.0), rtol=1e-4)
    # all that the document adds is the KL, which carries no gradient
    assert np.all(np.isfinite(jax.tree.leaves(grads)[0]))


@pytest.mark.parametrize("name", corners(["sigmoid", "kto"], ["kto"]))
def test_a_reference_on_disk_is_the_live_one(name):
    batch = some_rows()
    kept = np.array(target_logprobs(some_params(1), CFG, batch, context()))
    assert not np.any(kept[np.asarray(batch.loss_mask) == 0])
    kept[np.asarray(batch.loss_mask) == 0] = 7.0  # is not read
    stored = dataclasses.replace(LOSSES[name], reference="disk")
    batch = dataclasses.replace(batch, columns=batch.columns | {"reference": kept})
    close(
        measured(preference_objective(stored, policy, None, MOST), batch),
        measured(preference_objective(LOSSES[name], policy, reference, MOST), batch),
    )


def test_log_probabilities_equal_those_of_the_whole_softmax():
    from dovetail.models.decoder import forward, unembed

    batch, ctx, params = some_rows(), context(), some_params(0)
    hidden, _ = forward(params, CFG, jnp.asarray(batch.tokens), jnp.asarray(batch.positions), ctx.packed(batch))
    logp = jax.nn.log_softmax(unembed(params, CFG, hidden))
    want = np.take_along_axis(np.asarray(logp), np.asarray(batch.targets)[..., None], -1)[..., 0] * batch.loss_mask
    np.testing.assert_allclose(target_logprobs(params, CFG, batch, ctx), want, atol=2e-5)


def test_a_policy_equal_to_its_reference_has_no_margin():
    def itself(params, ctx):
        return params

    grads, told = measured(preference_objective(Preference(), policy, itself, MOST), some_rows())
    np.testing.assert_allclose(told["loss"], np.log(2), rtol=1e-6)
    assert abs(told["reward_margin"]) < 1e-6
    assert np.abs(jax.tree.leaves(grads)[0]).max() > 0  # the reference carries none of it


def test_more_documents_than_declared_make_the_loss_nan():
    for name in ("sigmoid", "kto"):
        _, told = measured(preference_objective(LOSSES[name], policy, reference, 4), some_rows())
        assert np.isnan(told["loss"]), name


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sigmoid", "kto", "sigmoid + sft"])
def test_held_out_rows_have_the_training_metrics(name):
    objective, batch = preference_objective(LOSSES[name], policy, reference, MOST), some_rows()
    _, told = measured(objective, batch)
    sums, count = jax.jit(lambda p, b: objective.held_out(p, CFG, b, context(some_params(1))))(some_params(0), batch)
    assert count == (12 if name == "kto" else 6)
    for metric, value in sums.items():
        np.testing.assert_allclose(value / count, told[metric], rtol=1e-5, atol=1e-6)


# --- reward models ----------------------------------------------------------------------------------------------------


def test_a_reward_model_scores_the_last_token_and_learns():
    settings = RewardLoss(margin=True, centering=0.1)
    objective = score_objective(settings, policy, MOST)
    params = init(spec(JUDGE), jax.random.key(0), jnp.float32, std=0.15)

    def with_margin(batch: Batch) -> Batch:
        """A third of the pair's number of words."""
        margin = np.zeros(np.shape(batch.tokens), np.float32)
        for row, ids in enumerate(np.asarray(batch.segment_ids)):
            for number in range(1, ids.max() + 1):
                margin[row, ids == number] = np.sum(np.asarray((ids + 1) // 2 == (number + 1) // 2)) / 3
        return dataclasses.replace(batch, columns={"margin": margin})

    grads, told = measured(objective, with_margin(some_rows()), params=params, cfg=JUDGE)
    want_grads, want = measured(objective, with_margin(one_per_row()), params=params, cfg=JUDGE)
    close(grads, want_grads)
    close(told, want)
    parts = measured(objective, with_margin(some_rows()), parts=2, params=params, cfg=JUDGE)
    close(parts, (grads, told))
    assert np.abs(grads["score"]).max() > 0 and np.abs(grads["embed"]).max() > 0
    lower = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    assert measured(objective, with_margin(some_rows()), params=lower, cfg=JUDGE)[1]["loss"] < told["loss"]
