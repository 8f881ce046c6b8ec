"""Test one training step: against PyTorch, accumulated, recomputed, scanned, and with bad values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from corners import corners
from reference_models import reference
from train_cases import CONFIGS, alone, packed, recipe, some_batch

from dovetail.core.spec import abstract, init
from dovetail.core.training import Optimizer, Precision
from dovetail.core.types import Packed
from dovetail.io.hf import write_tensors
from dovetail.io.load import load
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.models.decoder import trunk
from dovetail.models.registry import parse_config, read_model
from dovetail.models.repeats import Repeat, repeats
from dovetail.models.spec import spec
from dovetail.train.guard import health
from dovetail.train.next_token import next_token
from dovetail.train.objective import step_context
from dovetail.train.optim import global_norm, learning_rate, make_optimizer
from dovetail.train.settings import PretrainLoss
from dovetail.train.state import TrainState, init_state
from dovetail.train.step import gradients, kept_copy, make_eval, make_step

pytestmark = pytest.mark.slow


@functools.partial(jax.jit, static_argnames=("cfg", "settings"))
def grads_of(params, cfg, settings, batch):
    parts = settings.accumulate or 1
    return gradients(params, cfg, next_token(settings), batch, step_context(settings, alone()), parts)


def config(name: str, **changes):
    return parse_config(CONFIGS[name] | changes)


def fresh(cfg, settings):
    """Weights far enough from 0 that every part of the model matters."""
    return init(next_token(settings).specs(cfg), jax.random.key(settings.seed), jnp.float32, std=0.15)


def trainer(cfg, settings, params=None):
    """(a state, a jitted step) on one device; the state is not donated, so that it can be looked at."""
    rate = learning_rate(settings.schedule, settings.optimizer.lr, settings.total_steps)
    objective = next_token(settings)
    optimizer = make_optimizer(settings.optimizer, rate, objective.specs(cfg))
    state = init_state(cfg, objective.specs(cfg), settings, optimizer, alone(), params)
    return state, jax.jit(make_step(cfg, settings, objective, optimizer, rate, step_context(settings, alone())))


def same(a, b) -> None:
    """Bitwise, leaf by leaf."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(ours, theirs, rtol: float) -> None:
    """Each leaf within rtol of its largest element."""

    def check(path, a, b):
        np.testing.assert_allclose(a, b, atol=rtol * max(np.abs(b).max(), 1e-3), rtol=0, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, ours, theirs)


def near(ours, theirs) -> None:
    """All leaves as one vector within 1e-6, and each within a few times that."""
    apart, size = jax.tree.map(lambda a, b: a - b, ours, theirs), global_norm(theirs)
    assert global_norm(apart) <= 1e-6 * size
    for (path, leaf), a in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(apart), strict=True):
        assert np.linalg.norm(a) <= 4e-6 * max(np.linalg.norm(leaf), 1e-3 * size), path


# ---------------------------------------------------------------------------------------------------- against PyTorch

DOCUMENTS = [np.random.default_rng(i).integers(3, 160, n).tolist() for i, n in enumerate((19, 12))]
REFERENCES = corners(
    ["llama3.1", "gemma3", "mixtral", "granite3", "qwen3-moe", "phi4-mini", "glm4"], ["llama3.1", "gemma3"]
)


def torch_loss(model) -> torch.Tensor:
    """The mean over all targets of two documents, each run by itself; its gradient is in model.grad."""
    targets = sum(len(document) - 1 for document in DOCUMENTS)
    model.zero_grad()
    total = torch.zeros(())
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        logits = model(ids).logits[0, :-1].float()
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / targets
    total.backward()
    return total.detach()


def published(model, folder) -> dict[str, np.ndarray]:
    """A torch model's tensors under the names that it is saved with."""
    model.save_pretrained(folder)
    saved = SafetensorFolder(folder)
    return {name: np.array(saved.read(name)) for name in saved.tensors()}


