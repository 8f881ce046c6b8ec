"""The objective of RL: the algorithm's loss on each token that the policy sampled.

`loss_mask` holds the weight of a token in the whole batch (batches.token_weights), so the loss is a plain sum, and a
batch that is computed in parts has exactly the gradient of the whole. Further columns, each at the position before the
token: `advantages`; `sampler`, the log-probability that the sampler reported; and where the recipe needs them `old` and
`plain` (see tune.rl.scorer), `reference`, `support`, `mask` and `masks` (see tune.rl.tool_grammars), a critic's
`values` and `returns`, and `top_entropy`, 1 at the tokens that are trained if only some are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from dovetail.core.compute import compute_of
from dovetail.core.spec import ParamSpec, Stored, init
from dovetail.core.types import Batch, Column, Params
from dovetail.models.config import ModelConfig
from dovetail.ops.linear import matmul
from dovetail.ops.token_loss import Allowed, TokenScores, token_scores
from dovetail.train.external import model_config
from dovetail.train.objective import Loads, Measured, Metrics, Objective, StepContext, hidden_states, loads_of
from dovetail.train.saves import weights_of_folder
from dovetail.tune.distill import distill_objective
from dovetail.tune.policy import Policy, columns_of_images, head_of, policy_of, unembed_of
from dovetail.tune.rl.algorithms import policy_loss_of
from dovetail.tune.rl.drafter import drafter_bytes, drafter_companion
from dovetail.tune.rl.losses import PolicyLoss, importance, kl, kl_loss, value_loss
from dovetail.tune.rl.sections import DSPARK
from dovetail.tune.rl.settings import POLICY, Rl, beside_policy, check_rl_model
from dovetail.tune.segments import segment_sums

CRITIC, SCORE = "critic", "score"  # keys of the trained tree beside POLICY, if there is a critic
EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)  # between the bins in which importance ratios are counted


def rl_objective(settings: Rl, own: PolicyLoss | None = None) -> Objective:
    """Return the objective of a recipe. `own`: the user's policy loss, in place of the algorithm's."""
    found = distill_objective(settings) if settings.algo == "gkd" else _policy_objective(settings, own)

    def check(cfg: ModelConfig) -> None:
        found.check(cfg)
        check_rl_model(settings, cfg)

    def beside(cfg: ModelConfig, hbm: int | None) -> dict[str, int]:
        drafter = {"drafter": drafter_bytes(settings, cfg)} if has_drafter else {}
        return beside_policy(settings, cfg, hbm) | drafter

    has_drafter = settings.speculation.kind == DSPARK
    companion = drafter_companion(settings) if has_drafter else None
    spare = settings.spare_devices
    return replace(found, check=check, beside=beside, companion=companion, spare_devices=spare)


def _policy_objective(settings: Rl, own: PolicyLoss | None) -> Objective:
    policy = policy_of(settings)
    loss = _RlLoss(settings, policy, own or policy_loss_of(settings.resolved_loss))
    objective = Objective(
        loss.measure, weight=_num_tokens, columns=columns(settings), specs=policy.specs, held_out=_no_held_out_loss,
        frozen=policy.frozen, initial=policy.initial, export=policy.export, check=policy.check,
    )  # fmt: skip
    return _with_critic(objective, policy, settings) if settings.has_critic else objective


def columns(settings: Rl) -> dict[str, Column]:
    """Return the columns of a batch (see the module's docstring)."""
    number = Column()
    found = {"advantages": number, "sampler": number}
    found |= {"old": number} if settings.scores_old_policy else {}
    found |= {"plain": number} if settings.reshapes_logits else {}
    found |= {"reference": number} if settings.resolved_loss.beta else {}
    found |= {"values": number, "returns": number} if settings.has_critic else {}
    found |= {"top_entropy": number} if settings.selects_tokens else {}
    found |= {"support": Column("int32", width=settings.sampling.top_k)} if settings.has_top_k else {}
    found |= columns_of_images(settings)
    if not settings.has_grammar:
        return found
    words = -(-model_config(settings.model).vocab // 32)
    return found | {"mask": Column("int32"), "masks": Column("uint32", width=words, table=True)}


def policy_scores(
    model: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, ctx: StepContext, settings: Rl, banned: int
) -> TokenScores:
    """Return log-probabilities and entropies of the distribution that was sampled: its temperature, its candidates.

    `banned` is the policy's `banned_token`, also if the model is a teacher.
    """
    support = batch.columns.get("support")  # a grammar allows all of these
    return token_scores(
        hidden, head_of(model, cfg), batch.targets, entropy=True, support=support,
        allowed=allowed_tokens(batch) if support is None else None, banned=banned,
        temperature=settings.sampling.temperature, **unembed_of(cfg, ctx),
    )  # fmt: skip


def banned_token(cfg: ModelConfig) -> int:
    """Return the token that the policy never samples, an image token, for which there would be no image; -1: none."""
    return cfg.vision.image_token if cfg.vision else -1


def allowed_tokens(batch: Batch) -> Allowed | None:
    """Return the tokens that a grammar allowed (tune.rl.tool_grammars); None without a grammar."""
    return Allowed(batch.columns["masks"], batch.columns["mask"]) if "masks" in batch.columns else None


@dataclass(frozen=True)
class _RlLoss:
    settings: Rl
    policy: Policy
    loss: PolicyLoss

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        settings, wanted, column = self.settings, self.settings.resolved_loss, batch.columns
        mask = batch.loss_mask > 0
        scores, loads = self._scores(params, cfg, batch, ctx)
        logps = scores.logprobs
        old = column["old"] if settings.scores_old_policy else stop_gradient(logps)
        most = min(settings.most_documents, ctx.documents or settings.most_documents)
        mean = functools.partial(_sequence_mean, batch=batch, most=most)
        loss, seen = self.loss(logps, old, column["advantages"], mask, mean)
        trainer, sampler = column["plain"] if settings.reshapes_logits else old, column["sampler"]
        if wanted.importance_sampling_mode != "none":
            cap, mode = wanted.importance_sampling_cap, wanted.importance_sampling_mode
            loss = loss * importance(trainer, sampler, mask, cap, mode=mode)
        bonus = wanted.entropy_coef * scores.entropy if wanted.entropy_coef and scores.entropy is not None else 0.0
        loss = loss - bonus
        if settings.selects_tokens:
            loss = loss * column["top_entropy"]
        numbers = {"entropy": scores.entropy, "clip_fraction": seen["clipped"], **_gaps(trainer, sampler)}
        if wanted.beta:
            loss = loss + wanted.beta * kl_loss(logps, column["reference"], mask, wanted.kl_estimator)
            numbers["kl"] = kl(logps, column["reference"], mask, "k3")
        if settings.has_critic:
            value = self._value_loss(params, cfg, batch, mask, ctx)
            loss, numbers["value_loss"] = loss + settings.critic.vf_coef * value, value
        total = jnp.sum(jnp.where(mask, loss, 0.0) * batch.loss_mask)
        return Measured(total, _means(numbers, mask, weight) | _largest_gap(trainer, sampler, mask), loads)

    def _scores(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[TokenScores, Loads]:
        model = self.policy.params(params[POLICY] if self.settings.has_critic else params, ctx)
        hidden, stats = hidden_states(model, cfg, batch, ctx)
        return policy_scores(model, cfg, hidden, batch, ctx, self.settings, banned_token(cfg)), loads_of(stats)

    def _value_loss(
        self, params: Params, cfg: ModelConfig, batch: Batch, mask: jax.Array, ctx: StepContext
    ) -> jax.Array:
        values, column = values_of(params[CRITIC], self.policy, cfg, batch, ctx), batch.columns
        return value_loss(values, column["values"], column["returns"], mask, self.settings.critic.cliprange_value)[0]


def _sequence_mean(x: jax.Array, batch: Batch, most: int) -> jax.Array:
    """Return, at each token, the mean over the tokens of its sequence that count, [B, T]."""
    counts = batch.loss_mask > 0
    sums = segment_sums(jnp.where(counts, x, 0.0), batch.segment_ids, most)  # [B, S]
    means = sums / jnp.maximum(segment_sums(counts, batch.segment_ids, most), 1.0)
    return jnp.take_along_axis(means, jnp.maximum(batch.segment_ids - 1, 0), axis=1)


# --- metrics ----------------------------------------------------------------------------------------------------------


def _gaps(trainer: jax.Array, sampler: jax.Array) -> Metrics:
    """Return how far the sampler's log-probabilities are from the trainer's, and in which bin their ratio is."""
    difference = stop_gradient(trainer) - sampler
    ratio = jnp.exp(jnp.clip(difference, -20.0, 20.0))
    bins = jnp.digitize(ratio, jnp.asarray(EDGES))
    counted = {name: bins == i for i, name in enumerate(ratio_bins())}
    return {"gap": jnp.abs(difference), "ratio": ratio, **counted}


def ratio_bins() -> tuple[str, ...]:
    """Return the names of the metrics that count ratios in bins."""
    spans = zip((None, *EDGES), (*EDGES, None), strict=True)
    return tuple(f"ratio_{'' if low is None else low}_{'' if high is None else high}" for low, high in spans)


def _largest_gap(trainer: jax.Array, sampler: jax.Array, mask: jax.Array) -> Metrics:
    return {"gap_max": jnp.max(jnp.where(mask, jnp.abs(stop_gradient(trainer) - sampler), 0.0))}


def _means(numbers: Metrics, mask: jax.Array, weight: jax.Array) -> Metrics:
    """Return this part's share of the means over the batch's tokens that count."""
    return {
        name: stop_gradient(jnp.sum(jnp.where(mask, x.astype(jnp.float32), 0.0)) / weight)
        for name, x in numbers.items()
    }


def _num_tokens(batch: Batch) -> jax.Array:
    return jnp.maximum((batch.loss_mask > 0).sum().astype(jnp.float32), 1.0)


def _no_held_out_loss(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
    raise AssertionError("RL evaluates completions of held-out prompts (tune.rl.evaluation), not a held-out loss")


# --- the critic, a second model with a value head ---------------------------------------------------------------------


def _with_critic(objective: Objective, policy: Policy, settings: Rl) -> Objective:
    return replace(
        objective,
        specs=_specs_with_critic(policy),
        initial=functools.partial(_initial_with_critic, policy=policy, settings=settings),
        export=lambda folder, cfg, params, *rest: policy.export(folder, cfg, params[POLICY], *rest),
    )


def values_of(critic: Params, policy: Policy, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """Return the critic's value of each token, [B, T] f32: the reward that it expects from there on."""
    own = {name: part for name, part in critic.items() if name != SCORE}
    hidden, _ = hidden_states(policy.params(own, ctx), cfg, batch, ctx)
    return matmul(hidden, critic[SCORE], out_dtype=jnp.float32)[..., 0]


def _specs_with_critic(policy: Policy) -> Callable[[ModelConfig], Any]:
    def specs(cfg: ModelConfig) -> dict[str, Any]:
        own, shape = policy.specs(cfg), (1, cfg.dim)
        score = ParamSpec(shape, (None, "embed"), Stored(("score.weight",), shape))
        return {POLICY: own, CRITIC: {**_without_head(own), SCORE: score}}

    return specs


def _initial_with_critic(ready: Any, policy: Policy, settings: Rl) -> Params:
    """Return the initial weights: both models start as the given one, and every value is 0."""
    dtype = compute_of(settings.precision.params).dtype
    shardings = jax.tree.map(lambda x: x.sharding, ready.abstract_state.params)
    score = jax.device_put(jnp.zeros((1, ready.cfg.dim), dtype), shardings[CRITIC][SCORE])
    if settings.lora:
        make = functools.partial(init, ready.specs[POLICY], dtype=dtype, shardings=shardings[POLICY])
        own, critic = make(jax.random.key(settings.seed)), make(jax.random.key(settings.seed + 1))
    else:
        own = weights_of_folder(ready)
        critic = jax.tree.map(jnp.copy, _without_head(own))
    return {POLICY: own, CRITIC: {**critic, SCORE: score}}


def _without_head(tree: Any) -> Any:
    return {name: part for name, part in tree.items() if name != "head"}
