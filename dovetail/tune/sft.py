"""Define the objective of supervised fine-tuning: cross entropy of the trained tokens."""

from __future__ import annotations

from functools import partial

import jax

from dovetail.core.training import TorchModel
from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.models.rounding import straight_through
from dovetail.train.external import external_objective
from dovetail.train.objective import Measured, Metrics, Objective, StepContext, cross_entropy, hidden_states, loads_of
from dovetail.tune.policy import Policy, columns_of_images, policy_of
from dovetail.tune.settings import Sft


def sft_objective(settings: Sft) -> Objective:
    """Return the objective of a recipe for supervised fine-tuning."""
    if isinstance(settings.model, TorchModel):
        return external_objective(settings)
    policy, scheme = policy_of(settings), settings.quantize
    return Objective(
        partial(_measure, policy=policy, scheme=scheme), specs=policy.specs,
        held_out=partial(_held_out, policy=policy, scheme=scheme), frozen=policy.frozen, initial=policy.initial,
        export=partial(policy.export, scheme=scheme) if scheme else policy.export, check=policy.check,
        beside=policy.beside, columns=columns_of_images(settings),
    )  # fmt: skip


def _measure(
    params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext, *, policy: Policy, scheme: str
) -> Measured:
    model = _model(params, cfg, ctx, policy, scheme)
    hidden, stats = hidden_states(model, cfg, batch, ctx)
    loss, parts = cross_entropy(model, cfg, hidden, batch, ctx, trains_head=policy.trains_head)
    return Measured(loss / weight, {"token_accuracy": parts["correct"] / weight}, loads_of(stats))


def _model(params: Params, cfg: ModelConfig, ctx: StepContext, policy: Policy, scheme: str) -> Params:
    """Return the weights that a step computes with; with `scheme` they are rounded."""
    model = policy.params(params, ctx)
    return straight_through(model, cfg, scheme) if scheme else model


def _held_out(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, *, policy: Policy, scheme: str
) -> tuple[Metrics, jax.Array]:
    model = _model(params, cfg, ctx, policy, scheme)
    hidden, _ = hidden_states(model, cfg, batch, ctx)
    _, parts = cross_entropy(model, cfg, hidden, batch, ctx)
    return {"loss": parts["nll"], "token_accuracy": parts["correct"]}, batch.loss_mask.sum()
