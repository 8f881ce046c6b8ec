"""Test an objective with its own columns through step, loop, checkpoints and report."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses
from train.runs import RECIPE, Numbers, metrics, model_folder
from train_cases import CONFIGS, alone, recipe, some_batch

from dovetail.core.recipe import read
from dovetail.core.reporter import Reporter
from dovetail.core.spec import init
from dovetail.core.training import Training
from dovetail.core.types import Batch, Column
from dovetail.io.checkpoint import Checkpoints
from dovetail.models.mtp import ahead
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.train.guard.exits import PREEMPTED
from dovetail.train.launch import launch
from dovetail.train.next_token import next_token
from dovetail.train.objective import Measured, Objective, cross_entropy, hidden_states, step_context
from dovetail.train.prepare import prepare
from dovetail.train.report.summary import read as read_report
from dovetail.train.rows import Opened
from dovetail.train.settings import Pretrain
from dovetail.train.step import gradients

pytestmark = pytest.mark.slow


def weighted(params, cfg, batch, weight, ctx):
    """Each target's log-likelihood times its advantage; rows that are not kept do not count."""
    hidden, _ = hidden_states(params, cfg, batch, ctx)
    worth = batch.loss_mask * batch.columns["advantages"] * batch.columns["kept"][:, None]
    loss, _ = cross_entropy(params, cfg, hidden, dataclasses.replace(batch, loss_mask=worth), ctx)
    return Measured(loss / weight, {"worth": worth.sum() / weight})


ADVANTAGE = Objective(weighted, columns={"advantages": Column(), "kept": Column("int32", per_token=False)})


def with_columns(batch: Batch, advantage: float = 1.0, seed: int | None = None) -> Batch:
    """Every advantage the same and every row kept, unless there is a seed."""
    shape, rng = batch.tokens.shape, np.random.default_rng(seed)
    given = {"advantages": np.full(shape, advantage, np.float32), "kept": np.ones(shape[:1], np.int32)}
    if seed is not None:
        given = {"advantages": rng.normal(1, 1, shape).astype(np.float32), "kept": rng.integers(0, 2, shape[0])}
    return dataclasses.replace(batch, columns=given)


def gradient(objective: Objective, batch: Batch, parts: int = 1):
    """(gradient, metrics) of a small model."""
    settings, cfg = recipe(), parse_config(CONFIGS["dense"])
    params = init(spec(cfg), jax.random.key(0), jnp.float32, std=0.15)
    ctx = step_context(settings, alone())
    return jax.jit(lambda p, b: gradients(p, cfg, objective, b, ctx, parts)[:2])(params, batch)


def close(ours, theirs) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max() + 1e-9, rtol=0), ours, theirs
    )


def test_columns_reach_the_objective_with_accumulation_too():
    batch = with_columns(some_batch(0), seed=1)
    whole, measured = gradient(ADVANTAGE, batch)
    again, parts = gradient(ADVANTAGE, batch, parts=4)
    close(again, whole)
    assert set(measured) == {"loss", "worth", "targets"} == set(parts)
    np.testing.assert_allclose(parts["worth"], measured["worth"], rtol=1e-6)
    plain, expected = gradient(next_token(recipe()), some_batch(0))
    close(gradient(ADVANTAGE, with_columns(some_batch(0)))[0], plain)
    doubled, said = gradient(ADVANTAGE, with_columns(some_batch(0), 2.0))
    close(doubled, jax.tree.map(lambda g: 2 * g, plain))
    np.testing.assert_allclose(said["loss"], 2 * expected["loss"], rtol=1e-6)


def test_a_mask_is_a_weight():
    """Of any size: what counts is how targets compare."""
    batch = some_batch(0)
    light = dataclasses.replace(batch, loss_mask=batch.loss_mask * 2**-10)
    assert 0 < light.loss_mask.sum() < 1
    plain, light = (gradient(next_token(recipe()), b) for b in (batch, light))
    close(light[0], plain[0])
    np.testing.assert_allclose(light[1]["loss"], plain[1]["loss"], rtol=1e-6)


