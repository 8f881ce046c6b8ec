"""Sum numbers of tokens over the documents of packed rows.

A row holds documents one after another, numbered from 1 by its segment ids; 0 is padding. Preferences come in pairs:
documents 2k - 1 and 2k of a row are the chosen and the rejected completion of the same prompt.

B rows, T tokens, S the most documents of a row (`most`), P = S / 2 pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pair(NamedTuple):
    """Numbers of the two documents of each pair, each [B, P]."""

    chosen: jax.Array
    rejected: jax.Array


def segment_sums(values: jax.Array, segment_ids: jax.Array, most: int) -> jax.Array:
    """Return the sum of values [B, T] over each document, [B, S] in f32; 0 for documents that a row does not have.

    A row with more documents than `most` gives NaN, so that the step is refused instead of ignoring some of them.
    """
    is_own = segment_ids[..., None] == jnp.arange(1, most + 1)  # [B, T, S]; it fuses with the sum
    sums = jnp.sum(jnp.where(is_own, values[..., None].astype(jnp.float32), 0.0), axis=1)
    return jnp.where(segment_ids.max(axis=1, keepdims=True) > most, jnp.nan, sums)


def are_there(segment_ids: jax.Array, most: int) -> jax.Array:
    """Return [B, S] whether the row has the document; True for all documents of a row with too many."""
    return segment_sums(segment_ids > 0, segment_ids, most) != 0


def is_last(segment_ids: jax.Array) -> jax.Array:
    """Return [B, T] whether the token is the last of its document."""
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (segment_ids > 0) & (following != segment_ids)


def pairs(sums: jax.Array) -> Pair:
    """Split the documents' numbers [B, S] into pairs."""
    assert sums.shape[1] % 2 == 0, f"`most` must be even, for pairs of chosen and rejected; got {sums.shape[1]}"
    return Pair(sums[:, 0::2], sums[:, 1::2])


def is_chosen(segment_ids: jax.Array) -> jax.Array:
    """Return [B, T] whether the token belongs to the first document of a pair."""
    return segment_ids % 2 == 1


def num_pairs(segment_ids: jax.Array) -> jax.Array:
    """Return the number of pairs in all rows; a chosen document without a rejected one does not count."""
    return (segment_ids.max(axis=1) // 2).sum().astype(jnp.float32)
