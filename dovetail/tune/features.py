"""Hidden states of a student made like a teacher's of another width: through a projection that is learnt with it.

Hidden states after i layers are those of the model that ends there: its first i layers and its last norm. To get them
short of the last layer, these i layers run once more.

D the student's model dim, E the teacher's.

What a layer attends to, written out: for learning from a teacher, where the maps [T, T] of chosen layers are the
target. Nothing else makes them.

B rows, T tokens, N heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.choice import require
from dovetail.core.errors import UserError
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Batch, Packed, Params
from dovetail.models.attention import Attention
from dovetail.models.block import norm
from dovetail.models.config import ModelConfig
from dovetail.ops.linear import matmul
from dovetail.ops.packed import packed_attention
from dovetail.train.objective import StepContext, hidden_states
from dovetail.tune.sections import AttentionLoss

LEAST_NORM = 1e-6


def places(settings: AttentionLoss, cfg: ModelConfig, teacher_cfg: ModelConfig) -> list[tuple[int, int]]:
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


LEAST = 1e-9  # a weight below it counts as this much: the logarithm of what is not attended to is not needed


def attention_map(number: int, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """[B, T, T] in f32: what each token of layer `number`, from 1, gives to each, the mean over its heads."""
    layer, p = cfg.layers[number - 1], params["layers"][number - 1]
    attn = layer.attn
    if not isinstance(attn, Attention) or attn.kv_from is not None or not layer.pre_norm:
        raise UserError(
            f"attention is compared in layers with keys and a norm of their own; layer {number} of this {cfg.family} "
            "model has none: set attention.weight=0, or name other layers"
        )
    # The layer norms its input, so the input's own length does not matter: that of a model which ends before it, with
    # a norm that has no weight, will do.
    flat = jnp.full((cfg.dim,), 1.0 - cfg.norm_offset, params["norm"].dtype)
    x = states_after(number - 1, {**params, "norm": flat}, cfg, batch, ctx, None)
    table = attn.rope.tables(batch.positions) if attn.rope else ()
    packed = ctx.packed(batch)
    h = norm(p["attn_norm"], cfg, x)
    q, (k, _) = attn.project_and_store(p["attn"], h, table, packed, None, cfg.norm_eps, cfg.norm_offset)
    return _weights(attn, q, k, packed, p["attn"].get("sinks")).mean(axis=2)


def _weights(attn: Attention, q: jax.Array, k: jax.Array, packed: Packed, sinks: jax.Array | None) -> jax.Array:
    """[B, T, N, T]: of values that each stand for their own place, attention gives its weights."""
    B, T, K, _ = k.shape
    places = jnp.broadcast_to(jnp.eye(T)[:, None, :], (B, T, K, T))
    how: dict[str, Any] = dict(window=attn.window, softcap=attn.softcap, sinks=sinks)
    return packed_attention(q, k, places, dataclasses.replace(packed, placement=None), scale=attn.scale, **how)


def map_divergence(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """KL(theirs || ours) of each token's weights [..., T], [...]."""
    p, q = jnp.maximum(theirs, LEAST), jnp.maximum(ours, LEAST)
    return jnp.sum(theirs * (jnp.log(p) - jnp.log(q)), axis=-1)
