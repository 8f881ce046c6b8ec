"""The one forward: training, serving and reinforcement learning all call it.

`forward` returns hidden states. Training takes its cross entropy from them chunk by chunk, serving unembeds only the
rows it samples. A layer's description (models.config) says what its block does; no family is known here by name.

Packed calls have tokens [B, T], paged ones [T]; `...` stands for either. D model dim, N heads, K key heads, H head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dovetail.core.mesh import Placement, constrain
from dovetail.core.types import Cache, Packed, Paged, Params
from dovetail.models.config import Attention, Latent, Layer, Mlp, ModelConfig, Moe
from dovetail.models.spec import cache_shapes
from dovetail.ops.attention import attend, rotate_store, split_heads, store, takes_whole
from dovetail.ops.latent import latent_attention
from dovetail.ops.moe import RouterStats, experts, route, router_stats
from dovetail.ops.norm import add_rms_norm, rms_norm
from dovetail.ops.rope import Rope, rotate

Context = Packed | Paged
Table = tuple[jax.Array, jax.Array] | tuple[()]  # cos and sin of a Rope; nothing for a layer without


def forward(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    ctx: Context,
    cache: Cache | None = None,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, Cache | None]:
    """tokens and positions [...] -> (hidden states [..., D], the cache with the new tokens).

    With `rows` [S] only those tokens' states are given, [S, D]: past its attention the last layer computes no others.
    """
    x, extra, tables = enter(params, cfg, tokens, positions, ctx)
    delta, stored = None, []  # delta: what a layer has yet to add to x, where the next norm does it on its way
    for i, layer in enumerate(cfg.layers):
        source = getattr(layer.attn, "kv_from", None)
        entry = stored[source] if source is not None else cache[i] if cache is not None else None
        extra_i = extra[..., i, :] if extra is not None else None
        last = rows if i == len(cfg.layers) - 1 else None
        x, delta, entry, _ = block(
            params["layers"][i], x, delta, tables[layer.attn.rope], ctx, entry, extra_i, last, cfg=cfg, layer=layer
        )
        stored.append(entry)
    hidden = leave(params, cfg, x, delta, ctx)
    if cache is None:
        return hidden, None
    return hidden, tuple(None if old is None else new for old, new in zip(cache, stored, strict=True))


def enter(params: Params, cfg: ModelConfig, tokens: jax.Array, positions: jax.Array, ctx: Context):
    """What the first layer is given: (x, every layer's own embeddings or None, the tables of each Rope)."""
    x = _on_tokens(ctx, embed(params, cfg, tokens))
    extra = _per_layer_inputs(params, cfg, tokens, x) if "per_layer" in params else None
    ropes = {layer.attn.rope for layer in cfg.layers}
    tables: dict[Rope | None, Table] = {rope: rope.tables(positions) if rope else () for rope in ropes}
    return x, extra, tables


def leave(params: Params, cfg: ModelConfig, x: jax.Array, delta: jax.Array | None, ctx: Context) -> jax.Array:
    """The hidden states that are unembedded."""
    return _add_norm(ctx, params["norm"], cfg, x, delta)[1]


def embed(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    table = params["embed"]
    return table[tokens] * jnp.asarray(cfg.embed_scale, table.dtype)


def unembed(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] in f32."""
    head = params["embed"] if cfg.tied else params["head"]
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
    return jnp.tanh(logits / cfg.logit_softcap) * cfg.logit_softcap if cfg.logit_softcap else logits


def init_cache(
    cfg: ModelConfig, num_pages: int, page_size: int, dtype: Any, placement: Placement | None = None
) -> Cache:
    shapes = cache_shapes(cfg, num_pages, page_size)
    return tuple(
        None if shape is None else jnp.zeros(shape, dtype, device=_pages_sharding(layer, shape, placement))
        for layer, shape in zip(cfg.layers, shapes, strict=True)
    )


def _pages_sharding(layer: Layer, shape: tuple[int, ...], placement: Placement | None) -> NamedSharding | None:
    if placement is None:
        return None
    pages = P() if isinstance(layer.attn, Latent) else split_heads(placement, shape[2] // 2)[1]
    return NamedSharding(placement.mesh, pages)


@functools.partial(jax.jit, static_argnames=("cfg", "layer"))  # equal layers are traced and lowered once
def block(
    p: Params,
    x: jax.Array,
    delta: jax.Array | None,
    table: Table,
    ctx: Context,
    entry: Any,
    extra: jax.Array | None,
    rows: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    layer: Layer,
) -> tuple[jax.Array, jax.Array | None, Any, RouterStats | None]:
    """One layer: attention, then its feed-forward half, each added to the residual stream. The second may be left to
    whoever reads x next, as it was left to this layer: (x, what is to be added to it, the layer's cache, how its router
    dealt the tokens out)."""
    x, h = _add_norm(ctx, p.get("attn_norm"), cfg, x, delta)
    if isinstance(layer.attn, Latent):
        h, entry = _latent(p["attn"], layer.attn, h, table, ctx, entry)
    else:
        h, entry = _attention(p["attn"], cfg, layer.attn, h, table, ctx, entry)
    if rows is not None:
        x, h, extra = x[rows], h[rows], None if extra is None else extra[rows]
    x, h = _add_norm(ctx, p.get("mlp_norm"), cfg, x, _norm(p.get("attn_post_norm"), cfg, _merge_heads(h, p["attn"])))
    h, stats = _feed_forward(p, cfg, layer, x, h, ctx)
    delta = _norm(p.get("mlp_post_norm"), cfg, h)
    if isinstance(ctx, Paged) and extra is None and "scalar" not in p:
        return x, delta, entry, stats
    x = x + delta  # training keeps one array a layer, not two
    if extra is not None and layer.mlp is not None:
        gate = layer.mlp.glu.activate(_linear(x, p["per_layer"]["gate"]))
        h = _linear(gate * extra, p["per_layer"]["proj"])
        x = x + _norm(p["per_layer"]["norm"], cfg, h)
    return _on_tokens(ctx, x * p["scalar"] if "scalar" in p else x), None, entry, stats


def _attention(p: Params, cfg: ModelConfig, a: Attention, x: jax.Array, table: Table, ctx: Context, entry: Any):
    if "qkv" in p and a.rope and a.qk_norm != "all" and not a.v_norm and takes_whole(ctx, a.rope, a.head_dim):
        norms = (p["q_norm"], p["k_norm"]) if a.qk_norm else None
        qkv = _heads(x, p["qkv"], p.get("qkv_bias"))
        q, entry = rotate_store(ctx, entry, qkv, table, norms, cfg.norm_eps, cfg.norm_offset)
    else:
        q, entry = _heads_stored(p, cfg, a, x, table, ctx, entry)
    out = attend(ctx, q, entry, scale=a.scale, window=a.window, softcap=a.softcap, sinks=p.get("sinks"))
    return checkpoint_name(out, "attention"), entry


def _heads_stored(p: Params, cfg: ModelConfig, a: Attention, x: jax.Array, table: Table, ctx: Context, entry: Any):
    q, k, v = _project(p, a, x)
    q = _normed_heads(q, p.get("q_norm"), cfg, a.qk_norm)
    q = rotate(q, a.rope, table) if a.rope else q
    if k is not None and v is not None:
        k = _normed_heads(k, p.get("k_norm"), cfg, a.qk_norm)
        k = rotate(k, a.rope, table) if a.rope else k
        v = rms_norm(v, None, cfg.norm_eps) if a.v_norm else v
        entry = store(ctx, entry, k, v)
    return q, entry


def _project(p: Params, a: Attention, x: jax.Array):
    """q, and k and v or None where a layer reads another's; from one product where the weights are fused."""
    if "qkv" in p:
        return jnp.split(_heads(x, p["qkv"], p.get("qkv_bias")), [a.heads, a.heads + a.kv_heads], axis=-2)
    q = _heads(x, p["q"], p.get("q_bias"))
    if a.kv_from is not None:
        return q, None, None
    k = _heads(x, p["k"], p.get("k_bias"))
    return q, k, k if a.k_is_v else _heads(x, p["v"], p.get("v_bias"))


def _latent(p: Params, a: Latent, x: jax.Array, table: Table, ctx: Context, entry: Any):
    if a.q_rank is None:
        q = _heads(x, p["q"], None)
    else:
        q = _heads(rms_norm(_linear(x, p["q_a"], p.get("q_a_bias")), p["q_a_norm"], a.norm_eps), p["q_b"], None)
    q_nope, q_rope = jnp.split(q, [a.nope_dim], axis=-1)
    latent, k_rope = jnp.split(_linear(x, p["kv_a"], p.get("kv_a_bias")), [a.kv_rank], axis=-1)
    latent = rms_norm(latent, p["kv_a_norm"], a.norm_eps)
    q_rope = rotate(q_rope, a.rope, table)
    k_rope = rotate(k_rope[..., None, :], a.rope, table)[..., 0, :]
    out, entry = latent_attention(ctx, entry, q_nope, q_rope, latent, k_rope, p["k_up"], p["v_up"], scale=a.scale)
    return checkpoint_name(out, "attention"), entry


def _feed_forward(p: Params, cfg: ModelConfig, layer: Layer, x: jax.Array, h: jax.Array, ctx: Context):
    """Of h, the norm of x."""
    if layer.mlp is None:
        assert layer.moe is not None
        return _moe(p["moe"], cfg, layer.moe, h, h, ctx)
    if layer.moe is None:
        return _mlp(p["mlp"], layer.mlp, h), None
    dense = _norm(p["mlp_out_norm"], cfg, _mlp(p["mlp"], layer.mlp, h))
    sparse, stats = _moe(p["moe"], cfg, layer.moe, _norm(p["moe_norm"], cfg, x), x, ctx)
    return dense + _norm(p["moe_post_norm"], cfg, sparse), stats


def _mlp(p: Params, mlp: Mlp, x: jax.Array) -> jax.Array:
    if "gate_up" in p:
        gate, up = jnp.split(_linear(x, p["gate_up"], p.get("gate_up_bias")), 2, axis=-1)
    else:
        gate, up = _linear(x, p["gate"], p.get("gate_bias")), _linear(x, p["up"], p.get("up_bias"))
    return _linear(mlp.glu(gate, up), p["down"], p.get("down_bias"))


def _moe(p: Params, cfg: ModelConfig, moe: Moe, x: jax.Array, router_x: jax.Array, ctx: Context):
    """Experts see x, the router sees router_x (the same, except in Gemma 4)."""
    if moe.scaled_router:
        router_x = rms_norm(router_x, None, cfg.norm_eps) * p["router_scale"] * cfg.dim**-0.5
    # f32: two experts' scores may differ by less than bf16 can tell
    logits = _linear(router_x.astype(jnp.float32), p["router"].astype(jnp.float32), p.get("router_bias"))
    weights, chosen = route(moe.router, logits, p.get("choice_bias"))
    stats = router_stats(moe.router, logits, chosen, ctx.segment_ids > 0) if isinstance(ctx, Packed) else None
    if moe.scaled_router:
        weights = weights * p["expert_scale"][chosen]
    out = experts(x, weights, chosen, p["experts"], moe.glu, ctx.placement, ctx.platform)
    return (out + _mlp(p["shared"], moe.shared, x) if moe.shared else out), stats


def _per_layer_inputs(params: Params, cfg: ModelConfig, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """[..., L, width]: each layer's own embedding of the token, mixed with a projection of the common one."""
    p, width = params["per_layer"], cfg.layers[0].per_layer_dim
    own = p["embed"][tokens] * jnp.asarray(width**0.5, x.dtype)
    common = jnp.einsum("...d,lpd->...lp", x, p["proj"]) * jnp.asarray(cfg.dim**-0.5, x.dtype)
    return (_norm(p["norm"], cfg, common) + own) * jnp.asarray(2**-0.5, x.dtype)


def _norm(weight: jax.Array | None, cfg: ModelConfig, x: jax.Array) -> jax.Array:
    return x if weight is None else rms_norm(x, weight, cfg.norm_eps, cfg.norm_offset)


def _add_norm(
    ctx: Context, weight: jax.Array | None, cfg: ModelConfig, x: jax.Array, delta: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    x, h = add_rms_norm(ctx, x, delta, weight, cfg.norm_eps, cfg.norm_offset)
    return _on_tokens(ctx, x), h


def _normed_heads(x: jax.Array, weight: jax.Array | None, cfg: ModelConfig, kind: str) -> jax.Array:
    """x [..., N, H], normed a head at a time or all heads together."""
    if kind == "all":
        return _norm(weight, cfg, x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
    return _norm(weight, cfg, x)


def _linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    y = jnp.einsum("...d,fd->...f", x, w)
    return y if bias is None else y + bias.astype(y.dtype)


def _heads(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    # as a matrix: XLA's CPU backend copies a weight of three dims, transposed, at every call
    y = _linear(x, w.reshape(-1, w.shape[-1])).reshape(*x.shape[:-1], *w.shape[:-1])
    return y if bias is None else y + bias


def _merge_heads(x: jax.Array, p: Params) -> jax.Array:
    y = _linear(x.reshape(*x.shape[:-2], -1), p["o"].reshape(p["o"].shape[0], -1))
    return y + p["o_bias"] if "o_bias" in p else y


def _on_tokens(ctx: Context, x: jax.Array) -> jax.Array:
    """Activations are split by token alone."""
    dims = ("batch", "length") if isinstance(ctx, Packed) else ("batch",)
    return constrain(x, ctx.placement, *dims, *(None,) * (x.ndim - len(dims)))
