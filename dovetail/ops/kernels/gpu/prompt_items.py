"""The work items of prompt attention on Hopper: tiles of new tokens with some of their query heads.

T tokens, I tiles, N query heads, H head dim; W query heads of a work item, R = 64 / W tokens of a warpgroup.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dovetail.core.types import Paged

GROUPS, ROWS = 2, 64  # warpgroups that compute, and the rows of each
KEYS = 128  # of a block
ALIGNED = 8  # rows of a tile in shared memory: copies begin at multiples of it


class PromptShape(NamedTuple):
    """Hold what is static in a kernel."""

    heads: int  # W
    groups: int  # N / W
    shared: int  # work items of a tile that read the same key head
    dim: int
    page: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def tokens(self) -> int:
        """Return the tokens of a warpgroup."""
        return ROWS // self.heads

    def rows_of(self, item: PromptItem, group: Any) -> Any:
        """Return the tokens of a warpgroup."""
        return pl.ds(pl.multiple_of(item.first + group * self.tokens, ALIGNED), self.tokens)

    def columns_of(self, item: PromptItem, head: int) -> Any:
        """Return the columns of a head in q and in the output, [T, N * H]."""
        return pl.ds(pl.multiple_of((item.head * self.heads + head) * self.dim, self.dim), self.dim)


class PromptItem(NamedTuple):
    """Hold a work item: a tile and some of its heads."""

    head: Any  # of the N / W
    seq: Any
    first: Any  # token of the tile: a multiple of ALIGNED, so that it may belong to the sequence before
    low: Any  # the tile's own tokens are those from `low` to below `high`
    high: Any
    position: Any  # of the first token, negative if it belongs to the sequence before
    length: Any  # of the sequence

    def blocks(self, window: int | None) -> tuple[Any, Any]:
        """Return the first block of keys and the one after the last."""
        begin = lax.div(jnp.maximum(self.position - window + 1, 0), KEYS) if window else jnp.int32(0)
        return begin, lax.div(self.position + self.high + KEYS - 1, KEYS)

    def unmasked(self, window: int | None) -> tuple[Any, Any]:
        """Return the first of the blocks that all rows see in full, and the one after the last."""
        begin, _ = self.blocks(window)
        if window:
            missed = jnp.maximum(self.position + self.high - window, 0)  # keys before the window of the last row
            begin = jnp.maximum(begin, lax.div(missed + KEYS - 1, KEYS))
        return begin, jnp.maximum(begin, lax.div(self.position + 1, KEYS))


def sorted_tiles(ctx: Paged, num_tokens: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the tiles [I, 6] of `PromptItem`, those with the most keys first, and how many there are, [1]."""
    num_seqs = ctx.kv_lens.shape[0]
    starts, exists = ctx.cu_q_lens[:-1], jnp.arange(num_seqs) < ctx.num_seqs[0]
    lengths = jnp.where(exists, jnp.diff(ctx.cu_q_lens), 0)
    aligned = starts // ALIGNED * ALIGNED
    ends = jnp.cumsum(jnp.where(lengths > 0, -(-(starts - aligned + lengths) // tokens), 0))
    tile = jnp.arange(num_tokens // tokens + num_seqs + -(-num_seqs * ALIGNED // tokens), dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_seqs - 1)
    first = aligned[seq] + (tile - jnp.where(seq > 0, ends[seq - 1], 0)) * tokens
    low, high = jnp.maximum(starts[seq] - first, 0), jnp.minimum(starts[seq] + lengths[seq] - first, tokens)
    position = ctx.kv_lens[seq] - lengths[seq] + first - starts[seq]
    order = jnp.argsort(jnp.where(tile < ends[-1], -(position + high), 1))
    tiles = jnp.stack([seq, first, low, high, position, ctx.kv_lens[seq]], axis=1).astype(jnp.int32)
    return tiles[order], ends[-1:].astype(jnp.int32)