def test_columns_are_shifted_with_their_targets():
    batch = with_columns(some_batch(0), seed=1)
    later = ahead(batch, 2)
    np.testing.assert_array_equal(later.columns["advantages"][:, :-2], batch.columns["advantages"][:, 2:])
    np.testing.assert_array_equal(later.columns["kept"], batch.columns["kept"])


# --- whole runs -------------------------------------------------------------------------------------------------------


class Rated(Numbers):
    """Rows with columns, a reason to stop at a batch, and columns to leave out or add."""

    def __init__(self, settings, change=lambda index, batch: batch):
        super().__init__(settings, lambda index, batch: change(index, with_columns(batch, seed=index)))


def training(tmp_path: Path, **changes) -> Training:
    """A kind of training that knows neither data nor a pretraining loss."""
    wanted = {key: value for key, value in RECIPE.items() if key != "data"}
    return read(
        Training, {**wanted, "model": str(model_folder(tmp_path)), "eval": {"every": 6, "batches": 2}, **changes}
    )


def train(settings: Training, folder: Path, change=lambda index, batch: batch):
    rows = Opened(Rated(settings, change), held_out=Rated(settings))
    return launch(settings, folder, lambda _: ADVANTAGE, lambda settings, ready: rows, reporter=Reporter(show=False))


def weights(folder: Path, settings: Training) -> list[np.ndarray]:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state, _, _ = checkpoints.restore(prepare(settings, ADVANTAGE).abstract_state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


@pytest.mark.thorough
def test_a_custom_objective_trains_stops_resumes_and_reports(tmp_path):
    """On all devices, in parts; stopped by a signal and started again it ends as the run that was not."""
    settings = training(tmp_path, batch=16, accumulate=2, optimizer={"lr": 3e-3})
    straight = train(settings, tmp_path / "straight")
    assert straight.code == 0 and straight.step == 12 and straight.metrics["held_out_loss"] > 0
    signalled = []

    def stop_once(index: int, batch: Batch) -> Batch:
        if index == 5 and not signalled:
            signalled.append(os.kill(os.getpid(), signal.SIGTERM))
        return batch

    first = train(settings, tmp_path / "cut", stop_once)
    assert first.code == PREEMPTED and 4 < first.step < 12
    second = train(settings, tmp_path / "cut")
    assert second.code == 0 and metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
    for a, b in zip(weights(tmp_path / "straight", settings), weights(tmp_path / "cut", settings), strict=True):
        np.testing.assert_array_equal(a, b)
    found = read_report(tmp_path / "cut")
    assert len(found.curve("worth")) == 12 and found.held_out and found.ledger and found.ledger.starts == 2
    assert "<svg" in (tmp_path / "cut" / "report.html").read_text()
    assert isinstance(settings, Training) and not isinstance(settings, Pretrain)


# case -> the column at fault, its values in the rows, what the message must contain
WRONG = {
    "missing": ("kept", None, "advantages"),
    "not declared": ("old_logprobs", np.zeros((8, 32), np.float32), "advantages, kept"),
    "of another shape": ("kept", np.ones((8, 32), np.int32), "(8,), got (8, 32)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_columns_that_do_not_fit_are_refused_by_name(case, tmp_path):
    column, values, naming = WRONG[case]

    def change(index: int, batch: Batch) -> Batch:
        columns = {name: x for name, x in {**batch.columns, column: values}.items() if x is not None}
        return dataclasses.replace(batch, columns=columns)

    with refuses(column, naming=naming):
        train(training(tmp_path), tmp_path / "run", change)


def test_rows_with_columns_are_refused_where_none_are_declared(tmp_path):
    settings = training(tmp_path)
    ready = prepare(settings, Objective(weighted), jax.devices()[:1])
    with refuses("advantages", naming="no further columns"):
        ready.put(Rated(settings).batch(0))
