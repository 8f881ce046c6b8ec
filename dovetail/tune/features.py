"""Compare the inside of a student with that of a teacher: hidden states and attention maps of chosen layers.

Hidden states after i layers are those of the model that ends there: its first i layers and its last norm. Before the
last layer, these i layers run a second time. Hidden states of another width are compared through a learnt projection.

B rows, T tokens, N heads, D the student's model dim, E the teacher's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.choice import require
from dovetail.core.errors import UnsupportedError
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
LEAST = 1e-9  # attention weights below this are raised to it before the logarithm


def layer_pairs(settings: AttentionLoss, cfg: ModelConfig, teacher_cfg: ModelConfig) -> list[tuple[int, int]]:
    """Return the layers that are compared, from 1: (student's, teacher's)."""
    for name, model in (("student", cfg), ("teacher", teacher_cfg)):
        deepest, has = max(getattr(settings, name), default=0), len(model.layers)
        require(deepest <= has, f"{name} must name some of the {has} layers of that model; got {deepest}", param=name)
    last = (len(cfg.layers), len(teacher_cfg.layers))
    return list(zip(settings.student, settings.teacher, strict=True)) or [last]


# --- hidden states ----------------------------------------------------------------------------------------------------


def projections(number: int, cfg: ModelConfig, teacher_cfg: ModelConfig) -> tuple[ParamSpec, ...]:
    """Declare the projections [E, D] from the student's states to the teacher's."""
    shape = (teacher_cfg.dim, cfg.dim)
    return tuple(
        ParamSpec(shape, (None, "embed"), Stored((f"distillation.projections.{i}.weight",), shape))
        for i in range(number)
    )


def states_after(
    layers: int, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, last: jax.Array | None
) -> jax.Array:
    """Return the hidden states after some layers, [B, T, D]; `last`: those of the whole model, where they are known."""
    if layers == len(cfg.layers) and last is not None:
        return last
    first = dataclasses.replace(cfg, layers=cfg.layers[:layers])
    return hidden_states({**params, "layers": params["layers"][:layers]}, first, batch, ctx)[0]


def state_distance(ours: jax.Array, theirs: jax.Array, projection: Any, kind: str) -> jax.Array:
    """Return the distance of the student's states [..., D] from the teacher's [..., E]: [...] f32, 1 - cos or mse."""
    a, b = matmul(ours, projection).astype(jnp.float32), theirs.astype(jnp.float32)
    if kind == "mse":
        return jnp.mean((a - b) ** 2, axis=-1)
    norms = jnp.sqrt(jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1) + LEAST_NORM**2)
    return 1.0 - jnp.sum(a * b, axis=-1) / norms


# --- attention maps ---------------------------------------------------------------------------------------------------


def attention_map(number: int, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """Return the attention weights of layer `number`, from 1, averaged over its heads: [B, T, T] in f32."""
    layer, p = cfg.layers[number - 1], params["layers"][number - 1]
    attn = layer.attn
    if not isinstance(attn, Attention) or attn.kv_from is not None or not layer.pre_norm:
        raise UnsupportedError(
            f"attention can be compared in layers with their own keys and pre-norm only, got layer {number} of a "
            f"{cfg.family} model: set distillation.attention.weight=0, or name other layers",
            param="distillation.attention",
        )
    # The layer normalises its input, so the scale of the input does not matter: the states of the model that ends
    # before this layer, with a norm without weight, give the same result.
    flat = jnp.full((cfg.dim,), 1.0 - cfg.norm_offset, params["norm"].dtype)
    x = states_after(number - 1, {**params, "norm": flat}, cfg, batch, ctx, None)
    table = attn.rope.tables(batch.positions) if attn.rope else ()
    packed = ctx.packed(batch)
    h = norm(p["attn_norm"], cfg, x)
    q, (k, _) = attn.project_and_store(p["attn"], h, table, packed, None, cfg.norm_eps, cfg.norm_offset)
    return _weights(attn, q, k, packed, p["attn"].get("sinks")).mean(axis=2)


def _weights(attn: Attention, q: jax.Array, k: jax.Array, packed: Packed, sinks: jax.Array | None) -> jax.Array:
    """Return the attention weights [B, T, N, T]: the output of attention for values that are one-hot positions."""
    B, T, K, _ = k.shape
    one_hot = jnp.broadcast_to(jnp.eye(T)[:, None, :], (B, T, K, T))
    how: dict[str, Any] = dict(window=attn.window, softcap=attn.softcap, sinks=sinks)
    return packed_attention(q, k, one_hot, dataclasses.replace(packed, placement=None), scale=attn.scale, **how)


def map_divergence(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """Return KL(theirs || ours) of each token's attention weights [..., T], [...]."""
    p, q = jnp.maximum(theirs, LEAST), jnp.maximum(ours, LEAST)
    return jnp.sum(theirs * (jnp.log(p) - jnp.log(q)), axis=-1)
