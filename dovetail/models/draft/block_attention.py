"""Attention of a block drafter: the tokens of a block see each other, in both directions, and the context before it.

The keys and values of the context come from the target's hidden states, those of the block from the block itself, with
the same weights (DFlash).

S sequences, W slots of a block, B rows of training, A blocks of a row, T tokens of a row, N heads, K key heads,
G = N / K, H head dim, D model dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.types import Packed, Paged, Params
from dovetail.models.attention import Attention
from dovetail.ops.packed import MASKED


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Anchored(Packed):
    """Attend from blocks that start at some tokens of training rows. Segments are those of the blocks' tokens."""

    context: jax.Array  # [B, T, D]: what the context's keys and values are computed from
    positions: jax.Array  # [B, T]: the context's
    visible: jax.Array  # [B, A, T] bool: whether a block sees a token of the context


@dataclass(frozen=True)
class BlockAttention(Attention):
    """Describe the attention of one layer of a block drafter."""

    causal: bool = False  # whether a slot sees the slots before it only; published sliding layers do

    def __call__(
        self, p: Params, x: jax.Array, table: tuple, ctx: Any, entry: Any, eps: float, offset: float
    ) -> tuple[jax.Array, Any]:
        """Map x [..., D], whole blocks, to every head's output [..., N, H] and the layer's entry of the cache."""
        if isinstance(ctx, Anchored):
            return self._anchored(p, x, table, ctx, eps, offset), None
        q, entry = self.store(p, x, table, ctx, entry, eps, offset)
        if self.causal:
            return self.attend(p, q, ctx, entry, self.window), entry
        slots = q.shape[0] // ctx.kv_lens.shape[0]
        window = None if self.window is None else self.window + slots
        return self.attend(p, q, each_alone(ctx, slots), entry, window), entry

    def _anchored(self, p: Params, x: jax.Array, table: tuple, ctx: Anchored, eps: float, offset: float) -> jax.Array:
        """Attend within blocks x [B, A * W, D] and to what they see of the context."""
        assert self.window is None and not self.causal and self.rope is not None, "only full attention is trained"
        tables = self.rope.tables(ctx.positions)
        _, (k, v) = self.project_and_store(p, ctx.context, tables, ctx, None, eps, offset)
        q, (own_k, own_v) = self.project_and_store(p, x, table, ctx, None, eps, offset)
        B, A, K, H = *ctx.visible.shape[:2], self.kv_heads, self.head_dim
        q = q.reshape(B, A, -1, K, self.heads // K, H)
        own_k, own_v = (y.reshape(B, A, -1, K, H) for y in (own_k, own_v))
        f32 = dict(preferred_element_type=jnp.float32)
        before = jnp.einsum("bawkgh,btkh->bakgwt", q, k, **f32) * self.scale
        within = jnp.einsum("bawkgh,bavkh->bakgwv", q, own_k, **f32) * self.scale
        before = jnp.where(ctx.visible[:, :, None, None, None], before, MASKED)
        weights = jax.nn.softmax(jnp.concatenate([before, within], axis=-1)).astype(v.dtype)
        there, here = jnp.split(weights, [k.shape[1]], axis=-1)
        out = jnp.einsum("bakgwt,btkh->bawkgh", there, v) + jnp.einsum("bakgwv,bavkh->bawkgh", here, own_v)
        return out.reshape(B, x.shape[1], self.heads, H)


def whole_blocks(ctx: Paged, slots: int) -> Paged:
    """Return the context of blocks of `slots` tokens, the first of which are the rows' newest tokens."""
    starts = jnp.arange(ctx.kv_lens.shape[0] + 1, dtype=jnp.int32) * slots
    return dataclasses.replace(ctx, kv_lens=ctx.kv_lens - 1 + slots, cu_q_lens=starts)


def each_alone(ctx: Paged, slots: int) -> Paged:
    """Return the context of blocks with each token as a row of its own, at the block's last position.

    Paged attention is causal by position, so all tokens of a block see the whole block.
    """
    rows = ctx.kv_lens.shape[0] * slots
    return dataclasses.replace(
        ctx,
        block_tables=jnp.repeat(ctx.block_tables, slots, axis=0),
        kv_lens=jnp.repeat(ctx.kv_lens, slots),
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        num_seqs=ctx.num_seqs * slots,
    )
