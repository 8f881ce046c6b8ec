"""One layer: attention and a feed-forward half, each added to the residual stream.

A layer's description (models.config) says what it does; no family is known here by name.

Packed calls have tokens [B, T], paged ones [T]; `...` stands for either. D model dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import constrain
from dovetail.core.types import Context, Packed, Paged, Params
from dovetail.models.config import Layer, Mlp, ModelConfig, Moe
from dovetail.ops.adapter import of_rows
from dovetail.ops.few_tokens import Product, add_rms_norm
from dovetail.ops.linear import gated, matmul, matmul_to_add
from dovetail.ops.moe import RouterStats, experts, route, route_step, router_stats
from dovetail.ops.norm import rms_norm
from dovetail.ops.router import router_logits

Table = tuple[jax.Array, jax.Array] | tuple[()]  # cos and sin of a Rope; nothing for a layer without


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residual:
    """Hold the residual stream between two layers.

    In serving, a layer's last addition is left to the next reader of the stream, for a kernel that adds and normalises
    at once; training keeps one array per layer, not two.
    """

    x: jax.Array  # [..., D]
    pending: jax.Array | Product | None = None  # yet to be added

    def add_and_norm(
        self,
        delta: jax.Array | Product | None,
        weight: jax.Array | None,
        cfg: ModelConfig,
        ctx: Context,
        readers: Params | None = None,
    ) -> tuple[Residual, Any]:
        """Return the stream with everything added to it, and its norm.

        If only ops.linear's products with weights of `readers` read the norm, it may be left to them.
        """
        assert self.pending is None or delta is None
        pending = self.pending if delta is None else delta
        x, h = add_rms_norm(ctx, self.x, pending, weight, cfg.norm_eps, cfg.norm_offset, readers)
        return Residual(by_token(ctx, x)), h


@functools.partial(jax.jit, static_argnames=("cfg", "layer"))  # equal layers are traced and lowered once
def block(
    p: Params,
    stream: Residual,
    table: Table,
    ctx: Context,
    entry: Any,
    extra: jax.Array | None,
    rows: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    layer: Layer,
) -> tuple[Residual, Any, RouterStats | None]:
    """Run one layer.

    Args:
        p: The layer's weights.
        stream: The residual stream.
        table: The rotary tables.
        ctx: The attention context.
        entry: The layer's entry of the cache.
        extra: The layer's own embedding of the tokens, if it has one.
        rows: If given, only these tokens go on past the attention.
        cfg: The model.
        layer: The layer's description.

    Returns:
        The stream after this layer, the layer's cache, and the statistics of its router.
    """
    stream, h = stream.add_and_norm(None, p.get("attn_norm"), cfg, ctx, readers=p["attn"])
    h, entry = layer.attn(p["attn"], h, table, ctx, entry, cfg.norm_eps, cfg.norm_offset)
    if rows is not None:
        stream, h, extra = Residual(stream.x[rows]), h[rows], None if extra is None else extra[rows]
        p = of_rows(p, rows)
    multiply = _last_product("attn_post_norm" in p, cfg, ctx)
    h = _to_add(p.get("attn_post_norm"), cfg, layer.attn.merge(p["attn"], h, multiply))
    stream, h = stream.add_and_norm(h, p.get("mlp_norm"), cfg, ctx, readers=p["mlp"] if layer.moe is None else None)
    multiply = _last_product("mlp_post_norm" in p, cfg, ctx)
    h, stats = feed_forward(p, cfg, layer, stream.x, h, ctx, multiply)
    h = _to_add(p.get("mlp_post_norm"), cfg, h)
    if isinstance(ctx, Paged) and extra is None and "scalar" not in p:
        return Residual(stream.x, h), entry, stats
    x = stream.x + h
    if extra is not None and layer.mlp is not None:
        gate = layer.mlp.glu.activate(matmul(x, p["per_layer"]["gate"]))
        x = x + norm(p["per_layer"]["norm"], cfg, matmul(gate * extra, p["per_layer"]["proj"]))
    return Residual(by_token(ctx, x * p["scalar"] if "scalar" in p else x)), entry, stats


def _last_product(is_normed: bool, cfg: ModelConfig, ctx: Context) -> Callable:
    """Return how half of a block computes its last product, which may be normed before it is added to the stream."""
    is_added = isinstance(ctx, Paged) and not is_normed and cfg.residual_scale == 1.0
    return matmul_to_add if is_added else matmul


def feed_forward(
    p: Params, cfg: ModelConfig, layer: Layer, x: jax.Array, h: Any, ctx: Context, multiply: Callable = matmul
):
    """Run the feed-forward half on h, the norm of x; `multiply` computes the last product of a plain one."""
    if layer.mlp is None:
        assert layer.moe is not None
        return _moe(p["moe"], cfg, layer.moe, h, h, ctx)
    if layer.moe is None:
        return _mlp(p["mlp"], layer.mlp, h, multiply), None
    dense = norm(p["mlp_out_norm"], cfg, _mlp(p["mlp"], layer.mlp, h))
    sparse, stats = _moe(p["moe"], cfg, layer.moe, norm(p["moe_norm"], cfg, x), x, ctx)
    return dense + norm(p["moe_post_norm"], cfg, sparse), stats


def _mlp(p: Params, mlp: Mlp, x: jax.Array, multiply: Callable = matmul) -> jax.Array:
    return multiply(gated(x, p, mlp.projections, mlp.glu), p["down"], p.get("down_bias"))


def _moe(p: Params, cfg: ModelConfig, moe: Moe, x: jax.Array, router_x: jax.Array, ctx: Context):
    """Run the experts on x; the router reads router_x (the same, except in Gemma 4)."""
    if moe.scaled_router:
        router_x = rms_norm(router_x, None, cfg.norm_eps) * p["router_scale"] * cfg.dim**-0.5
    logits = router_logits(router_x, p["router"], p.get("router_bias"))
    bias, stats = p.get("choice_bias"), None
    if isinstance(ctx, Packed):
        weights, chosen = route(moe.router, logits, bias)
        stats = router_stats(moe.router, logits, chosen, ctx.segment_ids > 0)
    else:
        weights, chosen = route_step(moe.router, logits, bias, ctx.placement, ctx.platform)
    if moe.scaled_router:
        weights = weights * p["expert_scale"][chosen]
    out = experts(x, weights, chosen, p["experts"], moe.glu, ctx.placement, ctx.platform)
    return (out + _mlp(p["shared"], moe.shared, x) if moe.shared else out), stats


def _to_add(weight: jax.Array | None, cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Return what half of a block adds to the residual stream, from its output."""
    x = norm(weight, cfg, x)
    if cfg.residual_scale == 1.0:
        return x
    return (x.astype(jnp.float32) * cfg.residual_scale).astype(x.dtype)  # the scale itself has more digits than bf16


def norm(weight: jax.Array | None, cfg: ModelConfig, x: jax.Array) -> jax.Array:
    """Normalise x by the model's RMS norm."""
    return x if weight is None else rms_norm(x, weight, cfg.norm_eps, cfg.norm_offset)


def by_token(ctx: Context, x: jax.Array) -> jax.Array:
    """Constrain activations to be split by token alone."""
    dims = ("batch", "length") if isinstance(ctx, Packed) else ("batch",)
    return constrain(x, ctx.placement, *dims, *(None,) * (x.ndim - len(dims)))
