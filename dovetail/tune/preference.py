"""Define the objective of preference training: DPO and related losses.

The log-probabilities of whole completions are compared with each other and with those of a reference. The reference is
a second model that runs beside the policy (`preference.reference: live`), or a column of the rows that was computed
before (`disk`, by `target_logprobs`). Rows are packed as in tune.segments. KTO has no pairs: the column `label` says of
each document whether it is desirable (1 or -1).

B rows, T tokens, S the most documents of a row.
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
from dovetail.train.external import frozen_logits
from dovetail.train.objective import Loads, Measured, Metrics, Objective, StepContext, hidden_states, loads_of
from dovetail.tune import preference_losses as losses
from dovetail.tune.policy import Model, columns_of_images, frozen_model, head_of, kept_model, policy_of, unembed_of
from dovetail.tune.preference_losses import Judged
from dovetail.tune.sections import Preference
from dovetail.tune.segments import Pair, are_there, is_chosen, is_last, num_pairs, pairs, segment_sums
from dovetail.tune.settings import Dpo

# Losses of the ratios and beta alone.
PLAIN = {
    "hinge": losses.hinge, "apo_zero": losses.apo_zero, "apo_down": losses.apo_down, "bco_pair": losses.bco_pair,
}  # fmt: skip


class PreferenceWeight(NamedTuple):
    """Counts of a whole batch, at least 1 each."""

    judged: jax.Array  # pairs; of KTO, documents
    learnt: jax.Array  # targets of the chosen (KTO: desirable) completions


class DocumentSums(NamedTuple):
    """Sums over the documents of a microstep."""

    logps: jax.Array  # [B, S]
    ratios: jax.Array  # [B, S] logps minus those of the reference, if there is one
    lengths: jax.Array  # [B, S] targets
    correct: jax.Array  # [] targets of the chosen completions that are the likeliest token


def preference_objective(settings: Preference, policy: Model, reference: Model | None, most: int) -> Objective:
    """Return the objective of preference settings.

    Args:
        settings: The loss.
        policy: Returns the policy's weights from the trained ones and the step's context.
        reference: The same for a live reference.
        most: The most documents of a row.
    """
    compared, is_kto = _Compared(settings, policy, reference, most), settings.is_kto
    columns = {"reference": Column()} if settings.source == "disk" else {}
    return Objective(
        compared.documents if is_kto else compared.pairs,
        weight=_documents_weight if is_kto else _pairs_weight,
        columns=columns | ({"label": Column()} if is_kto else {}),
        held_out=compared.held_out,
    )


def target_logprobs(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """Return a model's log-probability of each target, [B, T] f32, 0 elsewhere, without a gradient."""
    if cfg.external:
        logprobs = jax.nn.log_softmax(frozen_logits(params, cfg, batch, ctx))
        found = jnp.take_along_axis(logprobs, batch.targets[..., None], axis=-1)[..., 0]
    else:
        found = _scores(params, cfg, batch, dataclasses.replace(ctx, remat="none"))[0].logprobs
    return jax.lax.stop_gradient(jnp.where(batch.loss_mask > 0, found, 0.0))


def _scores(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext
) -> tuple[TokenScores, dict[int, RouterStats]]:
    hidden, stats = hidden_states(params, cfg, batch, ctx)
    scores = token_scores(hidden, head_of(params, cfg), batch.targets, **unembed_of(cfg, ctx))
    return scores, stats


