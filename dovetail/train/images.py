"""Images in a training step: the columns of a batch, and the features that a vision tower makes of them.

B rows, T tokens, M items of a row, P patches of an item, C numbers of a patch, F features of an item.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.types import Batch, Column, Embeds, Packed, Params
from dovetail.data.pictures import INDEX, PATCHES, POSITIONS, ROPE
from dovetail.models.config import ModelConfig
from dovetail.models.spec import VISION
from dovetail.models.towers.vision import Vision


def image_columns(vision: Vision | None, patches: int) -> dict[str, Column]:
    """Return the columns of batches with images, whose items have at most `patches` patches; none if it is 0."""
    if vision is None or not patches:
        return {}
    return {
        PATCHES: Column("uint8", width=patches * vision.tower.patch_dim, table=True),
        POSITIONS: Column("int32", width=patches * 2, table=True),
        INDEX: Column("int32"),
    } | ({ROPE: Column("int32", width=3)} if vision.mrope else {})


def image_embeds(
    params: Params, cfg: ModelConfig, batch: Batch, placement: Placement | None, remat: str = "none"
) -> Embeds | None:
    """Return what replaces the embeddings of image tokens; None for a batch without columns of images.

    Unless `remat` is "none", the backward pass computes the tower's activations again.
    """
    if cfg.vision is None or PATCHES not in batch.columns:
        return None
    tower, (B, M, _) = cfg.vision.tower, batch.columns[PATCHES].shape
    patches = batch.columns[PATCHES].reshape(B * M, -1, tower.patch_dim)
    positions = batch.columns[POSITIONS].reshape(B * M, -1, 2)

    def encode(params: Params, patches: jax.Array, positions: jax.Array) -> jax.Array:
        return tower(params, patches, positions, placement)

    run = encode if remat == "none" else jax.checkpoint(encode)
    features = run(params[VISION], patches, positions)  # [B M, F, D]
    own = batch.columns[INDEX] - 1
    first = jnp.arange(B, dtype=own.dtype)[:, None] * (M * features.shape[1])
    return Embeds(features.reshape(-1, features.shape[-1]), jnp.where(own < 0, -1, own + first))


def rope_positions(batch: Batch) -> jax.Array:
    """Return the positions of rotary embeddings: [B, T], or [B, T, 3] for images of a model with multimodal RoPE."""
    return batch.columns.get(ROPE, batch.positions)


def image_ids(cfg: ModelConfig, batch: Batch) -> jax.Array | None:
    """Return [B, T] the item (1, 2, ..) of each token, 0 for text; None if no layer has a block mask."""
    if cfg.vision is None or not cfg.vision.block_mask or INDEX not in batch.columns:
        return None
    each = image_tokens(cfg.vision, batch)
    return (batch.columns[INDEX] + each - 1) // each


def image_tokens(vision: Vision, batch: Batch) -> int:
    """Return F, the most tokens that an item of the batch has."""
    patches = batch.columns[PATCHES].shape[-1] // vision.tower.patch_dim
    return patches // vision.tower.patches_per_feature


def with_images(packed: Packed, cfg: ModelConfig, batch: Batch) -> Packed:
    """Return the context of a batch in which the tokens of an image see each other, where the model's layers say so."""
    ids = image_ids(cfg, batch)
    if ids is None or cfg.vision is None:
        return packed
    return replace(packed, image_ids=ids, image_tokens=image_tokens(cfg.vision, batch))
