"""SigLIP's loss: every image with every text of a batch, the pairs of the batch as positives.

The logits of a batch are never whole. Over a mesh each device keeps its images, and the texts go round the devices; on
a device, texts are taken in chunks, whose logits are computed again in the backward pass.

B pairs, E numbers of an embedding.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from dovetail.core.mesh import Placement

CHUNK = 2048  # texts whose logits exist at once


def sigmoid_loss(
    images: jax.Array,  # [B, E] f32
    texts: jax.Array,  # [B, E] f32
    scale: jax.Array,
    bias: jax.Array,
    weights: jax.Array | None = None,  # [B] f32
    placement: Placement | None = None,
) -> jax.Array:
    """Return the loss of each image [B]: the sum over texts of -log sigmoid(y (scale image . text + bias)).

    y is 1 for its own text and -1 for others. With `weights`, a pair of an image and a text counts by the product of
    theirs.
    """
    weights = jnp.ones(images.shape[0], jnp.float32) if weights is None else weights
    axes = _row_axes(placement, images.shape[0])
    if placement is None or not axes:
        return _seen(images, texts, weights, weights, scale, bias, jnp.arange(images.shape[0]))
    rows = P(axes)
    around = functools.partial(_go_round, axes=axes, count=math.prod(placement.mesh.shape[name] for name in axes))
    return jax.shard_map(
        around, mesh=placement.mesh, in_specs=(rows, rows, P(), P(), rows), out_specs=rows, check_vma=False
    )(images, texts, scale, bias, weights)


def _row_axes(placement: Placement | None, rows: int) -> tuple[str, ...]:
    """Return the mesh axes that the rows are split over."""
    if placement is None:
        return ()
    found = placement.partition(("batch",), (rows,))[0] or ()
    return (found,) if isinstance(found, str) else tuple(found)


def _go_round(
    images: jax.Array,
    texts: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    weights: jax.Array,
    *,
    axes: tuple[str, ...],
    count: int,
) -> jax.Array:
    """Return the loss of a device's images, with the texts of all devices one after another."""
    b = images.shape[0]
    to = [(i, (i + 1) % count) for i in range(count)]
    mine = jnp.arange(b)

    def one(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        loss, texts, their_weights = carry
        own = jnp.where(step == 0, mine, -1)  # after the first, all texts are others'
        loss = loss + _seen(images, texts, weights, their_weights, scale, bias, own)
        texts, their_weights = (lax.ppermute(x, axes, to) for x in (texts, their_weights))
        return (loss, texts, their_weights), None

    start = (jnp.zeros(b, jnp.float32), texts, weights)
    return lax.scan(one, start, jnp.arange(count))[0][0]


def _seen(
    images: jax.Array,
    texts: jax.Array,
    weights: jax.Array,
    their_weights: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    own: jax.Array,  # [B] the number of each image's own text among `texts`; -1: it is not there
) -> jax.Array:
    """Return the loss of images over some texts, chunk by chunk."""
    many = texts.shape[0]
    chunk = next(size for size in range(min(CHUNK, many), 0, -1) if many % size == 0)

    @jax.checkpoint
    def one(loss: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        theirs, their_weights, numbers = part
        logits = scale * (images @ theirs.T) + bias
        signed = jnp.where(own[:, None] == numbers, logits, -logits)
        return loss - jax.nn.log_sigmoid(signed) @ their_weights, None

    parts = (texts.reshape(-1, chunk, texts.shape[1]), their_weights.reshape(-1, chunk))
    numbers = jnp.arange(many).reshape(-1, chunk)
    loss, _ = lax.scan(one, jnp.zeros(images.shape[0], jnp.float32), (*parts, numbers))
    return weights * loss


def reference_sigmoid_loss(images: jax.Array, texts: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Return the same from the whole matrix of logits, as the paper writes it (arXiv 2303.15343)."""
    logits = scale * (images @ texts.T) + bias
    return -jax.nn.log_sigmoid(logits * (2 * jnp.eye(len(images)) - 1)).sum(axis=1)
