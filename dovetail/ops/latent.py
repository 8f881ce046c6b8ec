"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are one small latent a token.

Packed: the latent is expanded to heads and attention is the usual one. Paged: the cache holds latents, and the
expansion is folded into the query and the output, so that decoding reads C numbers a token, not 2 N H.

N heads, D the part of a head without position, E the rotary part, R the latent's rank, V the values' dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.types import Packed, Paged
from dovetail.ops.attention import attend, store
from dovetail.ops.paged import Gather, paged_attention, write_latents


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
    """([..., N, V], what was stored)."""
    if isinstance(ctx, Paged):
        pages = write_latents(ctx, entry, jnp.concatenate([latent, k_rope], axis=-1))
        q = jnp.concatenate([jnp.einsum("tnd,ndr->tnr", q_nope, k_up), q_rope], axis=-1)
        read = functools.partial(_read_latents, rank=latent.shape[-1])
        out = paged_attention(ctx, q, pages, read=read, scale=scale)
        return jnp.einsum("tnr,nvr->tnv", out, v_up), pages
    k_nope = jnp.einsum("...r,ndr->...nd", latent, k_up)
    k_rope = jnp.broadcast_to(k_rope[..., None, :], q_rope.shape)
    k = jnp.concatenate([k_nope, k_rope], axis=-1)
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    stored = store(ctx, entry, k, jnp.einsum("...r,nvr->...nv", latent, v_up))
    return attend(ctx, q, stored, scale=scale), stored


def _read_latents(gather: Gather, _: int, rank: int) -> tuple[jax.Array, jax.Array]:
    """One shared head: its keys are latent and rotary part together, its values the latent."""
    block = gather(jnp.arange(1))
    return block, block[..., :rank]