@dataclass(frozen=True)
class _Compared:
    """The loss and metrics of pairs, or of KTO's documents."""

    settings: Preference
    policy: Model
    reference: Model | None
    most: int

    def pairs(
        self, params: Params, cfg: ModelConfig, batch: Batch, weight: PreferenceWeight, ctx: StepContext
    ) -> Measured:
        """Measure the pairs of a microstep."""
        sums, loads = self._sums(params, cfg, batch, ctx, is_chosen(batch.segment_ids))
        there = pairs(are_there(batch.segment_ids, self.most)).rejected
        judged = _judge(self.settings, pairs(sums.ratios), pairs(sums.lengths))
        nll = _chosen_nll(self.settings, pairs(sums.logps), there)
        logps = pairs(jax.lax.stop_gradient(sums.logps))
        numbers = {
            "chosen_reward": judged.chosen, "rejected_reward": judged.rejected,
            "reward_margin": judged.chosen - judged.rejected, "reward_accuracy": judged.chosen > judged.rejected,
            "chosen_logp": logps.chosen, "rejected_logp": logps.rejected,
        }  # fmt: skip
        found = _measured(judged.loss, numbers, there, sums, weight, loads)
        return dataclasses.replace(found, loss=found.loss + nll / weight.learnt)

    def documents(
        self, params: Params, cfg: ModelConfig, batch: Batch, weight: PreferenceWeight, ctx: StepContext
    ) -> Measured:
        """Measure the documents of a microstep by KTO's loss.

        The KL of the policy from the reference is max(0, the mean ratio) over the microstep's documents of label 0, as
        in TRL. They are prompts with completions of other prompts (data.example_store.mismatched), and count in this
        estimate only.
        """
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
    ) -> tuple[DocumentSums, Loads]:
        scores, stats = _scores(self.policy(params, ctx), cfg, batch, ctx)
        counts = batch.loss_mask > 0
        logps = jnp.where(counts, scores.logprobs, 0.0)
        ratios = logps - self._reference(params, cfg, batch, ctx)
        of = functools.partial(segment_sums, segment_ids=batch.segment_ids, most=self.most)
        correct = jnp.sum(jnp.where(counts & learnt, scores.best, 0.0))
        return DocumentSums(of(logps), of(ratios), of(counts), correct), loads_of(stats)

    def _reference(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array | float:
        """Return the reference's log-probabilities of the targets, [B, T]; 0 elsewhere."""
        if self.settings.source == "none":
            return 0.0
        if self.settings.source == "disk":
            return jnp.where(batch.loss_mask > 0, batch.columns["reference"], 0.0)
        assert self.reference is not None, "settings.reference is live"
        return target_logprobs(self.reference(params, ctx), cfg, batch, ctx)

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        """Return sums over pairs or documents. Token accuracy is left out, because it is a mean over tokens."""
        is_kto, one = self.settings.is_kto, jnp.ones(())
        measure, count, of = (
            (self.documents, _num_documents, _documents_weight) if is_kto else (self.pairs, _num_pairs, _pairs_weight)
        )
        whole = of(batch)  # a mean over tokens (sft) counts once for each pair
        found = measure(params, cfg, batch, PreferenceWeight(one, whole.learnt / whole.judged), ctx)
        sums = {name: value for name, value in found.metrics.items() if name != "token_accuracy"}
        return {"loss": found.loss, **sums}, count(batch)


def _judge(settings: Preference, ratios: Pair, lengths: Pair) -> Judged:
    """Return the weighted sum of the pair losses (all but sft), with the rewards of the first."""
    each = [
        (weight, _one(name, settings, ratios, lengths)) for name, weight in settings.weights.items() if name != "sft"
    ]
    return each[0][1]._replace(loss=sum((weight * judged.loss for weight, judged in each), jnp.zeros(())))


def _chosen_nll(settings: Preference, logps: Pair, there: jax.Array) -> jax.Array:
    """Return the weight of sft times the cross entropy of the chosen completions, summed over their tokens."""
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
    loss: jax.Array, numbers: Metrics, there: jax.Array, sums: DocumentSums, weight: PreferenceWeight, loads: Loads
) -> Measured:
    """Return the microstep's share of the means over the documents that are `there`."""

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
    """Return the number of documents with a label."""
    return (is_last(batch.segment_ids) & (batch.columns["label"] != 0)).sum().astype(jnp.float32)


def dpo_objective(settings: Dpo) -> Objective:
    """Return the objective of a recipe for preferences."""
    policy, kept = policy_of(settings), settings.kept_reference
    reference = kept_model(policy) if kept else lambda params, ctx: ctx.frozen
    found = preference_objective(settings.preference, policy.params, reference, settings.most_documents)
    frozen = policy.frozen
    if frozen is None and settings.preference.source == "live" and not kept:
        frozen = frozen_model(settings.weights, settings.held, settings.precision.compute)
    return dataclasses.replace(
        found, specs=policy.specs, frozen=frozen, initial=policy.initial, export=policy.export, check=policy.check,
        beside=policy.beside, columns={**found.columns, **columns_of_images(settings)},
    )  # fmt: skip
