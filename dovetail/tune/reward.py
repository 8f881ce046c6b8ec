"""The objective of a reward model: a score of each document, read off the hidden state of its last token, learnt from
pairs of which one is better.

The model is one that gives scores (models.score).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Column, Params
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import score
from dovetail.train.objective import Loads, Measured, Metrics, Objective, StepContext, hidden_states
from dovetail.train.routers import loads_of
from dovetail.tune.preference import Model
from dovetail.tune.preference_losses import bradley_terry
from dovetail.tune.preference_settings import RewardLoss
from dovetail.tune.sequences import are_there, is_last, num_pairs, pairs, segment_sums


def reward(settings: RewardLoss, policy: Model, most: int) -> Objective:
    """`policy` makes a model of the trained weights without `score`, which is trained besides. No row holds more than
    `most` documents."""
    scored = _Scored(settings, policy, most)
    return Objective(
        scored.measure,
        weight=_pairs,
        columns={"margin": Column()} if settings.margin else {},
        held_out=scored.held_out,
    )


@dataclass(frozen=True)
class _Scored:
    settings: RewardLoss
    policy: Model
    most: int

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        scores, loads = self._scores(params, cfg, batch, ctx)
        judged = bradley_terry(*pairs(scores), margin=self._margin(batch), centering=self.settings.centering)
        there = pairs(are_there(batch.segment_ids, self.most)).rejected
        numbers = {
            "chosen_reward": judged.chosen, "rejected_reward": judged.rejected,
            "reward_margin": judged.chosen - judged.rejected, "reward_accuracy": judged.chosen > judged.rejected,
        }  # fmt: skip

        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(there, x.astype(jnp.float32), 0.0)) / weight

        return Measured(mean(judged.loss), {name: mean(x) for name, x in numbers.items()}, loads)

    def _scores(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[jax.Array, Loads]:
        """([B, S], the loads of routers)."""
        own = {name: x for name, x in params.items() if name != "score"}
        hidden, stats = hidden_states(self.policy(own, ctx), cfg, batch, ctx)
        return self._at_ends(batch, score(params, hidden)), loads_of(stats)

    def _margin(self, batch: Batch) -> jax.Array | float:
        return pairs(self._at_ends(batch, batch.columns["margin"])).chosen if self.settings.margin else 0.0

    def _at_ends(self, batch: Batch, values: jax.Array) -> jax.Array:
        """The number at each document's last token, [B, S]."""
        return segment_sums(jnp.where(is_last(batch.segment_ids), values, 0.0), batch.segment_ids, self.most)

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        found = self.measure(params, cfg, batch, jnp.ones(()), ctx)
        return {"loss": found.loss, **found.metrics}, num_pairs(batch.segment_ids)


def _pairs(batch: Batch) -> jax.Array:
    return jnp.maximum(num_pairs(batch.segment_ids), 1.0)
