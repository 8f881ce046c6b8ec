"""Describe how a language model sees images: its vision tower, and what its layers do with the features.

An image becomes one or more items, and each item is a list of patches. A tower maps the patches of an item to features,
each of which takes the place of the embedding of one image token.

N items, P patches of an item (padded), C numbers of a patch, F features of an item, D width of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from dovetail.core.mesh import Placement
from dovetail.core.types import Params

CHANNELS = 3


class Tower(Protocol):
    """Describe a vision tower with its projector: a frozen dataclass, so that it can be a static argument."""

    @property
    def patch_dim(self) -> int:
        """Return C, the numbers of a patch: height, width and channels in this order, flattened."""
        ...

    @property
    def patches_per_feature(self) -> int:
        """Return how many patches of an item become one feature."""
        ...

    @property
    def min_patches(self) -> int:
        """Return the fewest patches of an item; items of a tower with a fixed size have `max_patches`."""
        ...

    @property
    def max_patches(self) -> int:
        """Return the most patches of an item."""
        ...

    def spec(self) -> dict[str, Any]:
        """Return the tree of the tower's and the projector's weights as ParamSpecs."""
        ...

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items.

        Args:
            params: The weights, with the structure of `spec`.
            patches: [N, P, C] uint8: pixels as they are; the tower normalises them.
            positions: [N, P, 2] int32: x and y of each patch in its item; -1 for padding.
            placement: The mesh and its rules; None for one device.

        Returns:
            [N, P // patches_per_feature, width] in the dtype of the weights; an item's features come first, padding
            after them. The width is D, or (1 + len(Vision.deepstack)) D.
        """
        ...

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item."""
        ...


@dataclass(frozen=True)
class SquareTower:
    """Share the sizes of towers for images of any shape, in which a square of patches becomes a feature.

    Attributes:
        patch_size: The side of a patch in pixels.
        square: The patches of a square's side.
        tokens: The most features of an item.
    """

    patch_size: int
    square: int
    tokens: int

    @property
    def patch_dim(self) -> int:
        """Return the numbers of a patch."""
        return self.patch_size**2 * CHANNELS

    @property
    def patches_per_feature(self) -> int:
        """Return how many patches of an item become one feature."""
        return self.square**2

    @property
    def min_patches(self) -> int:
        """Return the fewest patches of an item."""
        return self.patches_per_feature

    @property
    def max_patches(self) -> int:
        """Return the most patches of an item."""
        return self.tokens * self.patches_per_feature


@dataclass(frozen=True)
class Vision:
    """Describe how a language model sees images.

    Attributes:
        tower: The vision tower with its projector.
        image_token: The id of the token that a feature replaces.
        block_mask: Which layers let the tokens of an item see each other: "" (none), "sliding" or "all".
        mrope: If image tokens have positions in time, height and width, `Rope.axes` of the layers.
        deepstack: The language model's layers whose outputs get further features added, in order.
    """

    tower: Tower
    image_token: int
    block_mask: str = ""
    mrope: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()

    def masks(self, window: int | None) -> bool:
        """Return whether layers with this sliding window let the tokens of an item see each other."""
        return self.block_mask == "all" or (self.block_mask == "sliding" and window is not None)
