"""The objective of preferences: a policy's log-probabilities of whole completions, compared with each other and with a
reference's.

Rows are packed as tune.segments says. Where there is a reference it is a second model, run beside the first
(`reference: live`), or its log-probabilities are a column of the rows (`reference: disk`, as `target_logprobs` gives
them). KTO has no pairs: each document is good or bad by itself, by a column `label` of 1 or -1 at each of its tokens.

B rows, T tokens, S documents of a row at most.

Learning from preferences: DPO and its relatives, with a reference that is run, read from disk or not needed.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Column, Params
from dovetail.models.config import ModelConfig
from dovetail.ops.moe import RouterStats
from dovetail.ops.token_loss import TokenScores, token_scores
from dovetail.train.objective import Loads, Measured, Metrics, Objective, StepContext, hidden_states, loads_of
from dovetail.tune import preference_losses as losses
from dovetail.tune.policy import Model, frozen_model, head_of, kept_model, policy_of, unembed_of
from dovetail.tune.preference_losses import Judged
from dovetail.tune.sections import Preference
from dovetail.tune.segments import Pair, are_there, is_chosen, is_last, num_pairs, pairs, segment_sums
from dovetail.tune.settings import Dpo

PLAIN = {
    "hinge": losses.hinge, "apo_zero": losses.apo_zero, "apo_down": losses.apo_down, "bco_pair": losses.bco_pair,
}  # fmt: skip
#  # of ratios and beta alone


class PreferenceWeight(NamedTuple):
    """Of a whole batch. Neither is 0: what there is none of adds 0."""

    judged: jax.Array  # pairs; of KTO, documents
    learnt: jax.Array  # targets of the completions to learn


class Sums(NamedTuple):
    """Of the documents of a part."""

    logps: jax.Array  # [B, S]
    ratios: jax.Array  # [B, S]: with the reference's taken off, where there is one
    lengths: jax.Array  # [B, S] targets
    correct: jax.Array  # [] targets of the completions to learn that no other word outdoes


def preference_objective(settings: Preference, policy: Model, reference: Model | None, most: int) -> Objective:
    """`policy` and `reference` make models of the trained weights and the context's frozen ones; no row holds more than
    `most` documents."""
    compared, is_kto = _Compared(settings, policy, reference, most), settings.is_kto
    columns = {"reference": Column()} if settings.source == "disk" else {}
    return Objective(
        compared.documents if is_kto else compared.pairs,
        weight=_documents_weight if is_kto else _pairs_weight,
        columns=columns | ({"label": Column()} if is_kto else {}),
        held_out=compared.held_out,
    )


def target_logprobs(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """A model's log-probability of each target, [B, T] in f32, 0 where there is none; without a gradient. What a row's
    column `reference` holds."""
    scores, _ = _scores(params, cfg, batch, dataclasses.replace(ctx, remat="none"))
    return jax.lax.stop_gradient(jnp.where(batch.loss_mask > 0, scores.logprobs, 0.0))


def _scores(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext
) -> tuple[TokenScores, dict[int, RouterStats]]:
    hidden, stats = hidden_states(params, cfg, batch, ctx)
    scores = token_scores(hidden, head_of(params, cfg), batch.targets, **unembed_of(cfg, ctx))
    return scores, stats


@dataclass(frozen=True)
class _Compared:
    settings: Preference
    policy: Model
    reference: Model | None
    most: int

    def pairs(
        self, params: Params, cfg: ModelConfig, batch: Batch, weight: PreferenceWeight, ctx: StepContext
    ) -> Measured:
        sums, loads = self._sums(params, cfg, batch, ctx, is_chosen(batch.segment_ids))
        there = pairs(are_there(batch.segment_ids, self.most)).rejected
        judged = _judge(self.settings, pairs(sums.ratios), pairs(sums.lengths))
        written = _written(self.settings, pairs(sums.logps), there)
        logps = pairs(jax.lax.stop_gradient(sums.logps))
        numbers = {
            "chosen_reward": judged.chosen, "rejected_reward": judged.rejected,
            "reward_margin": judged.chosen - judged.rejected, "reward_accuracy": judged.chosen > judged.rejected,
            "chosen_logp": logps.chosen, "rejected_logp": logps.rejected,
        }  # fmt: skip
        found = _measured(judged.loss, numbers, there, sums, weight, loads)
        return dataclasses.replace(found, loss=found.loss + written / weight.learnt)

    def documents(
        self, params: Params, cfg: ModelConfig, batch: Batch, weight: PreferenceWeight, ctx: StepContext
    ) -> Measured:
        """Measure a part by KTO's loss. The policy's KL from the reference is max(0, the mean ratio) over the part's
        documents of label 0 (with `accumulate`, not over the whole batch, as in TRL). They serve the estimate alone:
        prompts with completions of other prompts (data.example_store.mismatched)."""
        wanted, label = self.settings, batch.columns["label"]
        sums, loads = self._sums(params, cfg, batch, ctx, label > 0)
        there = are_there(batch.segment_ids, self.most)
        label = segment_sums(jnp.where(is_last(batch.segment_ids), label, 0.0), batch.segment_ids, self.most)
        apart = there & (label == 0)
        estimated = jnp.where(apart.any(), apart, there)
        kl = jnp.sum(jnp.where(estimated, sums.ratios, 0.0)) / jnp.maximum(estimated.sum(), 1)
        kl = jax.lax.stop_gradient(jnp.maximum(kl, 0.0))
        rated = losses.kto(
            sums.ratios, label, kl, beta=wanted.beta, desirable=wanted.desirable, undesirable=wanted.undesirable
        )
        numbers = {
            "reward_margin": jnp.sign(label) * rated.reward, "kl": jnp.broadcast_to(kl, label.shape),
            "reward_accuracy": label * (rated.reward - wanted.beta * kl) > 0,
            "logp": jax.lax.stop_gradient(sums.logps),
        }  # fmt: skip
        return _measured(rated.loss, numbers, there & (label != 0), sums, weight, loads)

    def _sums(
        self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, learnt: jax.Array
    ) -> tuple[Sums, Loads]:
        scores, stats = _scores(self.policy(params, ctx), cfg, batch, ctx)
        counts = batch.loss_mask > 0
        logps = jnp.where(counts, scores.logprobs, 0.0)
        ratios = logps - self._reference(params, cfg, batch, ctx)
        of = functools.partial(segment_sums, segment_ids=batch.segment_ids, most=self.most)
        correct = jnp.sum(jnp.where(counts & learnt, scores.best, 0.0))
        return Sums(of(logps), of(ratios), of(counts), correct), loads_of(stats)

    def _reference(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array | float:
        """Log-probabilities of the targets, [B, T]; 0 elsewhere."""
        if self.settings.source == "none":
            return 0.0
        if self.settings.source == "disk":
            return jnp.where(batch.loss_mask > 0, batch.columns["reference"], 0.0)
        assert self.reference is not None, "settings.reference is live"
        return target_logprobs(self.reference(params, ctx), cfg, batch, ctx)

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        """Sums over pairs or documents: the accuracy of tokens, which is none of these, is left out."""
        is_kto, one = self.settings.is_kto, jnp.ones(())
        measure, count, of = (
            (self.documents, _num_documents, _documents_weight) if is_kto else (self.pairs, _num_pairs, _pairs_weight)
        )
        whole = of(batch)  # a mean over tokens (sft) counts once for each pair
        found = measure(params, cfg, batch, PreferenceWeight(one, whole.learnt / whole.judged), ctx)
        sums = {name: value for name, value in found.metrics.items() if name != "token_accuracy"}
        return {"loss": found.loss, **sums}, count(batch)


def _judge(settings: Preference, ratios: Pair, lengths: Pair) -> Judged:
    """Return the weighted sum of the losses of pairs (sft is one of tokens), with the rewards of the first."""
    each = [
        (weight, _one(name, settings, ratios, lengths)) for name, weight in settings.weights.items() if name != "sft"
    ]
    return each[0][1]._replace(loss=sum((weight * judged.loss for weight, judged in each), jnp.zeros(())))


def _written(settings: Preference, logps: Pair, there: jax.Array) -> jax.Array:
    """Return the cross entropy of the chosen completions, summed over their tokens, times the weight of sft."""
    return settings.weights.get("sft", 0.0) * jnp.sum(jnp.where(there, -logps.chosen, 0.0))


def _one(name: str, settings: Preference, ratios: Pair, lengths: Pair) -> Judged:
    beta, smoothing = settings.beta, settings.label_smoothing
    means = Pair(*(x / jnp.maximum(length, 1.0) for x, length in zip(ratios, lengths, strict=True)))
    match name:
        case "sigmoid":
            return losses.dpo(*ratios, beta=beta, label_smoothing=smoothing)
        case "robust":
            return losses.robust(*ratios, beta=beta, label_smoothing=smoothing)
        case "hinge" | "apo_zero" | "apo_down" | "bco_pair":
            return PLAIN[name](*ratios, beta=beta)
        case "ipo":
            return losses.ipo(*means, beta=beta)
        case "orpo":
            return losses.orpo(*means, beta=beta)
    assert name == "simpo", name
    return losses.simpo(*means, beta=beta, gamma=settings.gamma, label_smoothing=smoothing)


def _measured(
    loss: jax.Array, numbers: Metrics, there: jax.Array, sums: Sums, weight: PreferenceWeight, loads: Loads
) -> Measured:
    """The part's share of means over what is `there`."""

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(there, x.astype(jnp.float32), 0.0)) / weight.judged

    metrics = {name: mean(x) for name, x in numbers.items()}
    return Measured(mean(loss), metrics | {"token_accuracy": sums.correct / weight.learnt}, loads)


