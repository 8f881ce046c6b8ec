"""Compare every loss of RL and its gradient with the formula in torch and with TRL's, on ragged sequences.

Positions outside the mask hold NaN and infinities.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.advantages import SCALED, SCALES, group_advantages
from dovetail.tune.rl.batches import token_weights, top_entropy
from dovetail.tune.rl.losses import (
    LOSS_TYPES,
    MAX_LOG_RATIO,
    Cispo,
    Clipped,
    Gspo,
    Plain,
    Sapo,
    check_kl_loss,
    importance,
    kl,
    kl_loss,
    make_policy_loss,
    value_loss,
)

pytestmark = pytest.mark.slow

NAN, NO_NUMBERS = np.nan, [np.nan, np.inf, -np.inf, 1e30]
LONGEST = 9
LOSSES = {
    "clipped": Clipped(epsilon=0.2, epsilon_high=0.2),
    "clipped, higher": Clipped(epsilon=0.2, epsilon_high=0.28),
    "gspo": Gspo(epsilon=0.05, epsilon_high=0.08),
    "clipped, two-sided": Clipped(epsilon=0.2, epsilon_high=0.2, delta=1.3),
    "gspo, two-sided": Gspo(epsilon=0.05, epsilon_high=0.08, delta=1.15),
    "cispo": Cispo(epsilon_high=1.3),
    "sapo": Sapo(),
    "plain": Plain(),
}


class Rollout(NamedTuple):
    """Ragged sequences, one per row [B, T]; all f32, the mask of 0 and 1."""

    logprobs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    reference: np.ndarray
    mask: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.mask.sum(axis=1)


def rollout(seed: int, absent: list[float] = NO_NUMBERS, count: int = 20) -> Rollout:
    """Return sequences with gaps in their masks, as tools leave them; one has no masked token."""
    rng = np.random.default_rng(seed)
    shape = (count, LONGEST)
    mask = (np.arange(LONGEST) < rng.integers(3, LONGEST + 1, count)[:, None]) & (rng.random(shape) < 0.8)
    mask[:, 0], mask[2] = True, False
    logprobs = -rng.gamma(1.0, 1.0, shape)
    old, reference = (logprobs + 0.3 * rng.normal(size=shape) for _ in range(2))
    advantages = np.repeat(rng.normal(size=(count, 1)), LONGEST, axis=1)
    numbers = [np.where(mask, x, rng.choice(absent, shape)) for x in (logprobs, old, advantages, reference)]
    return Rollout._make(np.asarray(x, np.float32) for x in [*numbers, mask])


def sequence_mean(mask: np.ndarray, values: jax.Array) -> jax.Array:
    """Return the mean of each row; 0 / 0 for one without masked tokens."""
    return jnp.broadcast_to((values * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True), values.shape)


def graded(loss: Callable[[jax.Array], tuple[jax.Array, Any]], logprobs: np.ndarray) -> tuple[float, np.ndarray, Any]:
    (value, told), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(logprobs))
    return float(value), np.asarray(grads), told


def ours(
    loss_fn: Any, rows: Rollout, loss_type: str, beta: float = 0.0, kind: str = "k3"
) -> tuple[float, np.ndarray, Any]:
    """Return the loss of the batch, its gradient by the log-probabilities, and diagnostics."""
    weights = token_weights(loss_type, rows.lengths, max_completion_length=LONGEST + 3)[:, None]

    def loss(logprobs: jax.Array) -> tuple[jax.Array, Any]:
        mean = functools.partial(sequence_mean, rows.mask)
        per_token, told = loss_fn(logprobs, *map(jnp.asarray, (rows.old, rows.advantages, rows.mask)), mean)
        if beta:
            per_token += beta * kl_loss(logprobs, jnp.asarray(rows.reference), jnp.asarray(rows.mask), kind)
        return jnp.sum(per_token * weights), told

    return graded(loss, rows.logprobs)


def kept(rows: Rollout) -> list[tuple[torch.Tensor, ...]]:
    """Return the masked values of each sequence in f64: logprobs (with a gradient), old, advantages, reference."""
    found = []
    for *row, mask in zip(*rows, strict=True):
        logprobs, *others = (torch.tensor(x[mask > 0], dtype=torch.float64) for x in row)
        found.append((logprobs.requires_grad_(True), *others))
    return found


def of_tokens(loss_fn: Any, logps: torch.Tensor, old: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logps - old)
    match loss_fn:
        case Gspo(low, high, delta):
            mean = torch.exp((logps - old).mean())  # the form per sequence, not per token
            return -torch.min(torch.clamp(mean, max=delta or 1e9) * adv, torch.clamp(mean, 1 - low, 1 + high) * adv)
        case Clipped(low, high, delta):
            free = torch.clamp(ratio, max=delta or 1e9)
            return -torch.min(free * adv, torch.clamp(ratio, 1 - low, 1 + high) * adv)
        case Sapo(pos, neg):
            tau = torch.where(adv > 0, pos, neg)
            return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * adv
        case Cispo(high):
            return -torch.clamp(ratio, max=high).detach() * adv * logps
    return -adv * logps


def of_batch(loss_type: str, losses: list[torch.Tensor]) -> torch.Tensor:
    match loss_type:
        case "grpo":
            return torch.stack([x.mean() if len(x) else x.sum() for x in losses]).mean()
        case "dr_grpo":
            return torch.cat(losses).sum() / (len(losses) * (LONGEST + 3))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_match_the_formula(name, loss_type):
    loss_fn, rows = LOSSES[name], rollout(LOSS_TYPES.index(loss_type))
    value, grads, told = ours(loss_fn, rows, loss_type)
    sequences = kept(rows)
    want = of_batch(loss_type, [of_tokens(loss_fn, *tokens[:3]) for tokens in sequences])
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    theirs = np.concatenate([logps.grad.numpy() for logps, *_ in sequences if logps.grad is not None])
    np.testing.assert_allclose(grads[rows.mask > 0], theirs, rtol=2e-5, atol=1e-7)
    assert np.all(grads[rows.mask == 0] == 0)
    clipped, ratio = np.asarray(told["clipped"]), np.asarray(told["ratio"])
    assert np.all(clipped[rows.mask == 0] == 0) and np.all(ratio[rows.mask == 0] == 1)
    if name not in ("plain", "sapo"):
        assert 0.02 < clipped[rows.mask > 0].mean() < 0.8
    if name.startswith(("clipped", "gspo")):
        np.testing.assert_array_equal(clipped[rows.mask > 0] > 0, grads[rows.mask > 0] == 0)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_gradient_is_that_of_reinforce(name):
    """The old policy is the current one, and gradient does not flow through it."""
    rows = rollout(4)
    _, want, _ = ours(Plain(), rows, "dapo")

    def its_own(logprobs: jax.Array, _: jax.Array, *others: Any) -> Any:
        return LOSSES[name](logprobs, logprobs, *others)

    _, grads, told = ours(its_own, rows, "dapo")
    np.testing.assert_allclose(grads, want, rtol=1e-6)
    assert np.all(told["ratio"] == 1) and not np.any(told["clipped"])


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_kl_term_and_gradient_match_the_formula(kind):
    rows = rollout(5)
    value, grads, _ = ours(Clipped(), rows, "dapo", beta=0.3, kind=kind)
    sequences, losses = kept(rows), []
    for logps, old, adv, ref in sequences:
        off = (logps - ref) ** 2 / 2 if kind == "k2" else torch.exp(ref - logps) - (ref - logps) - 1
        losses.append(of_tokens(Clipped(), logps, old, adv) + 0.3 * off)
    want = of_batch("dapo", losses)
    want.backward()
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    theirs = np.concatenate([logps.grad.numpy() for logps, *_ in sequences if logps.grad is not None])
    np.testing.assert_allclose(grads[rows.mask > 0], theirs, rtol=2e-5, atol=1e-7)


def test_expected_gradient_of_each_kl_estimator():
    """k1 has none, k2 that of KL(policy || reference), k3 that of KL(reference || policy).

    As numbers, k1 and k3 both estimate KL(policy || reference) without bias.
    """
    rng = np.random.default_rng(6)
    logits, reference = jnp.asarray(rng.normal(size=9)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=9)))

    def expected(logits: jax.Array, kind: str) -> jax.Array:
        logps = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logps)) * kl(logps, reference, jnp.ones(9), kind))

    def divergence(logits: jax.Array, forwards: bool) -> jax.Array:
        p, q = (reference, jax.nn.log_softmax(logits)) if forwards else (jax.nn.log_softmax(logits), reference)
        return jnp.sum(jnp.exp(p) * (p - q))

    found = {kind: jax.grad(expected)(logits, kind) for kind in ("k1", "k2", "k3")}
    np.testing.assert_allclose(found["k1"], 0, atol=1e-6)
    np.testing.assert_allclose(found["k2"], jax.grad(divergence)(logits, False), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["k3"], jax.grad(divergence)(logits, True), rtol=1e-4, atol=1e-6)
    for kind in ("k1", "k3"):
        np.testing.assert_allclose(expected(logits, kind), divergence(logits, False), rtol=1e-5)


def test_gspo_with_several_sequences_in_a_row():
    """GSPO reads only the mean of a token's own sequence, wherever it is."""
    rows, loss_fn = rollout(7, absent=[-3.0], count=6), LOSSES["gspo"]
    ids = np.repeat([[1, 2], [3, 4], [5, 6]], LONGEST, axis=1).reshape(3, -1)
    packed = Rollout(*(x.reshape(3, -1) for x in rows))
    own = (ids[:, :, None] == ids[:, None, :]) * packed.mask[:, None, :]  # [row, token, token that counts with it]

    def mean(values: jax.Array) -> jax.Array:
        return jnp.einsum("bts,bs->bt", own, values) / own.sum(-1)

    together, _ = loss_fn(packed.logprobs, packed.old, packed.advantages, packed.mask, mean)
    apart, _ = loss_fn(*rows[:3], rows.mask, functools.partial(sequence_mean, rows.mask))
    np.testing.assert_allclose(np.reshape(together, apart.shape), apart, rtol=1e-6)


