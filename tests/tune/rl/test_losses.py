"""Each loss of reinforcement learning, with its gradient by every token's log-probability, on ragged sequences: against
the formulas written in torch, and against TRL's own. What does not count holds NaN and infinities."""

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

from dovetail.tune.rl.advantages import SCALED, SCALES, group_advantages
from dovetail.tune.rl.losses import (
    AGGREGATIONS,
    FARTHEST,
    Cispo,
    Clipped,
    Gspo,
    Plain,
    Sapo,
    check_kl_loss,
    importance,
    kl,
    kl_loss,
    policy_loss,
    token_weights,
    top_entropy,
    value_loss,
)

NAN, NO_NUMBERS = np.nan, [np.nan, np.inf, -np.inf, 1e30]
LONGEST = 9
LOSSES = {
    "clipped": Clipped(eps_low=0.2, eps_high=0.2),
    "clipped, higher": Clipped(eps_low=0.2, eps_high=0.28),
    "gspo": Gspo(eps_low=0.05, eps_high=0.08),
    "clipped, two-sided": Clipped(eps_low=0.2, eps_high=0.2, delta=1.3),
    "gspo, two-sided": Gspo(eps_low=0.05, eps_high=0.08, delta=1.15),
    "cispo": Cispo(eps_high=1.3),
    "sapo": Sapo(),
    "plain": Plain(),
}


class Rollout(NamedTuple):
    """Of ragged sequences, a row each [B, T]; f32 but for the mask, which is of 0 and 1."""

    logprobs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    reference: np.ndarray
    mask: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.mask.sum(axis=1)


def rollout(seed: int, absent: list[float] = NO_NUMBERS, count: int = 20) -> Rollout:
    """A tool's words stand between those that count, and one sequence has none that does."""
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
    """Where a row is a sequence; 0 / 0 for one in which nothing counts."""
    return jnp.broadcast_to((values * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True), values.shape)


def graded(loss: Callable[[jax.Array], tuple[jax.Array, Any]], logprobs: np.ndarray) -> tuple[float, np.ndarray, Any]:
    (value, told), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(logprobs))
    return float(value), np.asarray(grads), told


def ours(
    loss_fn: Any, rows: Rollout, aggregation: str, beta: float = 0.0, kind: str = "k3"
) -> tuple[float, np.ndarray, Any]:
    """(the whole batch's loss, its gradient by the log-probabilities, diagnostics), as tune.rl adds them up."""
    weights = token_weights(aggregation, rows.lengths, max_tokens=LONGEST + 3)[:, None]

    def loss(logprobs: jax.Array) -> tuple[jax.Array, Any]:
        mean = functools.partial(sequence_mean, rows.mask)
        per_token, told = loss_fn(logprobs, *map(jnp.asarray, (rows.old, rows.advantages, rows.mask)), mean)
        if beta:
            per_token += beta * kl_loss(logprobs, jnp.asarray(rows.reference), jnp.asarray(rows.mask), kind)
        return jnp.sum(per_token * weights), told

    return graded(loss, rows.logprobs)


def kept(rows: Rollout) -> list[tuple[torch.Tensor, ...]]:
    """Of each sequence what counts, in f64: (logprobs, which want a gradient; old; advantages; reference)."""
    found = []
    for *row, mask in zip(*rows, strict=True):
        logprobs, *others = (torch.tensor(x[mask > 0], dtype=torch.float64) for x in row)
        found.append((logprobs.requires_grad_(True), *others))
    return found


def of_tokens(loss_fn: Any, logps: torch.Tensor, old: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logps - old)
    match loss_fn:
        case Gspo(low, high, delta):
            mean = torch.exp((logps - old).mean())  # of the sequence, with its gradient: the form that is not of tokens
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


