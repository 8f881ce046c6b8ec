"""Numbers of whole documents, from those of the tokens of packed rows.

A row holds documents one after another, numbered from 1 by its segment ids; 0 is padding. Preferences come in pairs:
documents 2k - 1 and 2k of a row are the chosen and the rejected completion of the same prompt.

B rows, T tokens, S documents of a row at most (`most`), P = S / 2 pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.choice import require


class Pair(NamedTuple):
    """Two documents' numbers, each [B, P]."""

    chosen: jax.Array
    rejected: jax.Array


def segment_sums(values: jax.Array, segment_ids: jax.Array, most: int) -> jax.Array:
    """The sum of values [B, T] over each document, [B, S] in f32; 0 for those that a row does not have.

    A row with more documents than `most` gives NaN: a step's health is judged, and what is left out is not."""
    is_own = segment_ids[..., None] == jnp.arange(1, most + 1)  # [B, T, S]; it fuses with the sum
    sums = jnp.sum(jnp.where(is_own, values[..., None].astype(jnp.float32), 0.0), axis=1)
    return jnp.where(segment_ids.max(axis=1, keepdims=True) > most, jnp.nan, sums)


def are_there(segment_ids: jax.Array, most: int) -> jax.Array:
    """[B, S]: whether the row has the document. Of a row with too many all are said to be: none is to go unseen."""
    return segment_sums(segment_ids > 0, segment_ids, most) != 0


def is_last(segment_ids: jax.Array) -> jax.Array:
    """[B, T]: whether the token is its document's last."""
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (segment_ids > 0) & (following != segment_ids)


def pairs(sums: jax.Array) -> Pair:
    """Of documents' numbers [B, S]."""
    require(
        sums.shape[1] % 2 == 0,
        f"most must be even, for documents come as pairs of chosen and rejected; got {sums.shape[1]}",
    )
    return Pair(sums[:, 0::2], sums[:, 1::2])


def is_chosen(segment_ids: jax.Array) -> jax.Array:
    """[B, T]: whether the token is of the first document of a pair."""
    return segment_ids % 2 == 1


def num_pairs(segment_ids: jax.Array) -> jax.Array:
    """Of all rows; a chosen document without its rejected one is no pair."""
    return (segment_ids.max(axis=1) // 2).sum().astype(jnp.float32)