def test_large_log_ratios_stay_finite():
    """e^x would be infinite: a token with advantage 0 has no loss, and no gradient is NaN."""
    far, ones = jnp.asarray([[-1.0, -200.0, -1.0, -1.0]]), jnp.ones((1, 4))
    old, advantages = jnp.asarray([[-200.0, -1.0, -200.0, -1.0]]), jnp.asarray([[0.0, 1.0, -1.0, 2.0]])
    for name, loss_fn in LOSSES.items():
        per_token, told = loss_fn(far, old, advantages, ones, lambda x: x)
        assert np.all(np.isfinite(per_token)) and per_token[0, 0] == 0, name
        assert np.max(told["ratio"]) <= 1.001 * np.exp(MAX_LOG_RATIO), name

        def total(x: jax.Array, loss_fn: Any = loss_fn) -> jax.Array:
            return loss_fn(x, old, advantages, ones, lambda y: y)[0].sum()

        assert np.all(np.isfinite(jax.grad(total)(far))), name


# --- importance sampling and values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_ratios_match_the_formula(level, mode):
    rows, cap = rollout(8), 1.2

    def total(values: jax.Array) -> jax.Array:
        return jnp.broadcast_to(values.sum(axis=1, keepdims=True), values.shape)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def weigh(trainer: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = importance(
            trainer, jnp.asarray(rows.old), jnp.asarray(rows.mask), cap, level=level, mode=mode, sequence_sum=total
        )
        return found.sum(), found

    (_, found), grads = weigh(jnp.asarray(rows.logprobs))
    assert np.all(np.asarray(grads) == 0) and np.all(np.asarray(found)[rows.mask == 0] == 1)
    for row, (trainer, sampler, *_) in enumerate(kept(rows)):
        off = (trainer - sampler).detach()
        ratio = torch.exp(off.sum() + 0 * off if level == "sequence" else off)
        want = torch.clamp(ratio, max=cap) if mode == "truncate" else torch.where(ratio > cap, 0, ratio)
        np.testing.assert_allclose(np.asarray(found)[row, rows.mask[row] > 0], want, rtol=1e-5)
    assert np.any(np.asarray(found) == (cap if mode == "truncate" else 0))


@pytest.mark.parametrize("clip", [0.2, np.inf])
def test_value_loss_and_gradient_match_the_formula(clip):
    rows = rollout(9)
    values, old, returns, mask = rows.logprobs, rows.old, rows.reference, rows.mask

    def loss(values: jax.Array) -> tuple[jax.Array, Any]:
        per_token, told = value_loss(values, jnp.asarray(old), jnp.asarray(returns), jnp.asarray(mask), clip)
        return per_token.sum() / mask.sum(), told

    value, grads, told = graded(loss, values)
    v, o, r = (torch.tensor(x[mask > 0], dtype=torch.float64) for x in (values, old, returns))
    v.requires_grad_(True)
    held = torch.min(torch.max(v, o - clip), o + clip)
    want = 0.5 * torch.max((v - r) ** 2, (held - r) ** 2).mean()
    want.backward()
    assert v.grad is not None
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    np.testing.assert_allclose(grads[mask > 0], v.grad, rtol=1e-4, atol=1e-7)
    assert np.all(grads[mask == 0] == 0)
    np.testing.assert_array_equal(np.asarray(told["clipped"])[mask > 0] > 0, v.grad.numpy() == 0)


# --- normalisation ----------------------------------------------------------------------------------------------------


def test_token_weights():
    lengths = [4, 0, 1]
    np.testing.assert_allclose(token_weights("grpo", lengths), [1 / 12, 0, 1 / 3])
    np.testing.assert_allclose(token_weights("grpo", lengths, num_sequences=2), [1 / 8, 0, 1 / 2])
    np.testing.assert_allclose(token_weights("dapo", lengths), [1 / 5, 0, 1 / 5])
    np.testing.assert_allclose(token_weights("bnpo", lengths, 7, 9), [1 / 5, 0, 1 / 5])
    np.testing.assert_allclose(token_weights("dr_grpo", lengths, max_completion_length=10), [1 / 30, 0, 1 / 30])
    for loss_type in LOSS_TYPES:
        assert not token_weights(loss_type, [0, 0], max_completion_length=4).any()
        assert token_weights(loss_type, [], max_completion_length=4).shape == (0,)


# --- against TRL ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def trainer(trl: Any, loss_type: str, level: str, loss_fn: Any, beta: float, parts: int, quantile: float = 1.0) -> Any:
    """Return an object with what TRL's loss reads of its trainer. The model is the log-probabilities themselves."""
    kept = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, pad_across_processes=lambda x, **_: x
    )
    args = SimpleNamespace(
        use_bias_correction_kl=False, delta=getattr(loss_fn, "delta", None), steps_per_generation=parts,
        sapo_temperature_pos=Sapo.sapo_temperature_pos, sapo_temperature_neg=Sapo.sapo_temperature_neg,
    )  # fmt: skip
    own = SimpleNamespace(
        loss_type=loss_type, importance_sampling_level=level, beta=beta, args=args, accelerator=kept,
        epsilon_low=getattr(loss_fn, "epsilon", None), epsilon_high=getattr(loss_fn, "epsilon_high", None),
        aux_loss_enabled=False, top_entropy_quantile=quantile,
        get_high_entropy_mask=lambda *given: trl.get_high_entropy_mask(own, *given),
        off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=parts,
        max_completion_length=LONGEST + 3, _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (model, entropy_of(model.detach()), None),
    )  # fmt: skip
    return own


