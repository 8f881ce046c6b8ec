"""Test distillation losses and gradients against torch and TRL, with a teacher of another size."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from corners import corners
from reference_models import reference
from refusals import refuses
from train_cases import CONFIGS, alone, packed, recipe, some_batch

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.spec import init
from dovetail.io.load import load
from dovetail.models.decoder import forward, unembed
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.ops.token_loss import divergence
from dovetail.train.objective import step_context
from dovetail.train.step import gradients
from dovetail.tune.distill import attention_map, divergence_objective, likeliest, map_divergence, state_distance
from dovetail.tune.sections import AttentionLoss, Distillation, FeatureLoss

pytestmark = pytest.mark.slow

STUDENT = parse_config(CONFIGS["dense"])
LARGER = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=6, tie_word_embeddings=True)
TEACHER = parse_config(CONFIGS["dense"] | LARGER)
KINDS: dict[str, Any] = {
    "forward": dict(kind="forward"),
    "reverse": dict(kind="reverse"),
    "jsd": dict(kind="jsd", beta=0.3),
    "half": dict(kind="jsd", beta=0.5),
}


# --- the formulas -----------------------------------------------------------------------------------------------------


def ragged(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the student's logits, the teacher's, mask) of sequences of 3 to 9 words over 13."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 10, 4)
    mask = np.arange(lengths.max()) < lengths[:, None]
    shape = (*mask.shape, 13)
    return 3 * rng.normal(size=shape), 3 * rng.normal(size=shape), mask


def by_formula(s: torch.Tensor, t: torch.Tensor, kind: str, beta: float = 0.5) -> torch.Tensor:
    s, t = torch.softmax(s, -1), torch.softmax(t, -1)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum(-1)

    if kind != "jsd":
        return kl(t, s) if kind == "forward" else kl(s, t)
    m = (1 - beta) * s + beta * t
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def ours(s: np.ndarray, t: np.ndarray, mask: np.ndarray, temperature: float, kind: dict) -> tuple[Any, Any]:
    def mean(s: jax.Array) -> jax.Array:
        apart = divergence(s / temperature, jnp.asarray(t, jnp.float32) / temperature, **kind)
        return jnp.sum(jnp.where(mask, apart, 0.0)) / mask.sum()

    return jax.jit(jax.value_and_grad(mean))(jnp.asarray(s, jnp.float32))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", KINDS)
def test_divergences_and_gradients_equal_the_formulas(name, temperature):
    s, t, mask = ragged()
    value, grad = ours(s, t, mask, temperature, KINDS[name])
    x = torch.tensor(s, requires_grad=True)
    want = by_formula(x / temperature, torch.tensor(t) / temperature, **KINDS[name])[torch.tensor(mask)].mean()
    want.backward()
    assert x.grad is not None
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad, rtol=1e-4, atol=1e-6)
    assert not np.any(np.asarray(grad)[~mask])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", KINDS)
def test_divergences_equal_trls(name, temperature):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    s, t, mask = ragged(1)
    value, grad = ours(s, t, mask, temperature, KINDS[name])
    x, labels = torch.tensor(s, requires_grad=True), torch.tensor(np.where(mask, 1, -100))
    beta = {"forward": 0.0, "reverse": 1.0}.get(name, KINDS[name].get("beta"))
    want = trl.GKDTrainer.generalized_jsd_loss(x, torch.tensor(t), labels, beta, temperature)
    want.backward()
    assert x.grad is not None
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_the_distance_of_states_and_its_gradients_equal_the_formulas(kind):
    rng = np.random.default_rng(2)
    h, w, t = rng.normal(size=(2, 5, 6)), rng.normal(size=(8, 6)), rng.normal(size=(2, 5, 8))
    weight = rng.random((2, 5))

    def total(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(weight * state_distance(h, jnp.asarray(t), w, kind))

    value, grads = jax.value_and_grad(total, (0, 1))(jnp.asarray(h, jnp.float32), jnp.asarray(w, jnp.float32))
    x, y, z = torch.tensor(h, requires_grad=True), torch.tensor(w, requires_grad=True), torch.tensor(t)
    apart = 1 - torch.cosine_similarity(x @ y.T, z, dim=-1) if kind == "cosine" else ((x @ y.T - z) ** 2).mean(-1)
    want = (torch.tensor(weight) * apart).sum()
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    for ours, theirs in zip(grads, (x, y), strict=True):
        assert theirs.grad is not None
        np.testing.assert_allclose(ours, theirs.grad, rtol=1e-4, atol=1e-5)


# --- the objective ----------------------------------------------------------------------------------------------------


def policy(params, ctx):
    return params


def teacher(params, ctx):
    return ctx.frozen


def some_params(specs: Any, seed: int) -> Any:
    return init(specs, jax.random.key(seed), jnp.float32, std=0.15)


def context(**changes: Any) -> Any:
    return dataclasses.replace(step_context(recipe(), alone()), frozen=some_params(spec(TEACHER), 1), **changes)


def measured(settings: Distillation, batch=None, parts: int = 1, teacher_cfg=TEACHER, **changes) -> tuple[Any, dict]:
    """(gradient, metrics)."""
    objective, ctx = divergence_objective(settings, policy, teacher, teacher_cfg), context(**changes)
    params, batch = some_params(objective.specs(STUDENT), 0), some_batch(0) if batch is None else batch
    return jax.jit(lambda p, b: gradients(p, STUDENT, objective, b, ctx, parts)[:2])(params, batch)


def plain(settings: Distillation) -> tuple[Any, Any]:
    """(gradient, loss) of the formula over whole logits."""
    batch, ctx, wanted = some_batch(0), context(), settings.features
    objective = divergence_objective(settings, policy, teacher, TEACHER)

    def run(params, cfg):
        hidden, _ = forward(params, cfg, jnp.asarray(batch.tokens), jnp.asarray(batch.positions), ctx.packed(batch))
        return hidden, unembed(params, cfg, hidden)

    theirs, t = run(ctx.frozen, TEACHER)
    mask, T = jnp.asarray(batch.loss_mask), settings.temperature

    def loss(params):
        hidden, s = run(params, STUDENT)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(s), jnp.asarray(batch.targets)[..., None], -1)[..., 0]
        ours, other = s / T, t / T
        if settings.top_k:
            other, words = jax.lax.top_k(other, settings.top_k)
            ours = jnp.take_along_axis(ours, words, -1)
        apart = divergence(ours, other, kind=settings.kind, beta=settings.beta)
        each = settings.alpha * T**2 * apart + (1 - settings.alpha) * nll
        if wanted.weight:
            each += wanted.weight * state_distance(hidden, theirs, params["projections"][0], wanted.kind)
        return jnp.sum(mask * each) / mask.sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(some_params(objective.specs(STUDENT), 0))
    return grads, value


def close(ours, theirs, tol=1e-4) -> None:
    def one(a, b):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=tol * np.abs(b).max() + 1e-7, rtol=tol)

    jax.tree.map(one, ours, theirs)


CASES = {
    "forward": Distillation(temperature=2.0),
    "reverse": Distillation(kind="reverse", alpha=0.8),
    "jsd": Distillation(kind="jsd", beta=0.3, alpha=1.0, temperature=1.5),
    "cross entropy alone": Distillation(alpha=0.0),
    "likeliest words": Distillation(top_k=7, temperature=2.0),
    "features": Distillation(features=FeatureLoss(weight=0.7)),
    "features by squares": Distillation(features=FeatureLoss(weight=0.7, kind="mse")),
}


@pytest.mark.parametrize("name", corners(CASES, ["forward", "likeliest words", "features"]))
def test_loss_and_gradient_equal_the_formula_over_whole_logits(name):
    grads, told = measured(CASES[name])
    want_grads, want = plain(CASES[name])
    np.testing.assert_allclose(told["loss"], want, rtol=1e-5)
    close(grads, want_grads)
    assert told["divergence"] > 0 and told["nll"] > 0 and 0 <= told["token_accuracy"] <= 1


@pytest.mark.thorough
def test_parts_add_up_to_the_whole_batch():
    close(measured(CASES["features"], parts=4), measured(CASES["features"]), tol=1e-5)


@pytest.mark.thorough
def test_a_mesh_gives_what_one_device_gives():
    wanted = dataclasses.replace(CASES["features"], attention=AttentionLoss(weight=0.5), kind="jsd")
    placement = Placement(make_mesh(dict(fsdp=2, context=2, tensor=2)), TRAIN)
    close(measured(wanted, placement=placement), measured(wanted))


def test_the_teachers_top_tokens_on_disk_equal_the_live_teachers():
    batch, ctx = some_batch(0), context()
    words, logprobs = jax.jit(lambda b: likeliest(ctx.frozen, TEACHER, b, ctx, 7))(batch)
    stored = dataclasses.replace(batch, columns={"teacher_tokens": words, "teacher_logprobs": logprobs})
    from_rows = dataclasses.replace(CASES["likeliest words"], teacher="disk")
    close(measured(from_rows, stored), measured(CASES["likeliest words"]), tol=1e-5)


@pytest.mark.thorough
def test_features_after_chosen_layers_with_layers_scanned_and_recomputed():
    """A model's first layers are a model: the teacher's first layer against the student's, and both their last."""
    wanted = FeatureLoss(weight=0.7, student=(1, 2), teacher=(1, 3))
    grads, told = measured(Distillation(features=wanted))
    assert len(grads["projections"]) == 2 and all(np.abs(g).max() > 0 for g in grads["projections"])
    last = measured(Distillation(features=FeatureLoss(weight=0.7)))[1]["features"]
    first = measured(Distillation(features=FeatureLoss(weight=0.7, student=(1,), teacher=(1,))))[1]["features"]
    assert np.isfinite([first, last, told["features"]]).all() and first != last
    close(measured(Distillation(features=wanted), remat="full", scan=True), (grads, told))


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3.1", "qwen3", "gemma3"])
def test_attention_maps_equal_those_of_transformers(name):
    """Of packed documents, each as by itself: windows, caps, norms of queries and keys, grouped heads."""
    theirs, folder = reference(name)
    model, rng = load(folder, dtype="f32"), np.random.default_rng(0)
    documents = [rng.integers(3, 160, n).tolist() for n in (9, 13)]
    batch = packed([documents], 24)
    found = [
        attention_map(i + 1, model.params, model.config, batch, context()) for i in range(len(model.config.layers))
    ]
    for start, document in zip((0, 9), documents, strict=True):
        with torch.no_grad():
            maps = theirs(torch.tensor([document]), output_attentions=True).attentions
        own = slice(start, start + len(document))
        for ours, want in zip(found, maps, strict=True):
            np.testing.assert_allclose(ours[0, own, own], want[0].mean(0), atol=2e-5)
            assert np.all(np.asarray(ours[0, own])[:, [i < start or i >= own.stop for i in range(24)]] == 0)


