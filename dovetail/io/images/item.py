"""The patches of an image, and a prompt with images: what processors make, and the engine and the trainer take.

P patches of an item, C numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ImageItem:
    """Hold one input of a vision tower: a whole image, or one of its tiles."""

    patches: np.ndarray  # [P, C] uint8: rows, columns and channels of a patch in this order
    positions: np.ndarray  # [P, 2] int32: x and y of each patch
    grid: tuple[int, int]  # rows and columns of its features; their product is the number of its image tokens
    key: bytes  # a hash of the pixels, their shape and the processor's settings; equal keys have equal features


@dataclass(frozen=True)
class ProcessedImage:
    """Hold what a processor makes of an image."""

    text: str  # takes the placeholder's place in the prompt, with one image token for each feature
    items: tuple[ImageItem, ...]


@dataclass(frozen=True)
class ImageSpan:
    """Say which tokens of a prompt the features of an item replace."""

    start: int  # the position of the first
    item: ImageItem

    @property
    def count(self) -> int:
        """Return the number of image tokens."""
        return self.item.grid[0] * self.item.grid[1]

    @property
    def end(self) -> int:
        """Return the position after the last image token."""
        return self.start + self.count


@dataclass(frozen=True)
class ImagePrompt:
    """Hold the tokens of a prompt and where its images are, in order."""

    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...] = ()