def entropy_of(logprobs: Any) -> Any:
    """Return a different number, 0 or more, for each token."""
    return logprobs * logprobs


def by_trl(trl: Any, own: Any, rows: Rollout, parts: int) -> tuple[float, np.ndarray]:
    """Return the loss and its gradient by the log-probabilities, summed over the parts of the batch."""
    logprobs, old, advantages, reference, mask = (torch.tensor(x) for x in rows)
    logprobs.requires_grad_(True)
    total = torch.zeros(())
    for few in torch.arange(len(mask)).chunk(parts):
        ids, prompt = torch.ones_like(mask[few]).long(), torch.ones(len(few), 1).long()
        inputs = dict(
            prompt_ids=prompt, prompt_mask=prompt, completion_ids=ids, completion_mask=mask[few],
            advantages=advantages[few, 0], old_per_token_logps=old[few], ref_per_token_logps=reference[few],
            num_items_in_batch=mask.sum(),
        )  # fmt: skip
        total = total + trl._compute_loss(own, logprobs[few], inputs)
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad.numpy()


TRL_CASES = {
    **{f"{name}, no kl": (name, "token", Clipped(0.2, 0.28), 0.0, 1) for name in LOSS_TYPES},
    **{f"{name}, kl": (name, "token", Clipped(0.2, 0.28), 0.3, 1) for name in LOSS_TYPES},
    **{f"{name} in parts": (name, "token", Clipped(), 0.1, 2) for name in ("grpo", "dapo", "dr_grpo")},
    **{f"gspo, {name}": (name, "sequence", LOSSES["gspo"], 0.0, 1) for name in ("grpo", "dapo")},
    "cispo": ("cispo", "token", LOSSES["cispo"], 0.0, 1),
    "two-sided": ("dapo", "token", LOSSES["clipped, two-sided"], 0.1, 1),
    "gspo, two-sided": ("grpo", "sequence", LOSSES["gspo, two-sided"], 0.0, 1),
    "sapo": ("sapo", "token", LOSSES["sapo"], 0.0, 1),
    "sapo, kl in parts": ("sapo", "token", LOSSES["sapo"], 0.1, 2),
}