def _pairs_weight(batch: Batch) -> PreferenceWeight:
    return _weight(_num_pairs(batch), batch, is_chosen(batch.segment_ids))


def _documents_weight(batch: Batch) -> PreferenceWeight:
    return _weight(_num_documents(batch), batch, batch.columns["label"] > 0)


def _weight(judged: jax.Array, batch: Batch, learnt: jax.Array) -> PreferenceWeight:
    targets = ((batch.loss_mask > 0) & learnt).sum().astype(jnp.float32)
    return PreferenceWeight(jnp.maximum(judged, 1.0), jnp.maximum(targets, 1.0))


def _num_pairs(batch: Batch) -> jax.Array:
    return num_pairs(batch.segment_ids)


def _num_documents(batch: Batch) -> jax.Array:
    """That are judged."""
    return (is_last(batch.segment_ids) & (batch.columns["label"] != 0)).sum().astype(jnp.float32)


def dpo_objective(settings: Dpo) -> Objective:
    policy, kept = policy_of(settings), settings.kept_reference
    reference = kept_model(policy) if kept else lambda params, ctx: ctx.frozen
    found = preference_objective(settings.preference, policy.params, reference, settings.most_documents)
    frozen = policy.frozen
    if frozen is None and settings.preference.source == "live" and not kept:
        frozen = frozen_model(settings.weights, settings.held, settings.precision.compute)
    return dataclasses.replace(found, specs=policy.specs, frozen=frozen, initial=policy.initial, export=policy.export)
