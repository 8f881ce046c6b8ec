"""The objective of reinforcement learning: an algorithm's loss on each token that the policy chose.

`loss_mask` holds what a token weighs in the whole batch (losses.token_weights), so the loss is a plain sum, and a batch
taken in parts has the very gradient of the whole one. Further columns, each at the token whose target it is about:
`advantages`; `sampler`, the log-probability that the sampler reported; and where the recipe asks for them `old` and
`plain` (see tune.rl.scorer), `reference`, `support`, `mask` and `masks` (see tune.rl.tool_grammars), a critic's
`values` and `returns`, and `top_entropy`, 1 at the tokens that are trained where those are only some.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from dovetail.core.errors import UserError
from dovetail.core.types import Batch, Column, Params
from dovetail.io.outline import config_of
from dovetail.models.config import ModelConfig
from dovetail.ops.token_loss import Allowed, TokenScores, token_scores
from dovetail.train.objective import Loads, Measured, Metrics, Objective, StepContext, hidden_states, loads_of
from dovetail.tune.distill import distill_objective
from dovetail.tune.policy import Policy, head_of, policy_of, unembed_of
from dovetail.tune.rl.algorithms import loss_of
from dovetail.tune.rl.critic import ACTOR, CRITIC, both_initial, both_specs, values_of
from dovetail.tune.rl.losses import PolicyLoss, importance, kl, kl_loss, value_loss
from dovetail.tune.rl.settings import Rl
from dovetail.tune.segments import segment_sums

EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)  # between the bins in which ratios are counted


def rl_objective(settings: Rl, own: PolicyLoss | None = None) -> Objective:
    """`own`: a user's loss, in place of the algorithm's."""
    if settings.algo == "gkd":
        return distill_objective(settings)
    policy, wanted = policy_of(settings), settings.wanted
    learnt = _Learnt(settings, policy, own or loss_of(wanted))
    objective = Objective(
        learnt.measure, weight=_tokens, columns=columns(settings), specs=policy.specs, held_out=_no_rows,
        frozen=policy.frozen, initial=policy.initial, export=policy.export,
    )  # fmt: skip
    return _with_critic(objective, policy, settings) if settings.has_critic else objective


def columns(settings: Rl) -> dict[str, Column]:
    number = Column()
    found = {"advantages": number, "sampler": number}
    found |= {"old": number} if settings.scores_first else {}
    found |= {"plain": number} if settings.is_reshaped else {}
    found |= {"reference": number} if settings.wanted.beta else {}
    found |= {"values": number, "returns": number} if settings.has_critic else {}
    found |= {"top_entropy": number} if settings.selects_tokens else {}
    found |= {"support": Column("int32", width=settings.sampling.top_k)} if settings.has_support else {}
    if not settings.has_masks:
        return found
    words = -(-config_of(settings.model).vocab // 32)
    return found | {"mask": Column("int32"), "masks": Column("uint32", width=words, table=True)}


def policy_scores(
    model: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, ctx: StepContext, settings: Rl
) -> TokenScores:
    """By the distribution that was sampled from: with its temperature, among its words."""
    support = batch.columns.get("support")  # all of them are words that a grammar allows, where there is one
    return token_scores(
        hidden, head_of(model, cfg), batch.targets, entropy=True, support=support,
        allowed=allowed_words(batch) if support is None else None, temperature=settings.sampling.temperature,
        **unembed_of(cfg, ctx),
    )  # fmt: skip


def allowed_words(batch: Batch) -> Allowed | None:
    """By a grammar (tune.rl.tool_grammars)."""
    return Allowed(batch.columns["masks"], batch.columns["mask"]) if "masks" in batch.columns else None


@dataclass(frozen=True)
class _Learnt:
    settings: Rl
    policy: Policy
    loss: PolicyLoss

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        settings, wanted, column = self.settings, self.settings.wanted, batch.columns
        mask = batch.loss_mask > 0
        scores, loads = self._scores(params, cfg, batch, ctx)
        logps = scores.logprobs
        old = column["old"] if settings.scores_first else stop_gradient(logps)
        most = min(settings.most_documents, ctx.documents or settings.most_documents)
        mean = functools.partial(_sequence_mean, batch=batch, most=most)
        loss, seen = self.loss(logps, old, column["advantages"], mask, mean)
        trainer = column["plain"] if settings.is_reshaped else old
        if wanted.correction != "none":
            loss = loss * importance(trainer, column["sampler"], mask, wanted.cap, beyond=wanted.correction)
        bonus = wanted.entropy * scores.entropy if wanted.entropy and scores.entropy is not None else 0.0
        loss = loss - bonus
        if settings.selects_tokens:
            loss = loss * column["top_entropy"]
        numbers = {"entropy": scores.entropy, "clip_fraction": seen["clipped"], **_gaps(trainer, column["sampler"])}
        if wanted.beta:
            loss = loss + wanted.beta * kl_loss(logps, column["reference"], mask, wanted.kl)
            numbers["kl"] = kl(logps, column["reference"], mask, "k3")
        if settings.has_critic:
            value = self._value_loss(params, cfg, batch, mask, ctx)
            loss, numbers["value_loss"] = loss + settings.critic.weight * value, value
        total = jnp.sum(jnp.where(mask, loss, 0.0) * batch.loss_mask)
        return Measured(total, _means(numbers, mask, weight) | _greatest(trainer, column["sampler"], mask), loads)

    def _scores(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[TokenScores, Loads]:
        model = self.policy.params(params[ACTOR] if self.settings.has_critic else params, ctx)
        hidden, stats = hidden_states(model, cfg, batch, ctx)
        return policy_scores(model, cfg, hidden, batch, ctx, self.settings), loads_of(stats)

    def _value_loss(
        self, params: Params, cfg: ModelConfig, batch: Batch, mask: jax.Array, ctx: StepContext
    ) -> jax.Array:
        values = values_of(params[CRITIC], self.policy, cfg, batch, ctx)
        column = batch.columns
        return value_loss(values, column["values"], column["returns"], mask, self.settings.critic.clip)[0]


# --- of sequences -----------------------------------------------------------------------------------------------------


def _sequence_mean(x: jax.Array, batch: Batch, most: int) -> jax.Array:
    """[B, T]: each token's number averaged over the tokens of its sequence that count."""
    counts = batch.loss_mask > 0
    sums = segment_sums(jnp.where(counts, x, 0.0), batch.segment_ids, most)  # [B, S]
    means = sums / jnp.maximum(segment_sums(counts, batch.segment_ids, most), 1.0)
    return jnp.take_along_axis(means, jnp.maximum(batch.segment_ids - 1, 0), axis=1)