def of_batch(aggregation: str, losses: list[torch.Tensor]) -> torch.Tensor:
    match aggregation:
        case "grpo":
            return torch.stack([x.mean() if len(x) else x.sum() for x in losses]).mean()
        case "dr_grpo":
            return torch.cat(losses).sum() / (len(losses) * (LONGEST + 3))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_formulas(name, aggregation):
    loss_fn, rows = LOSSES[name], rollout(AGGREGATIONS.index(aggregation))
    value, grads, told = ours(loss_fn, rows, aggregation)
    sequences = kept(rows)
    want = of_batch(aggregation, [of_tokens(loss_fn, *tokens[:3]) for tokens in sequences])
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
def test_on_policy_every_gradient_is_reinforces(name):
    """Where the old policy is this one, all of them pull alike; the old one does not pull back."""
    rows = rollout(4)
    _, want, _ = ours(Plain(), rows, "dapo")

    def its_own(logprobs: jax.Array, _: jax.Array, *others: Any) -> Any:
        return LOSSES[name](logprobs, logprobs, *others)

    _, grads, told = ours(its_own, rows, "dapo")
    np.testing.assert_allclose(grads, want, rtol=1e-6)
    assert np.all(told["ratio"] == 1) and not np.any(told["clipped"])


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_kl_term_and_its_gradient_are_the_formulas(kind):
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


def test_where_each_estimate_of_kl_pulls():
    """The expected gradient over all words of a policy: of k1 none, of k2 that of KL(policy || reference), of k3 that
    of KL(reference || policy); though as numbers both k1 and k3 estimate the first without bias."""
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


def test_sequences_that_share_a_row():
    """GSPO asks only for the mean of a token's own sequence: how they lie is not its concern."""
    rows, loss_fn = rollout(7, absent=[-3.0], count=6), LOSSES["gspo"]
    ids = np.repeat([[1, 2], [3, 4], [5, 6]], LONGEST, axis=1).reshape(3, -1)
    packed = Rollout(*(x.reshape(3, -1) for x in rows))
    own = (ids[:, :, None] == ids[:, None, :]) * packed.mask[:, None, :]  # [row, token, token that counts with it]

    def mean(values: jax.Array) -> jax.Array:
        return jnp.einsum("bts,bs->bt", own, values) / own.sum(-1)

    together, _ = loss_fn(packed.logprobs, packed.old, packed.advantages, packed.mask, mean)
    apart, _ = loss_fn(*rows[:3], rows.mask, functools.partial(sequence_mean, rows.mask))
    np.testing.assert_allclose(np.reshape(together, apart.shape), apart, rtol=1e-6)


def test_a_policy_that_is_far_away_stays_a_number():
    """Where e^x would be infinite: a token without advantage has no loss, and no gradient is NaN."""
    far, ones = jnp.asarray([[-1.0, -200.0, -1.0, -1.0]]), jnp.ones((1, 4))
    old, advantages = jnp.asarray([[-200.0, -1.0, -200.0, -1.0]]), jnp.asarray([[0.0, 1.0, -1.0, 2.0]])
    for name, loss_fn in LOSSES.items():
        per_token, told = loss_fn(far, old, advantages, ones, lambda x: x)
        assert np.all(np.isfinite(per_token)) and per_token[0, 0] == 0, name
        assert np.max(told["ratio"]) <= 1.001 * np.exp(FARTHEST), name

        def total(x: jax.Array, loss_fn: Any = loss_fn) -> jax.Array:
            return loss_fn(x, old, advantages, ones, lambda y: y)[0].sum()

        assert np.all(np.isfinite(jax.grad(total)(far))), name