@pytest.mark.parametrize("case", TRL_CASES)
def test_loss_and_gradient_match_trl(trl, case):
    loss_type, level, loss_fn, beta, parts = TRL_CASES[case]
    rows = rollout(10, absent=[-3.0, 0.5])
    rows.advantages[:] = rows.advantages[:, :1]  # TRL has one advantage per sequence
    own = trainer(trl, loss_type, level, loss_fn, beta, parts)
    want, want_grads = by_trl(trl, own, rows, parts)
    value, grads, told = ours(loss_fn, rows, {"cispo": "dapo", "sapo": "grpo"}.get(loss_type, loss_type), beta)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads, want_grads, rtol=2e-5, atol=1e-7)
    if isinstance(loss_fn, Clipped) and loss_fn.delta is None and parts == 1:
        share = np.asarray(told["clipped"])[rows.mask > 0].mean()
        np.testing.assert_allclose(share, own._metrics["train"]["clip_ratio/region_mean"][0], rtol=1e-5)


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.55])
def test_top_entropy_quantile_matches_trl(trl, quantile):
    rows, loss_fn = rollout(11, absent=[-3.0, 0.5]), Clipped(0.2, 0.28)
    rows.advantages[:] = rows.advantages[:, :1]
    want, want_grads = by_trl(trl, trainer(trl, "dapo", "token", loss_fn, 0.1, 1, quantile), rows, 1)
    kept = top_entropy(entropy_of(rows.logprobs), rows.mask > 0, quantile)
    assert kept.sum() == 1 if quantile == 0 else abs(kept.sum() / rows.mask.sum() - quantile) < 0.02

    def masked(*given: Any) -> Any:
        loss, told = loss_fn(*given)
        return loss * kept, told

    value, grads, _ = ours(masked, rows, "dapo", beta=0.1)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads, want_grads, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("scale", SCALES)