# --- what is reported -------------------------------------------------------------------------------------------------


def _gaps(trainer: jax.Array, sampler: jax.Array) -> Metrics:
    """How far the sampler's log-probabilities were from the trainer's, and how often their ratio was in each bin."""
    difference = stop_gradient(trainer) - sampler
    ratio = jnp.exp(jnp.clip(difference, -20.0, 20.0))
    bins = jnp.digitize(ratio, jnp.asarray(EDGES))
    counted = {name: bins == i for i, name in enumerate(ratio_bins())}
    return {"gap": jnp.abs(difference), "ratio": ratio, **counted}


def ratio_bins() -> tuple[str, ...]:
    """The metrics that count them."""
    spans = zip((None, *EDGES), (*EDGES, None), strict=True)
    return tuple(f"ratio_{'' if low is None else low}_{'' if high is None else high}" for low, high in spans)


def _greatest(trainer: jax.Array, sampler: jax.Array, mask: jax.Array) -> Metrics:
    return {"gap_max": jnp.max(jnp.where(mask, jnp.abs(stop_gradient(trainer) - sampler), 0.0))}


def _means(numbers: Metrics, mask: jax.Array, weight: jax.Array) -> Metrics:
    """The part's share of means over the batch's tokens that count."""
    return {
        name: stop_gradient(jnp.sum(jnp.where(mask, x.astype(jnp.float32), 0.0)) / weight)
        for name, x in numbers.items()
    }


def _tokens(batch: Batch) -> jax.Array:
    return jnp.maximum((batch.loss_mask > 0).sum().astype(jnp.float32), 1.0)


def _no_rows(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
    raise UserError("held-out prompts are answered and judged (exam), not measured by a loss")


def _with_critic(objective: Objective, policy: Policy, settings: Rl) -> Objective:
    return replace(
        objective,
        specs=both_specs(policy),
        initial=functools.partial(both_initial, policy=policy, settings=settings),
        export=lambda folder, cfg, params, *rest: policy.export(folder, cfg, params[ACTOR], *rest),
    )