# --- of a sampler and of a critic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", ["truncate", "drop"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_the_formula(level, beyond):
    rows, cap = rollout(8), 1.2

    def total(values: jax.Array) -> jax.Array:
        return jnp.broadcast_to(values.sum(axis=1, keepdims=True), values.shape)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def weigh(trainer: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = importance(
            trainer, jnp.asarray(rows.old), jnp.asarray(rows.mask), cap, level=level, beyond=beyond, sequence_sum=total
        )
        return found.sum(), found

    (_, found), grads = weigh(jnp.asarray(rows.logprobs))
    assert np.all(np.asarray(grads) == 0) and np.all(np.asarray(found)[rows.mask == 0] == 1)
    for row, (trainer, sampler, *_) in enumerate(kept(rows)):
        off = (trainer - sampler).detach()
        ratio = torch.exp(off.sum() + 0 * off if level == "sequence" else off)
        want = torch.clamp(ratio, max=cap) if beyond == "truncate" else torch.where(ratio > cap, 0, ratio)
        np.testing.assert_allclose(np.asarray(found)[row, rows.mask[row] > 0], want, rtol=1e-5)
    assert np.any(np.asarray(found) == (cap if beyond == "truncate" else 0))


@pytest.mark.parametrize("clip", [0.2, np.inf])
def test_a_value_loss_and_its_gradient_are_the_formula(clip):
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


# --- of a batch -------------------------------------------------------------------------------------------------------


def test_what_a_token_weighs():
    lengths = [4, 0, 1]
    np.testing.assert_allclose(token_weights("grpo", lengths), [1 / 12, 0, 1 / 3])
    np.testing.assert_allclose(token_weights("grpo", lengths, num_sequences=2), [1 / 8, 0, 1 / 2])
    np.testing.assert_allclose(token_weights("dapo", lengths), [1 / 5, 0, 1 / 5])
    np.testing.assert_allclose(token_weights("bnpo", lengths, 7, 9), [1 / 5, 0, 1 / 5])
    np.testing.assert_allclose(token_weights("dr_grpo", lengths, max_tokens=10), [1 / 30, 0, 1 / 30])
    for aggregation in AGGREGATIONS:
        assert not token_weights(aggregation, [0, 0], max_tokens=4).any()
        assert token_weights(aggregation, [], max_tokens=4).shape == (0,)


# --- TRL's own --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def trainer(trl: Any, loss_type: str, level: str, loss_fn: Any, beta: float, parts: int, quantile: float = 1.0) -> Any:
    """What TRL's loss reads of its trainer; the model is the log-probabilities themselves, and the entropy of a token
    is made from its own."""
    kept = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, pad_across_processes=lambda x, **_: x
    )
    args = SimpleNamespace(
        use_bias_correction_kl=False, delta=getattr(loss_fn, "delta", None), steps_per_generation=parts,
        sapo_temperature_pos=Sapo.sapo_temperature_pos, sapo_temperature_neg=Sapo.sapo_temperature_neg,
    )  # fmt: skip
    own = SimpleNamespace(
        loss_type=loss_type, importance_sampling_level=level, beta=beta, args=args, accelerator=kept,
        epsilon_low=getattr(loss_fn, "eps_low", None), epsilon_high=getattr(loss_fn, "eps_high", None),
        aux_loss_enabled=False, top_entropy_quantile=quantile,
        get_high_entropy_mask=lambda *given: trl.get_high_entropy_mask(own, *given),
        off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=parts,
        max_completion_length=LONGEST + 3, _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (model, entropy_of(model.detach()), None),
    )  # fmt: skip
    return own


def entropy_of(logprobs: Any) -> Any:
    """Some number that is 0 or more, and of no two tokens the same."""
    return logprobs * logprobs


def by_trl(trl: Any, own: Any, rows: Rollout, parts: int) -> tuple[float, np.ndarray]:
    """(loss, its gradient by the log-probabilities), added up over the batch's parts."""
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
    **{f"{name}, no kl": (name, "token", Clipped(0.2, 0.28), 0.0, 1) for name in AGGREGATIONS},
    **{f"{name}, kl": (name, "token", Clipped(0.2, 0.28), 0.3, 1) for name in AGGREGATIONS},
    **{f"{name} in parts": (name, "token", Clipped(), 0.1, 2) for name in ("grpo", "dapo", "dr_grpo")},
    **{f"gspo, {name}": (name, "sequence", LOSSES["gspo"], 0.0, 1) for name in ("grpo", "dapo")},
    "cispo": ("cispo", "token", LOSSES["cispo"], 0.0, 1),
    "two-sided": ("dapo", "token", LOSSES["clipped, two-sided"], 0.1, 1),
    "gspo, two-sided": ("grpo", "sequence", LOSSES["gspo, two-sided"], 0.0, 1),
    "sapo": ("sapo", "token", LOSSES["sapo"], 0.0, 1),
    "sapo, kl in parts": ("sapo", "token", LOSSES["sapo"], 0.1, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRL_CASES)