def compare(ours: dict, theirs: dict, atol: float) -> None:
    """Each tensor, relative to its largest element."""
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        scale = max(np.abs(tensor).max(), 1e-3)
        np.testing.assert_allclose(ours[name] / scale, tensor / scale, atol=atol, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradients_equal_pytorchs(name, tmp_path):
    theirs, folder = reference(name)
    theirs, ours = copy.deepcopy(theirs), load(folder, dtype="f32")
    grads, metrics, _ = grads_of(ours.params, ours.config, recipe(batch=1, length=36), packed([DOCUMENTS], 36))
    np.testing.assert_allclose(metrics["loss"], torch_loss(theirs).numpy(), rtol=1e-5)
    assert metrics["targets"] == 18 + 11
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.copy_(tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
    compare({n: a for n, _, a in write_tensors(ours.config, grads)}, published(theirs, tmp_path / "grads"), 1e-4)


@pytest.mark.parametrize("name", ["llama3.1", pytest.param("mixtral", marks=pytest.mark.thorough)])
def test_two_updates_equal_pytorchs_adamw(name, tmp_path):
    """Clip by the global norm; embeddings, norms and biases are not decayed."""
    theirs, folder = reference(name)
    theirs, ours = copy.deepcopy(theirs), load(folder, dtype="f32")
    wanted = Optimizer(
        lr=1e-2, weight_decay=0.3, max_grad_norm=0.5, eps=1e-3
    )  # eps: no step by the sign of a tiny gradient
    state, step = trainer(ours.config, recipe(batch=1, length=36, optimizer=wanted), ours.params)
    groups = [
        dict(params=[p for n, p in theirs.named_parameters() if (p.ndim > 1 and "embed" not in n) == decayed],
             weight_decay=0.3 if decayed else 0.0)
        for decayed in (True, False)
    ]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for _ in range(2):
        loss = torch_loss(theirs)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert norm > 0.5, "a test of no clipping"
        adamw.step()
        state, metrics = step(state, packed([DOCUMENTS], 36))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    assert state.step == 2 and metrics["ok"]
    ours_now = {n: a for n, _, a in write_tensors(ours.config, state.params)}
    compare(ours_now, published(theirs, tmp_path / "weights"), 1e-4)


# -------------------------------------------------------------------------------------------------------- one batch

EXTRAS = PretrainLoss(z=1e-3, router_aux=0.05)


def test_logits_have_the_dtype_of_the_recipe():
    cfg, batch = config("dense"), some_batch(0)
    params = fresh(cfg, recipe())
    whole, half, same = (
        float(grads_of(params, cfg, recipe(precision=Precision("f32", logits=logits)), batch)[1]["loss"])
        for logits in ("f32", "bf16", "")
    )
    assert whole == same and whole != half
    np.testing.assert_allclose(half, whole, rtol=1e-2)


@pytest.mark.parametrize("name", corners(["dense", "moe", "latent"], ["moe"]))
def test_accumulated_gradients_equal_those_of_the_whole_batch(name):
    """Loss, metrics and gradients, though the parts have different numbers of targets."""
    cfg = config(name)
    loss = (
        PretrainLoss(z=1e-3) if name == "dense" else dataclasses.replace(EXTRAS, mtp=0.3 if name == "latent" else 0.0)
    )
    whole = recipe(loss=loss, accumulate=1)
    params, batch = fresh(cfg, whole), some_batch(0)
    assert len(set(batch.loss_mask.sum(axis=1))) > 2
    grads, metrics, loads = grads_of(params, cfg, whole, batch)
    assert ("router_imbalance" in metrics) == (name != "dense")
    for parts in (2, 4):
        again = grads_of(params, cfg, dataclasses.replace(whole, accumulate=parts), batch)
        near(again[0], grads)
        assert set(again[1]) == set(metrics)
        for key, value in metrics.items():
            np.testing.assert_allclose(again[1][key], value, rtol=1e-6, err_msg=key)
        same(again[2], loads)


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_state_with_a_copy_of_its_weights_trains_as_one_without(parts):
    cfg = config("moe")
    settings = recipe(accumulate=parts, precision=Precision("bf16"), loss=EXTRAS)
    plain, step = trainer(cfg, settings, fresh(cfg, settings))
    specs, compute = next_token(settings).specs(cfg), step_context(settings, alone()).compute
    carried = dataclasses.replace(plain, copy=kept_copy(plain.params, specs, compute))
    assert carried.copy["embed"] is None and carried.copy["layers"][0]["attn"]["q"].dtype == jnp.bfloat16
    for number in range(3):
        plain, expected = step(plain, some_batch(number))
        carried, metrics = step(carried, some_batch(number))
        close(metrics, expected, 1e-2)
        same(carried.copy, kept_copy(carried.params, specs, compute))
    assert plain.copy is None
    close(carried.params, plain.params, 1e-2)


FOLDED = {
    "deep": [Repeat(0, 1, 4)],
    "local": [Repeat(0, 2, 2), Repeat(4, 1, 1)],
    "latent": [Repeat(0, 1, 1), Repeat(1, 1, 2)],
}


def test_equal_layers_are_found():
    assert repeats(read_model("llama3-8b")) == [Repeat(0, 1, 32)]
    assert repeats(read_model("gemma3-4b")) == [Repeat(0, 6, 5), Repeat(30, 1, 4)], "five local layers to a global one"
    assert repeats(read_model("deepseek-v3")) == [Repeat(0, 1, 3), Repeat(3, 1, 58)]


@pytest.mark.slow
@pytest.mark.parametrize("name", corners(FOLDED, ["deep"]))
def test_remat_and_scan_change_nothing(name):
    cfg = config(name)
    assert repeats(cfg) == FOLDED[name]
    plain = recipe(loss=EXTRAS if name == "latent" else PretrainLoss())
    params, batch = fresh(cfg, plain), some_batch(1)
    grads, metrics, loads = grads_of(params, cfg, plain, batch)
    for remat, scan in (("none", True), ("dots", True), ("attention", False), ("full", True)):
        found = grads_of(params, cfg, dataclasses.replace(plain, remat=remat, scan=scan), batch)
        close(found[0], grads, 1e-5)
        close(found[1], metrics, 1e-6)
        same(found[2], loads)


@pytest.mark.thorough
@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeps_what_its_name_says(scan):
    """What the forward pass leaves for the backward pass, in bytes beyond the weights, from the most to the least."""
    cfg, batch = config("deep"), some_batch(0)
    params = abstract(spec(cfg), jnp.float32)

    def kept(remat: str) -> int:
        def run(params):
            ctx = Packed(jnp.asarray(batch.segment_ids))
            return trunk(params, cfg, batch.tokens, batch.positions, ctx, remat=remat, scan=scan)[0]

        left = jax.eval_shape(lambda p: jax.vjp(run, p)[1], params)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(left))

    none, dots, attention, full = (kept(remat) for remat in ("none", "dots", "attention", "full"))
    tokens, layers, dim = batch.tokens.size, 4, 32
    assert none > 2 * dots > 4 * attention
    assert attention - full == tokens * layers * dim * 4, "the attention's output, of 4 heads of 8"


# ------------------------------------------------------------------------------------------------------ training


def curve(name: str, steps: int = 12, **changes):
    """(last state, the metrics of each step) over a batch that stays the same."""
    cfg, settings = config(name), recipe(optimizer=Optimizer(lr=1e-2), **changes)
    state, step = trainer(cfg, settings)
    found = []
    for _ in range(steps):
        state, metrics = step(state, some_batch(2))
        found.append(jax.device_get(metrics))
        assert metrics["ok"]
    assert state.step == steps
    return state, found


@pytest.mark.thorough
def test_bf16_weights_learn_by_stochastic_rounding():
    """At a rate where each update is below what rounding to nearest would keep."""
    state, metrics = curve("dense", precision=Precision(compute="bf16", params="bf16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state.opt))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5
    exact = curve("dense")[1]
    np.testing.assert_allclose(metrics[-1]["loss"], exact[-1]["loss"], atol=0.1)


@pytest.mark.thorough
def test_the_compute_dtype_does_not_change_the_master_weights():
    state, metrics = curve("dense", precision=Precision(compute="bf16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5


@pytest.mark.thorough
def test_the_ema_of_the_weights():
    cfg, settings = config("dense"), recipe(ema=0.9, optimizer=Optimizer(lr=1e-2))
    state, step = trainer(cfg, settings)
    same(state.ema, state.params)
    expected = state.params
    for _ in range(3):
        state, _ = step(state, some_batch(3))
        expected = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, expected, state.params)
    close(state.ema, expected, 1e-6)
    assert curve("dense", steps=1)[0].ema is None


@pytest.mark.thorough
def test_z_loss_moves_the_normaliser_towards_one():
    """The reported loss is the cross entropy alone."""
    plain, held = curve("dense", steps=30)[1], curve("dense", steps=30, loss=PretrainLoss(z=0.1))[1]
    assert plain[0]["z"] == 0 and held[0]["loss"] == plain[0]["loss"]
    assert 0 < held[-1]["z"] < 0.3 * held[0]["z"]


@pytest.mark.thorough
def test_the_router_bias_moves_towards_balance():
    """Up where an expert had less than the mean, down where more, by exactly the rate; nothing else moves it."""
    cfg, rate = config("latent"), 0.01
    settings = recipe(loss=PretrainLoss(router_bias_rate=rate, mtp=0.1), optimizer=Optimizer(lr=1e-5))
    state, step = trainer(cfg, settings, fresh(cfg, settings))
    batch = some_batch(4)
    _, _, loads = grads_of(state.params, cfg, settings, batch)
    assert sorted(loads) == [1, 2, 3], "two layers and that of multi-token prediction"
    busiest = []
    for turn in range(40):
        before, (state, metrics) = state, step(state, batch)
        busiest.append(float(metrics["router_busiest"]))
        if turn == 0:
            blocks = [*state.params["layers"], state.params["mtp"][0]["block"]]
            olds = [*before.params["layers"], before.params["mtp"][0]["block"]]
            for i, load in loads.items():
                moved = blocks[i]["moe"]["choice_bias"] - olds[i]["moe"]["choice_bias"]
                np.testing.assert_allclose(moved, rate * np.sign(load.mean() - load), atol=1e-7)
    assert np.mean(busiest[-5:]) < 0.9 * busiest[0]


@pytest.mark.thorough
def test_without_a_rate_the_router_bias_is_constant():
    cfg, settings = config("latent"), recipe()
    params = jax.tree.map(lambda x: x + 0.25, fresh(cfg, settings))
    state, step = trainer(cfg, settings, params)
    state, _ = step(state, some_batch(4))
    np.testing.assert_array_equal(state.params["layers"][1]["moe"]["choice_bias"], 0.25)


@pytest.mark.thorough
def test_router_aux_balances_the_experts():
    free = curve("moe", steps=25, loss=PretrainLoss(router_aux=1e-9))[1]
    held = curve("moe", steps=25, loss=PretrainLoss(router_aux=1.0))[1]
    assert free[0]["router_imbalance"] == held[0]["router_imbalance"] >= 1
    assert held[-1]["router_imbalance"] - 1 < 0.7 * (free[-1]["router_imbalance"] - 1)


def test_mtp_learns_further_tokens():
    _, metrics = curve("dense", steps=30, loss=PretrainLoss(mtp=0.3))
    losses = [m["mtp_loss"] for m in metrics]
    assert losses[0] > 3 and 0 < losses[-1] < 0.5 * losses[0]
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]


def test_given_weights_are_completed_with_mtp_layers():
    cfg, settings = config("dense"), recipe(loss=PretrainLoss(mtp=0.3))
    given = fresh(cfg, recipe())
    state, step = trainer(cfg, settings, given)
    same({name: state.params[name] for name in given}, given)
    after, metrics = step(state, some_batch(2))
    assert metrics["ok"] and jax.tree.structure(after) == jax.tree.structure(state)
    assert np.abs(after.params["mtp"][0]["proj"] - state.params["mtp"][0]["proj"]).max() > 0


def test_the_held_out_loss_is_the_loss_without_auxiliary_terms():
    cfg, settings = config("moe"), recipe(loss=EXTRAS)
    params, batch = fresh(cfg, settings), some_batch(5)
    sums, count = jax.jit(make_eval(cfg, next_token(settings), step_context(settings, alone())))(params, batch)
    np.testing.assert_allclose(sums["loss"] / count, grads_of(params, cfg, settings, batch)[1]["loss"], rtol=1e-6)


def test_a_batch_without_targets_is_no_fault():
    cfg, settings = config("dense"), recipe(optimizer=Optimizer(weight_decay=0.0))
    state, step = trainer(cfg, settings)
    batch = some_batch(6)
    after, metrics = step(state, dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask)))
    assert metrics["ok"] and metrics["loss"] == 0 and not after.health.halted
    same(after.params, state.params)


# ---------------------------------------------------------------------------------------------------------- faults


def poisoned(state: TrainState, word: int) -> TrainState:
    """The same with an embedding row that is infinite, and so a loss that is NaN for a batch that reads it."""
    embed = state.params["embed"].at[word].set(jnp.inf)
    return dataclasses.replace(state, params={**state.params, "embed": embed})


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_non_finite_gradients_do_not_reach_the_state(accumulate):
    cfg = config("latent", tie_word_embeddings=False)
    wanted = PretrainLoss(router_bias_rate=0.01, mtp=0.1)
    settings = recipe(ema=0.9, loss=wanted, accumulate=accumulate, optimizer=Optimizer(lr=1e-2))
    state, step = trainer(cfg, settings)
    good = packed([[list(range(20, 40))]] * 8, 24)
    bad = packed([[list(range(20, 40))]] * 7 + [[list(range(60, 80))]], 24)  # one row in eight
    state, metrics = step(poisoned(state, 70), good)
    assert metrics["ok"] and state.step == 1 and not state.health.halted

    after, metrics = step(state, bad)
    assert not metrics["ok"] and not np.isfinite(metrics["loss"])
    assert after.health.halted
    same(dataclasses.replace(after, health=state.health), state)
    same(dataclasses.replace(after.health, halted=state.health.halted), state.health)

    # what was dispatched behind it does nothing, good though it is
    idle, metrics = step(after, good)
    assert not metrics["ok"] and np.isfinite(metrics["loss"])
    same(idle, after)

    cleared = dataclasses.replace(idle, health=health.cleared(idle.health))
    on, metrics = step(cleared, good)
    assert metrics["ok"] and on.step == 2
    straight, _ = step(state, good)
    same(on, straight)


@pytest.mark.thorough
def test_an_update_with_a_spike_is_not_applied():
    """A finite gradient far above its running mean, once there is one."""
    cfg, settings = config("dense"), recipe(optimizer=Optimizer(lr=1e-3))
    settings = dataclasses.replace(settings, health=dataclasses.replace(settings.health, warmup=3, spike=3.0))
    state, step = trainer(cfg, settings)
    for turn in range(4):
        state, metrics = step(state, some_batch(turn))
        assert metrics["ok"]
    norm, head = state.params["norm"], state.params["head"]
    loud = dataclasses.replace(state, params={**state.params, "norm": norm * 30, "head": head * 30})
    after, metrics = step(loud, some_batch(9))
    assert np.isfinite(metrics["loss"]) and not metrics["ok"] and after.health.halted
    same(after.params, loud.params)