@pytest.mark.thorough
def test_attention_is_learnt_from_chosen_layers():
    wanted = Distillation(attention=AttentionLoss(weight=0.7, student=(1, 2), teacher=(2, 3)))
    grads, told = measured(wanted)
    plain_grads, without = measured(Distillation())
    np.testing.assert_allclose(told["loss"] - without["loss"], 0.7 * told["attention"], rtol=1e-4)
    moved = np.abs(grads["layers"][0]["attn"]["k"] - plain_grads["layers"][0]["attn"]["k"]).max()
    assert told["attention"] > 0 and moved > 1e-6
    close(measured(wanted, parts=2), (grads, told), tol=1e-4)


def test_the_divergence_of_equal_maps_is_0_and_its_gradient_equals_the_formula():
    rng = np.random.default_rng(3)
    a, b = (np.tril(rng.random((2, 6, 6))) + 0.1 * np.eye(6) for _ in range(2))
    a, b = a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)
    assert np.abs(map_divergence(jnp.asarray(b), jnp.asarray(b))).max() < 1e-6
    value, grad = jax.value_and_grad(lambda x: map_divergence(x, jnp.asarray(b, jnp.float32)).sum())(jnp.asarray(a))
    x, seen = torch.tensor(a, requires_grad=True), torch.tensor(b > 0)
    want = (torch.tensor(b)[seen] * (torch.tensor(b)[seen] / x[seen]).log()).sum()
    want.backward()
    assert x.grad is not None
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad, rtol=1e-4, atol=1e-6)


