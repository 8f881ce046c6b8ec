"""The vision encoder of an engine: its shapes, its compiled function, and items packed for it.

The features of images are in one buffer on the device, whose rows the scheduler hands out (schedule.encoder_cache). An
encoder call computes the features of a few items and writes them there; a step with images reads them by row.

N items of a call, P patches of an item (padded), C numbers of a patch, F features of an item.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from dovetail.core.compute import Compute
from dovetail.core.mesh import Placement, constrain
from dovetail.core.types import Params
from dovetail.io.images.item import ImageItem
from dovetail.models.towers.vision import Tower
from dovetail.plan.serve_memory import MOST_PATCHES, feature_rows, most_patches

Encoded = tuple[ImageItem, np.ndarray]  # an item, and the rows of its features


@dataclass(frozen=True)
class EncoderShape:
    """Describe the shape that an encoder call is compiled for."""

    items: int  # N
    patches: int  # P
    tokens: ClassVar[int] = 0  # it is not a step (see batch.Shape)
    is_prompts: ClassVar[bool] = False


@dataclass(frozen=True)
class EncoderBuckets:
    """Hold the shapes of an engine's encoder calls.

    Attributes:
        rows: Rows of the buffer: a step may use the features of as many image tokens.
        patches: The sizes that items are padded to, in ascending order.
        items: How many items a call may have, in ascending order from 1.
    """

    rows: int
    patches: tuple[int, ...]
    items: tuple[int, ...] = (1, 4, 16)

    @classmethod
    def of(cls, tower: Tower, max_tokens: int, max_len: int, items: tuple[int, ...], least: int) -> EncoderBuckets:
        """Return the shapes for a tower.

        Args:
            tower: The tower.
            max_tokens: The most tokens of a step; the buffer has a row for each, and as many as the largest item needs.
            max_len: The most tokens of a sequence; larger items are refused.
            items: See above.
            least: Patches of an item below which fewer save no time.
        """
        most, whole = most_patches(tower, max_len), tower.patches_per_feature
        sizes, size = [], most
        while size > max(whole, tower.min_patches, least):
            sizes.append(size)
            size = -(-size // (2 * whole)) * whole  # half, in whole features
        return cls(feature_rows(tower, max_tokens, max_len), tuple(sorted({*sizes, most})), items)

    def usual(self) -> list[EncoderShape]:
        """Return every shape that a call can have."""
        return [EncoderShape(n, patches) for patches in self.patches for n in self._counts(patches)]

    def largest(self) -> EncoderShape:
        """Return the shape of the largest call."""
        return max(self.usual(), key=lambda shape: (shape.items * shape.patches, shape.patches))

    def calls(self, items: Iterable[Encoded]) -> Iterator[tuple[EncoderShape, list[Encoded]]]:
        """Yield calls for these items: each as many as possible of those that are padded to the same size."""
        groups: dict[int, list[Encoded]] = {}
        for item, rows in items:
            size = next(size for size in self.patches if size >= len(item.patches))
            groups.setdefault(size, []).append((item, rows))
        for patches, group in groups.items():
            while group:
                count = max(n for n in self._counts(patches) if n <= len(group))
                yield EncoderShape(count, patches), group[:count]
                group = group[count:]

    def _counts(self, patches: int) -> list[int]:
        return [n for n in self.items if n == 1 or n * patches <= MOST_PATCHES]


def pack_items(shape: EncoderShape, items: list[Encoded], tower: Tower, nowhere: int) -> tuple[np.ndarray, ...]:
    """Return the inputs of an encoder call: patches [N, P, C], positions [N, P, 2] and rows [N, F].

    Args:
        shape: The call's shape.
        items: Its items, at most N.
        tower: The tower.
        nowhere: The row of features that are padding; past the buffer's end.
    """
    N, P = shape.items, shape.patches
    patches = np.zeros((N, P, tower.patch_dim), np.uint8)
    positions = np.full((N, P, 2), -1, np.int32)
    rows = np.full((N, P // tower.patches_per_feature), nowhere, np.int32)
    for i, (item, own) in enumerate(items):
        count = len(item.patches)
        patches[i, :count], positions[i, :count], rows[i, : len(own)] = item.patches, item.positions, own
    return patches, positions, rows


@functools.partial(
    jax.jit, static_argnames=("tower", "compute", "platform", "placement"), donate_argnames=("features",)
)
def run_encoder(
    params: Params,
    features: jax.Array,
    patches: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    *,
    tower: Tower,
    compute: Compute,
    platform: str | None = None,
    placement: Placement | None = None,
) -> jax.Array:
    """Return the buffer with the features of these items written to their rows.

    Args:
        params: The weights of the tower.
        features: The buffer [rows, width]; donated.
        patches: [N, P, C] uint8.
        positions: [N, P, 2].
        rows: [N, F]; padding has a row past the buffer's end.
        tower: The tower.
        compute: The types to compute in.
        platform: The device's platform if it is not jax's default.
        placement: The mesh and its rules; None for one device.
    """
    with compute.products(platform):
        found = tower(params, patches, positions, placement)
    found: Any = found.reshape(-1, found.shape[-1]).astype(features.dtype)
    return constrain(features.at[rows.reshape(-1)].set(found, mode="drop"), placement, None, None)
