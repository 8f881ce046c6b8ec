"""The words every room shares: the two attention contexts, weights with their version, and the batch of a train step.

B batch rows, T tokens, S sequences, P pages of the pool, M pages a sequence may hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from dovetail.core.mesh import Placement

Params = Any  # a pytree of arrays, shaped as models.spec declares it
Cache = tuple  # one entry per layer: pages, or None for a layer that reads another's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Training and scoring: rows of whole documents, no cache. A token attends to earlier ones of its own segment.

    `platform` is where the call will run (None: where jax runs by default); it chooses the attention kernel.
    `documents` is a number that no row's documents exceed, where it is known: some kernels are faster for it.
    """

    segment_ids: jax.Array  # [B, T] int32; padding, of id 0, at a row's end
    platform: str | None = field(default=None, metadata={"static": True})
    placement: Placement | None = field(default=None, metadata={"static": True})
    documents: int | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """Serving: a ragged batch of sequences' new tokens laid end to end, their past in pages of a shared pool.

    Prefill, a chunk of one, and decode are the same call. Rows past `num_seqs` and tokens past `cu_q_lens[num_seqs]`
    are padding.
    """

    block_tables: jax.Array  # [S, M] int32: the pages of each sequence, in order
    kv_lens: jax.Array  # [S] int32: tokens of the sequence after this call
    cu_q_lens: jax.Array  # [S + 1] int32: where each sequence's new tokens start among the T
    num_seqs: jax.Array  # [1] int32
    slots: jax.Array | None = None  # [S] int32: where a layer keeps a state of fixed size per sequence (a recurrence)
    platform: str | None = field(default=None, metadata={"static": True})
    placement: Placement | None = field(default=None, metadata={"static": True})


Context = Packed | Paged


@dataclass(frozen=True)
class Weights:
    """Parameters and the version they are: a completion says which it was sampled from."""

    params: Params
    version: int = 0


@dataclass(frozen=True)
class Column:
    """What an objective declares of a further column of its batches."""

    dtype: str = "float32"
    per_token: bool = True  # [B, T], in the place of the token whose target it is about; else [B], one per row
    width: int = 0  # above 0: so many numbers in each place, [B, T, width]
    table: bool = False  # [B, M, width], not by tokens: M entries of each row, as many as a batch brings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed documents to train on. Targets are given, not shifted here: a row's last token has one too, and
    rows cut over a mesh need no neighbour. (A single row, as a loader makes them, has the same fields without B.)"""

    tokens: jax.Array  # [B, T] int32
    targets: jax.Array  # [B, T] int32: the token that follows; anything where loss_mask is 0
    positions: jax.Array  # [B, T] int32, from 0 in each document
    segment_ids: jax.Array  # [B, T] int32: 1, 2, .. the documents of a row; 0 is padding
    loss_mask: jax.Array  # [B, T] f32: what the target weighs, 0 or more: 0 in padding and at a document's end
    columns: dict[str, jax.Array] = field(default_factory=dict)  # what an objective needs besides, by name: see Column
