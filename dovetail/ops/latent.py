"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are one small latent per token.

Packed: the latent is expanded to heads and attention is the usual one (for rows split along their length, the small
latents are gathered, and each device expands them for its heads). Paged: the cache holds latents, and the expansion is
folded into the query and the output, so that decoding reads C numbers per token instead of 2 N H.

N heads, D the part of a head without position, E the rotary part, R the latent's rank, V the values' dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.attention import attend, per_device, store
from dovetail.ops.context import choose_way, gather_and_run, is_cut, per_slice, slices_of
from dovetail.ops.dispatch import choose_latent, log_once
from dovetail.ops.linear import matmul, per_head
from dovetail.ops.paged import Gather, flat_attention, paged_attention, write_latents


def latent_attention(
    ctx: Packed | Paged,
    entry: Any,
    q_nope: jax.Array,  # [..., N, D]
    q_rope: jax.Array,  # [..., N, E]
    latent: jax.Array,  # [..., R]
    k_rope: jax.Array,  # [..., E]
    k_up: jax.Array,  # [N, D, R]
    v_up: jax.Array,  # [N, V, R]
    *,
    scale: float,
) -> tuple[jax.Array, Any]:
    """Attend over latents; return ([..., N, V], what was stored)."""
    if isinstance(ctx, Paged):
        pages = write_latents(ctx, entry, jnp.concatenate([latent, k_rope], axis=-1))
        q = jnp.concatenate([per_head(q_nope, k_up, transposed=True), q_rope], axis=-1)
        return per_head(_attend_pages(ctx, q, pages, latent.shape[-1], scale), v_up), pages
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    placement = ctx.placement
    if placement is not None and is_cut(placement, q.shape[1]):
        heads = jax.eval_shape(_expand, latent, k_rope, k_up, v_up)
        if choose_way(placement, *heads) == "gather":
            return _over_context(ctx, placement, q, latent, k_rope, k_up, v_up, scale), (latent, k_rope)
    stored = store(ctx, entry, *_expand(latent, k_rope, k_up, v_up))
    return attend(ctx, q, stored, scale=scale), stored


def _attend_pages(ctx: Paged, q: jax.Array, pages: jax.Array, rank: int, scale: float) -> jax.Array:
    """Map q [T, N, R + E] to [T, N, R]."""
    name = choose_latent(ctx.platform, q, rank, ctx, pages)
    log_once("latent attention, paged", name)
    if name == "flat":
        from dovetail.ops.kernels.tpu.paged import flat_attention as kernel

        run = functools.partial(kernel, kv_heads=1, rank=rank, scale=scale)
        heads = ctx.placement.partition((None, "heads", None), q.shape) if ctx.placement else P()
        return per_device(run, ctx, (q, pages), (heads, P()), heads)
    options: dict[str, Any] = dict(read=functools.partial(_read_latents, rank=rank), scale=scale)
    if pages.ndim == 3:
        return flat_attention(ctx, q, pages, rows=1, **options)
    return paged_attention(ctx, q, pages, **options)


def _expand(latent: jax.Array, k_rope: jax.Array, k_up: jax.Array, v_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return every head's keys [..., N, D + E] and values [..., N, V]; the rotary part is common to all heads."""
    k_nope = matmul(latent, k_up)
    shared = jnp.broadcast_to(k_rope[..., None, :], (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), matmul(latent, v_up)


def _over_context(ctx: Packed, placement: Placement, q, latent, k_rope, k_up, v_up, scale: float) -> jax.Array:
    def local(q, latent, k_rope, k_up, v_up, segments):
        def expand(latent, k_rope):
            return _expand(latent, k_rope, k_up, v_up)

        return gather_and_run(slices, ctx.platform, options, q, (latent, k_rope), segments, expand=expand)

    slices = slices_of(placement, q.shape[1])
    options = dict(scale=scale, window=None, softcap=None)
    tokens, up = ("batch", "length", None), ("heads", None, None)
    axes = ("batch", "length", "heads", None), tokens, tokens, up, up, ("batch", "length")
    return per_slice(local, placement, (q, latent, k_rope, k_up, v_up, ctx.segment_ids), axes)


def _read_latents(gather: Gather, _: int, rank: int) -> tuple[jax.Array, jax.Array]:
    """Return one shared head: its keys are the latent and the rotary part, its values the latent."""
    block = gather(jnp.arange(1))
    return block, block[..., :rank]
