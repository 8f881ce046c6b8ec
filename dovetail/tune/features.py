"""Hidden states of a student made like a teacher's of another width: through a projection that is learnt with it.

Hidden states after i layers are those of the model that ends there: its first i layers and its last norm. To get them
short of the last layer, these i layers run once more.

D the student's model dim, E the teacher's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.choice import require
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.ops.linear import matmul
from dovetail.train.objective import StepContext, hidden_states
from dovetail.tune.distill_settings import Attention

LEAST_NORM = 1e-6


def places(settings: Attention, cfg: ModelConfig, teacher_cfg: ModelConfig) -> list[tuple[int, int]]:
    """(layer of the student, layer of the teacher), from 1, that are compared."""
    for name, model in (("student", cfg), ("teacher", teacher_cfg)):
        deepest, has = max(getattr(settings, name), default=0), len(model.layers)
        require(deepest <= has, f"{name} must name some of the {has} layers of that model; got {deepest}")
    last = (len(cfg.layers), len(teacher_cfg.layers))
    return list(zip(settings.student, settings.teacher, strict=True)) or [last]


def projections(number: int, cfg: ModelConfig, teacher_cfg: ModelConfig) -> tuple[ParamSpec, ...]:
    shape = (teacher_cfg.dim, cfg.dim)
    return tuple(
        ParamSpec(shape, (None, "embed"), Stored((f"distillation.projections.{i}.weight",), shape))
        for i in range(number)
    )


def states_after(
    layers: int, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, last: jax.Array | None
) -> jax.Array:
    """[B, T, D]; `last` is what the whole model gives, where it is known."""
    if layers == len(cfg.layers) and last is not None:
        return last
    first = dataclasses.replace(cfg, layers=cfg.layers[:layers])
    return hidden_states({**params, "layers": params["layers"][:layers]}, first, batch, ctx)[0]


def unlikeness(ours: jax.Array, theirs: jax.Array, projection: Any, kind: str) -> jax.Array:
    """Of the student's states [..., D] and the teacher's [..., E], [...] in f32: 1 - cos, or the mean square of the
    difference."""
    a, b = matmul(ours, projection).astype(jnp.float32), theirs.astype(jnp.float32)
    if kind == "mse":
        return jnp.mean((a - b) ** 2, axis=-1)
    norms = jnp.sqrt(jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1) + LEAST_NORM**2)
    return 1.0 - jnp.sum(a * b, axis=-1) / norms