def test_scale_rewards_matches_trl(trl, scale):
    """TRL computes this within its generation: its lines are repeated here, with its nanstd."""
    from trl.trainer.utils import nanstd

    rewards = np.random.default_rng(12).normal(size=(6, 4))
    rewards[0, 1], rewards[2] = np.nan, np.nan
    flat = torch.tensor(rewards).view(-1)
    mean = torch.nanmean(flat.view(-1, 4), dim=1).repeat_interleave(4)
    std = nanstd(flat).expand_as(flat) if scale == "batch" else nanstd(flat.view(-1, 4), dim=1).repeat_interleave(4)
    want = (flat - mean) / (std + 1e-4 if scale != "none" else 1)
    for by in SCALED:
        found = group_advantages(rewards, by, scale).reshape(-1)
        np.testing.assert_allclose(found, torch.nan_to_num(want), rtol=1e-7)


def test_top_entropy_of_an_empty_mask():
    assert not top_entropy(np.ones((1, 3)), np.zeros((1, 3), bool), 0.2).any()
    assert top_entropy(np.ones((1, 3)), np.ones((1, 3), bool), 1.0).all()


# --- names and refusals -----------------------------------------------------------------------------------------------


def test_a_policy_loss_by_name_or_as_a_function():
    assert make_policy_loss("clipped", epsilon=None, epsilon_high=0.28) == Clipped(0.2, 0.28)
    assert make_policy_loss("gspo", epsilon=None) == Gspo() and make_policy_loss("plain") == Plain()
    assert make_policy_loss("cispo", epsilon_high=4.0) == Cispo(4.0)
    assert make_policy_loss("sapo", sapo_temperature_neg=1.2) == Sapo(1.0, 1.2)

    def mine(logprobs: jax.Array, old: jax.Array, advantages: jax.Array, mask: jax.Array, mean: Any) -> Any:
        return -advantages * logprobs, {}

    assert make_policy_loss(mine, epsilon=None) is mine