def test_layers_without_keys_of_their_own_are_refused():
    cfg = parse_config(CONFIGS["latent"])
    with refuses("distillation.attention", UnsupportedError, naming="layer 1 of a deepseek_v3 model"):
        attention_map(1, some_params(spec(cfg), 0), cfg, some_batch(0), context())


def test_projections_are_trained_and_not_exported(tmp_path):
    handed = {}
    objective = divergence_objective(
        CASES["features"], policy, teacher, TEACHER, export=lambda *given: handed.update(given[2])
    )
    params = some_params(objective.specs(STUDENT), 0)
    assert params["projections"][0].shape == (48, 32)
    objective.export(tmp_path, STUDENT, params, None, jnp.float32)
    assert set(params) - set(handed) == {"projections"}


@pytest.mark.thorough
def test_held_out_rows_have_the_training_metrics():
    objective, batch = divergence_objective(CASES["forward"], policy, teacher, TEACHER), some_batch(0)
    params = some_params(objective.specs(STUDENT), 0)
    sums, count = jax.jit(lambda p, b: objective.held_out(p, STUDENT, b, context()))(params, batch)
    _, told = measured(CASES["forward"])
    for name, value in sums.items():
        np.testing.assert_allclose(value / count, told[name], rtol=1e-5)


def test_a_student_equal_to_its_teacher_has_no_divergence():
    objective = divergence_objective(Distillation(alpha=1.0), policy, policy, STUDENT)
    params, ctx = some_params(spec(STUDENT), 0), context()
    grads, told, _ = jax.jit(lambda p, b: gradients(p, STUDENT, objective, b, ctx))(params, some_batch(0))
    assert abs(told["divergence"]) < 1e-6 and max(np.abs(g).max() for g in jax.tree.leaves(grads)) < 1e-6


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_teacher_of_another_vocabulary_is_refused():
    other = parse_config(CONFIGS["dense"] | dict(vocab_size=100))
    with refuses("teacher", RecipeError, naming="96 tokens, got 100"):
        measured(Distillation(), teacher_cfg=other)


