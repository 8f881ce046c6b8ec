"""Define the objective of a reward model: a score per document, trained on pairs of a better and a worse document.

The score is a projection of the hidden state of a document's last token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.compute import compute_of
from dovetail.core.types import Batch, Column, Params
from dovetail.io.hf import read_params
from dovetail.io.hub import resolve
from dovetail.io.load import open_checkpoint
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import score
from dovetail.models.spec import spec
from dovetail.train.objective import Frozen, Loads, Measured, Metrics, Objective, StepContext, hidden_states, loads_of
from dovetail.train.prepare import Ready
from dovetail.tune.policy import Model, Policy, policy_of
from dovetail.tune.preference_losses import bradley_terry
from dovetail.tune.sections import RewardLoss
from dovetail.tune.segments import are_there, is_last, num_pairs, pairs, segment_sums
from dovetail.tune.settings import Reward


def score_objective(settings: RewardLoss, policy: Model, most: int) -> Objective:
    """Return the objective of reward settings.

    Args:
        settings: The loss.
        policy: Returns the model's weights from the trained ones without `score`, which is always trained.
        most: The most documents of a row.
    """
    scored = _Scored(settings, policy, most)
    return Objective(
        scored.measure,
        weight=_pairs,
        columns={"margin": Column()} if settings.margin else {},
        held_out=scored.held_out,
    )


@dataclass(frozen=True)
class _Scored:
    """The loss and metrics of scored pairs."""

    settings: RewardLoss
    policy: Model
    most: int

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        """Measure the pairs of a microstep."""
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
        """Return the scores [B, S], and the loads of routers."""
        own = {name: x for name, x in params.items() if name != "score"}
        hidden, stats = hidden_states(self.policy(own, ctx), cfg, batch, ctx)
        return self._at_ends(batch, score(params, hidden)), loads_of(stats)

    def _margin(self, batch: Batch) -> jax.Array | float:
        return pairs(self._at_ends(batch, batch.columns["margin"])).chosen if self.settings.margin else 0.0

    def _at_ends(self, batch: Batch, values: jax.Array) -> jax.Array:
        """Return the value at each document's last token, [B, S]."""
        return segment_sums(jnp.where(is_last(batch.segment_ids), values, 0.0), batch.segment_ids, self.most)

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        """Return sums over the pairs of held-out rows, and the number of pairs."""
        found = self.measure(params, cfg, batch, jnp.ones(()), ctx)
        return {"loss": found.loss, **found.metrics}, num_pairs(batch.segment_ids)


def _pairs(batch: Batch) -> jax.Array:
    return jnp.maximum(num_pairs(batch.segment_ids), 1.0)


HEADS = ("head", "score")


def reward_objective(settings: Reward) -> Objective:
    """Return the objective of a recipe for a reward model."""
    policy = policy_of(settings)
    found = score_objective(settings.reward, policy.params, settings.most_documents)
    initial = partial(_initial, settings=settings, policy=policy)
    found = dataclasses.replace(found, initial=initial, check=policy.check, beside=policy.beside)
    if policy.frozen is None:
        return found
    return dataclasses.replace(
        found, specs=lambda cfg: {**policy.specs(cfg), "score": spec(cfg)["score"]},
        frozen=_without_head(policy.frozen, settings), export=policy.export,
    )  # fmt: skip


def _without_head(base: Frozen, settings: Reward) -> Frozen:
    """Return an adapter's base without its head: of a causal language model, or of a reward model."""

    def load(cfg: ModelConfig, placement: Any) -> Params:
        return _trunk(base.load(open_checkpoint(resolve(settings.weights))[1], placement))

    return Frozen(lambda cfg, placement: _trunk(base.abstract(cfg, placement)), load)


def _trunk(params: Params) -> Params:
    return {name: part for name, part in params.items() if name not in HEADS}


def _initial(ready: Ready, settings: Reward, policy: Policy) -> Params:
    """Return the initial weights: of a causal language model, or of a reward model.

    A missing score and new adapters are initialised in train.state.
    """
    path = resolve(settings.weights)
    source, cfg, _ = open_checkpoint(path)
    if settings.lora is None:
        dtype = compute_of(settings.precision.params).dtype
        given = read_params(source, cfg, dtype, str(path), ready.placement)
        return {name: part for name, part in given.items() if name != "head"}
    given = policy.initial(ready) if policy.initial else {}
    if not cfg.scored:
        return given
    abstract: Any = ready.abstract_state.params["score"]
    return {
        "score": jax.device_put(np.asarray(source.read("score.weight"), abstract.dtype), abstract.sharding),
        **given,
    }
