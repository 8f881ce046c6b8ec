"""Supervised fine-tuning: cross entropy on the assistant's tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax

from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.train.launch import Ended
from dovetail.train.objective import Measured, Metrics, Objective, StepContext, cross_entropy, hidden_states
from dovetail.train.routers import loads_of
from dovetail.tune.policy import Policy, policy_of
from dovetail.tune.run import tune
from dovetail.tune.settings import Sft


def sft(
    recipe: str | Path | Sft | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Fine-tune a model on conversations, or on prompts with their completions.

        dt.sft(model="smollm2-135m", data="chats.jsonl", lora={"r": 16}, steps=200, run_dir="runs/chat")
        dt.sft(model="smollm2-135m", data=[{"messages": [...]}, ...], steps=200)

    recipe: a YAML file, or settings; without one, `model` and `steps` must be given. data: a file, a folder, a list
    of records, or the keys of a recipe's `data` as a dict. All else is as dt.pretrain has it.
    """
    return tune(Sft, sft_objective, recipe, data, run_dir, show=show, overrides=overrides)


def sft_objective(settings: Sft) -> Objective:
    policy = policy_of(settings)
    return Objective(
        partial(_measure, policy=policy), specs=policy.specs, held_out=partial(_held_out, policy=policy),
        frozen=policy.frozen, initial=policy.initial, export=policy.export,
    )  # fmt: skip


def _measure(
    params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext, *, policy: Policy
) -> Measured:
    model = policy.params(params, ctx)
    hidden, stats = hidden_states(model, cfg, batch, ctx)
    loss, parts = cross_entropy(model, cfg, hidden, batch, ctx, trains_head=policy.trains_head)
    return Measured(loss / weight, {"token_accuracy": parts["correct"] / weight}, loads_of(stats))


def _held_out(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, *, policy: Policy
) -> tuple[Metrics, jax.Array]:
    model = policy.params(params, ctx)
    hidden, _ = hidden_states(model, cfg, batch, ctx)
    _, parts = cross_entropy(model, cfg, hidden, batch, ctx)
    return {"loss": parts["nll"], "token_accuracy": parts["correct"]}, batch.loss_mask.sum()