def test_layers_that_a_model_does_not_have_are_refused():
    wanted = Distillation(features=FeatureLoss(weight=1.0, student=(3,), teacher=(3,)))
    with refuses("student", RecipeError, naming="got 3"):
        divergence_objective(wanted, policy, teacher, TEACHER).specs(STUDENT)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("kind", dict(kind="forwards")),
    ("alpha", dict(alpha=1.5)),
    ("beta", dict(kind="jsd", beta=-0.1)),
    ("beta", dict(kind="forward", beta=0.3)),  # which jsd alone reads
    ("beta", dict(kind="reverse", beta=0.3)),
    ("temperature", dict(temperature=0.0)),
    ("top_k", dict(teacher="disk")),
    ("attention.weight", dict(teacher="disk", top_k=8, attention=AttentionLoss(weight=1.0))),
    ("features.weight", dict(teacher="disk", top_k=8, features=FeatureLoss(weight=1.0))),
]


@pytest.mark.parametrize(("param", "given"), WRONG)
def test_distillation_settings_are_checked(param, given):
    with refuses(param, RecipeError):
        Distillation(**given)


@pytest.mark.parametrize(("param", "student"), [("teacher", (1, 2)), ("student", (0,))])
def test_the_layers_of_features_are_checked(param, student):
    with refuses(param, RecipeError):
        FeatureLoss(weight=1.0, student=student, teacher=(1,))
