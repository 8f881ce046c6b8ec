"""The output head of a model in a step, as ops.token_loss takes it."""

from __future__ import annotations

from typing import Any

from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.train.objective import StepContext


def head_of(params: Params, cfg: ModelConfig) -> Any:
    return params["embed"] if cfg.tied else params["head"]


def unembed_of(cfg: ModelConfig, ctx: StepContext) -> dict[str, Any]:
    """ops.token_loss.Unembed."""
    return dict(scale=cfg.logit_scale, softcap=cfg.logit_softcap, dtype=ctx.logits, placement=ctx.placement)
