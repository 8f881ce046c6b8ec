"""Types that all rooms share: the two attention contexts, weights with their version, and the batch of a train step.

B batch rows, T tokens, S sequences, P pages of the pool, M pages a sequence may hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from dovetail.core.mesh import Placement

Params = dict[str, Any]  # a pytree of arrays (or quantised weights) by name, with the structure of models.spec
Cache = tuple[Any, ...]  # one entry per layer: pages, or None for a layer that reads another's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Attend within rows of whole documents, without a cache, for training and scoring.

    A token attends to earlier tokens of its own segment.

    Attributes:
        segment_ids: [B, T] int32.
        platform: Where the call will run (None: jax's default); it chooses the attention kernel.
        placement: The mesh, if there are several devices.
        documents: An upper bound of the documents per row, if known; some kernels are faster with it.
        image_ids: If given, the tokens of an image see each other in layers with a block mask (models.towers.vision).
        image_tokens: An upper bound of the tokens of an image, if known; the reference is faster with it.
    """

    segment_ids: jax.Array  # [B, T] int32; padding, of id 0, at a row's end
    platform: str | None = field(default=None, metadata={"static": True})
    placement: Placement | None = field(default=None, metadata={"static": True})
    documents: int | None = field(default=None, metadata={"static": True})
    image_ids: jax.Array | None = None  # [B, T] int32: 1, 2, .. the items of a row, each a run; 0 for text
    image_tokens: int | None = field(default=None, metadata={"static": True})

    def causal(self) -> Packed:
        """Return the context without the block mask."""
        return self if self.image_ids is None else replace(self, image_ids=None, image_tokens=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """Attend to the pages of a shared pool, for serving: new tokens of several sequences, concatenated.

    Prefill, a chunk of one, and decode are the same call. Rows past `num_seqs` and tokens past `cu_q_lens[num_seqs]`
    are padding.
    """

    block_tables: jax.Array  # [S, M] int32: the pages of each sequence, in order
    kv_lens: jax.Array  # [S] int32: tokens of the sequence after this call
    cu_q_lens: jax.Array  # [S + 1] int32: where each sequence's new tokens start among the T
    num_seqs: jax.Array  # [1] int32
    platform: str | None = field(default=None, metadata={"static": True})
    placement: Placement | None = field(default=None, metadata={"static": True})
    # [T] int32: the last position that a token sees in layers with a block mask: that of its image's last token, which
    # is in this call too; its own for text
    last_seen: jax.Array | None = None

    def causal(self) -> Paged:
        """Return the context without the block mask."""
        return self if self.last_seen is None else replace(self, last_seen=None)


Context = Packed | Paged


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Embeds:
    """Hold embeddings that replace those of image tokens."""

    features: jax.Array  # [M, width]: see models.towers.vision
    index: jax.Array  # [B, T] or [T] int32: the row of `features` that replaces a token's embedding; -1: none


@dataclass(frozen=True)
class Weights:
    """Hold parameters and their version; a completion names the version that it was sampled from."""

    params: Params
    version: int = 0


@dataclass(frozen=True)
class Column:
    """Declare an additional column of an objective's batches."""

    dtype: str = "float32"
    per_token: bool = True  # [B, T], at the position of the token whose target it describes; else [B], one per row
    width: int = 0  # above 0: this many numbers at each position, [B, T, width]
    table: bool = False  # [B, M, width], not by tokens: M entries of each row, as many as a batch brings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Hold rows of packed documents to train on.

    Targets are given and not shifted here: a row's last token has one too, and rows that are split over a mesh need no
    neighbour. A single row, as a loader makes it, has the same fields without B.
    """

    tokens: jax.Array  # [B, T] int32
    targets: jax.Array  # [B, T] int32: the token that follows; anything where loss_mask is 0
    positions: jax.Array  # [B, T] int32, from 0 in each document
    segment_ids: jax.Array  # [B, T] int32: 1, 2, .. the documents of a row; 0 is padding
    loss_mask: jax.Array  # [B, T] f32: what the target weighs, 0 or more: 0 in padding and at a document's end
    columns: dict[str, jax.Array] = field(default_factory=dict)  # what an objective needs besides, by name: see Column


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ImageBatch:
    """Hold images to train on, with their classes or captions.

    As in `Batch`, every array has the rows first, `loss_mask` weighs them, and `columns` holds what an objective needs
    besides.
    """

    images: jax.Array  # [B, H, W, 3] uint8
    labels: jax.Array  # [B] int32; -1: no class
    loss_mask: jax.Array  # [B] f32: 0 for padding
    columns: dict[str, jax.Array] = field(default_factory=dict)


def num_rows(batch: Batch | ImageBatch) -> int:
    """Return the number of rows of a batch."""
    return batch.loss_mask.shape[0]
