"""The pretraining objective: next-token cross entropy, z loss, multi-token prediction and router balance."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch, Params
from dovetail.models.block import block
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import remember
from dovetail.models.mtp import mtp_hidden, with_mtp
from dovetail.models.spec import spec
from dovetail.ops.moe import RouterStats
from dovetail.train.objective import (
    Measured,
    Objective,
    StepContext,
    balanced,
    cross_entropy,
    hidden_states,
    loads_of,
    targets,
)
from dovetail.train.settings import Pretrain, PretrainLoss, check_pretrain


class TokenCounts(NamedTuple):
    """Hold the weight of a whole batch."""

    targets: jax.Array
    tokens: jax.Array  # non-padding tokens, which routers see


def next_token(settings: Pretrain) -> Objective:
    """Return the objective of a pretraining recipe."""
    loss = settings.loss
    return Objective(
        functools.partial(_measure, wanted=loss),
        weight=lambda batch: TokenCounts(targets(batch), _tokens(batch)),
        specs=lambda cfg: with_mtp(spec(cfg), cfg) if loss.mtp else spec(cfg),
        after_update=functools.partial(balanced, rate=loss.router_bias_rate),
        check=functools.partial(check_pretrain, loss),
    )


def _tokens(batch: Batch) -> jax.Array:
    return jnp.maximum((batch.segment_ids > 0).sum().astype(jnp.float32), 1.0)


def _measure(
    params: Params, cfg: ModelConfig, batch: Batch, weight: TokenCounts, ctx: StepContext, *, wanted: PretrainLoss
) -> Measured:
    """Return the loss of a part; the reported loss is the cross entropy alone."""
    hidden, stats = hidden_states(params, cfg, batch, ctx)
    loss, parts = cross_entropy(params, cfg, hidden, batch, ctx, wanted.z)
    loss, metrics = loss / weight.targets, {name: value / weight.targets for name, value in parts.items()}
    metrics["loss"] = metrics.pop("nll")
    if wanted.mtp:
        further, dealt = _further(params, cfg, hidden, batch, weight, ctx)
        loss, metrics["mtp_loss"] = loss + wanted.mtp * further, jax.lax.stop_gradient(further)
        stats = stats | dealt
    if stats and wanted.router_aux:
        imbalance = sum(dealt.imbalance() for dealt in stats.values()) / (weight.tokens * len(stats))
        loss, metrics["router_imbalance"] = loss + wanted.router_aux * imbalance, jax.lax.stop_gradient(imbalance)
    return Measured(loss, metrics, loads_of(stats))


def _further(
    params: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, weight: TokenCounts, ctx: StepContext
) -> tuple[jax.Array, dict[int, RouterStats]]:
    """Return (mean cross entropy of tokens further ahead, router statistics numbered after the last layer)."""
    depths = mtp_hidden(params, cfg, hidden, batch, ctx.packed(batch), remember(block, ctx.remat))
    total = sum(cross_entropy(params, cfg, h, later, ctx)[0] for h, later, _ in depths)
    dealt = {len(cfg.layers) + k: found for k, (_, _, found) in enumerate(depths) if found is not None}
    return total / (weight.targets * len(depths)), dealt