def test_a_loss_and_its_gradient_are_trls(trl, case):
    loss_type, level, loss_fn, beta, parts = TRL_CASES[case]
    rows = rollout(10, absent=[-3.0, 0.5])
    rows.advantages[:] = rows.advantages[:, :1]  # TRL has one of a sequence
    own = trainer(trl, loss_type, level, loss_fn, beta, parts)
    want, want_grads = by_trl(trl, own, rows, parts)
    value, grads, told = ours(loss_fn, rows, {"cispo": "dapo", "sapo": "grpo"}.get(loss_type, loss_type), beta)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads, want_grads, rtol=2e-5, atol=1e-7)
    if isinstance(loss_fn, Clipped) and loss_fn.delta is None and parts == 1:
        share = np.asarray(told["clipped"])[rows.mask > 0].mean()
        np.testing.assert_allclose(share, own._metrics["train"]["clip_ratio/region_mean"][0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.55])
def test_the_loss_of_the_tokens_of_highest_entropy_is_trls(trl, quantile):
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


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_scaled_rewards_are_trls(trl, scale):
    """TRL has this amid its generation: its lines are repeated here, on its own nanstd."""
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


def test_no_tokens_have_no_highest_entropy():
    assert not top_entropy(np.ones((1, 3)), np.zeros((1, 3), bool), 0.2).any()
    assert top_entropy(np.ones((1, 3)), np.ones((1, 3), bool), 1.0).all()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_loss_by_name_or_ones_own():
    assert policy_loss("clipped", eps_low=None, eps_high=0.28) == Clipped(0.2, 0.28)
    assert policy_loss("gspo", eps_low=None) == Gspo() and policy_loss("plain") == Plain()
    assert policy_loss("cispo", eps_high=4.0) == Cispo(4.0)
    assert policy_loss("sapo", sapo_temperature_neg=1.2) == Sapo(1.0, 1.2)

    def mine(logprobs: jax.Array, old: jax.Array, advantages: jax.Array, mask: jax.Array, mean: Any) -> Any:
        return -advantages * logprobs, {}

    assert policy_loss(mine, eps_low=None) is mine


ONE = jnp.ones((1, 1))
REFUSED = {
    "loss must be one of .*Did you mean 'clipped'": lambda: policy_loss("cliped"),
    "eps_low is no setting of the loss cispo, which has eps_high": lambda: policy_loss("cispo", eps_low=0.2),
    "delta is no setting of the loss sapo": lambda: policy_loss("sapo", delta=4.0),
    r"delta must be above 1 \+ eps_high = 1.2, .* got 1.1": lambda: Clipped(delta=1.1),
    "sapo_temperature_pos must be above 0, got 0": lambda: Sapo(0.0),
    "scale_rewards must be one of": lambda: group_advantages([[1.0, 0.0]], "grpo", "groups"),
    "scale_rewards=batch is read by the advantages grpo and dr_grpo": lambda: group_advantages(
        [[1.0]], "rloo", "batch"
    ),
    "eps_high is no setting of the loss plain, which has none": lambda: policy_loss("plain", eps_high=0.2),
    "eps_low: a loss of your own takes no settings": lambda: policy_loss(Clipped(), eps_low=0.2),
    "eps_low must be above 0 and at most 1": lambda: Clipped(eps_low=1.2),
    "eps_high must be above 0": lambda: Gspo(eps_high=0.0),
    "eps_high of cispo must be 1 or more, as the greatest ratio; got 0.2": lambda: Cispo(0.2),
    "kl must be k2 or k3 as a loss; got k1, whose gradient is 0": lambda: kl_loss(ONE, ONE, ONE, "k1"),
    "kl must be one of 'k1', 'k2', 'k3'; got 'k4'": lambda: check_kl_loss("k4"),
    "cap must be 1 or more": lambda: importance(ONE, ONE, ONE, 0.5),
    "level must be one of": lambda: importance(ONE, ONE, ONE, level="batch"),
    "beyond must be one of": lambda: importance(ONE, ONE, ONE, beyond="mask"),
    "sequence_sum must be given": lambda: importance(ONE, ONE, ONE, level="sequence"),
    "clip must be above 0": lambda: value_loss(ONE, ONE, ONE, ONE, clip=0.0),
    "aggregation must be one of .*Did you mean 'dapo'": lambda: token_weights("dapa", [1]),
    "max_tokens must be given where the aggregation is dr_grpo": lambda: token_weights("dr_grpo", [1]),
    "num_sequences must be at least the 2 sequences": lambda: token_weights("grpo", [1, 2, 0], num_sequences=1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_means_nothing_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