ONE = jnp.ones((1, 1))
REFUSED = [
    ("policy_loss", "'clipped'", lambda: make_policy_loss("cliped")),
    ("epsilon", "epsilon_high", lambda: make_policy_loss("cispo", epsilon=0.2)),
    ("delta", "sapo", lambda: make_policy_loss("sapo", delta=4.0)),
    ("epsilon_high", "no settings", lambda: make_policy_loss("plain", epsilon_high=0.2)),
    ("epsilon", "of your own", lambda: make_policy_loss(Clipped(), epsilon=0.2)),
    ("delta", "1.2", lambda: Clipped(delta=1.1)),
    ("epsilon", "1.2", lambda: Clipped(epsilon=1.2)),
    ("epsilon_high", "0.0", lambda: Gspo(epsilon_high=0.0)),
    ("epsilon_high", "largest ratio", lambda: Cispo(0.2)),
    ("sapo_temperature_pos", "0.0", lambda: Sapo(0.0)),
    ("scale_rewards", "groups", lambda: group_advantages([[1.0, 0.0]], "grpo", "groups")),
    ("scale_rewards", "rloo", lambda: group_advantages([[1.0]], "rloo", "batch")),
    ("kl_estimator", "k2", lambda: kl_loss(ONE, ONE, ONE, "k1")),
    ("kl_estimator", "k4", lambda: check_kl_loss("k4")),
    ("importance_sampling_cap", "0.5", lambda: importance(ONE, ONE, ONE, 0.5)),
    ("level", "batch", lambda: importance(ONE, ONE, ONE, level="batch")),
    ("importance_sampling_mode", "drop", lambda: importance(ONE, ONE, ONE, mode="drop")),
    ("sequence_sum", "", lambda: importance(ONE, ONE, ONE, level="sequence")),
    ("cliprange_value", "0.0", lambda: value_loss(ONE, ONE, ONE, ONE, cliprange_value=0.0)),
    ("loss_type", "'dapo'", lambda: token_weights("dapa", [1])),
    ("max_completion_length", "None", lambda: token_weights("dr_grpo", [1])),
    ("num_sequences", "2", lambda: token_weights("grpo", [1, 2, 0], num_sequences=1)),
]


@pytest.mark.parametrize("param, naming, call", REFUSED)
def test_invalid_settings_are_refused(param, naming, call):
    with refuses(param, RecipeError, naming=naming):
        call()
