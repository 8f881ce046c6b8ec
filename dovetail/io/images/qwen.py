"""Qwen2.5-VL and Qwen3-VL: an image keeps about its size, rounded to whole features, between two numbers of pixels.

A tower of this family reads two frames at a time, and an image is a frame that is shown twice. One frame is given to
the tower, which adds up its weights for the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dovetail.core.errors import RequestError
from dovetail.io.images.item import ProcessedImage
from dovetail.io.images.patches import make_item
from dovetail.io.images.resample import resize
from dovetail.io.images.settings import HALF, TowerInput, check_equal, check_shared, read_resample
from dovetail.models.family import Fields
from dovetail.models.towers.qwen2_5_vl import CLIP_MEAN, CLIP_STD

_MOST_RATIO = 200


@dataclass(frozen=True)
class RangeProcessor:
    """Resize images to a range of pixels; the patches of a feature follow each other.

    Attributes:
        patch: The side of a patch.
        merge: How many patches become one feature, in each direction.
        image_token: The text of the image token, which is also the placeholder: templates write the tokens around it.
        image_id: Its id.
        min_pixels: The fewest pixels of a resized image.
        max_pixels: The most.
        resample: The filter.
    """

    patch: int
    merge: int
    image_token: str
    image_id: int
    min_pixels: int
    max_pixels: int
    resample: str

    @property
    def placeholder(self) -> str:
        """Return what chat templates write for an image."""
        return self.image_token

    def __call__(self, image: np.ndarray, param: str = "image") -> ProcessedImage:
        """Return the one item of the image."""
        height, width, _ = image.shape
        if max(height, width) > _MOST_RATIO * min(height, width):
            message = (
                f"`{param}` must be at most {_MOST_RATIO} times as long as it is wide, or as wide as it is long, "
                f"got {width} x {height}."
            )
            raise RequestError(message, param=param, code="invalid_image")
        size = _round_size(height, width, self.patch * self.merge, self.min_pixels, self.max_pixels)
        item = make_item(resize(image, *size, self.resample), self.patch, self.merge, self, blocks=True)
        return ProcessedImage(self.image_token * (item.grid[0] * item.grid[1]), (item,))

    def low_detail(self) -> RangeProcessor:
        """Return the processor of images with at most 512 x 512 pixels, as OpenAI has it."""
        return replace(self, max_pixels=max(min(self.max_pixels, 512 * 512), self.min_pixels))


def _round_size(height: int, width: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Return the nearest size in multiples of `side` with pixels between `fewest` and `most`."""
    rows, columns = round(height / side), round(width / side)  # half to even
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif rows * columns * side**2 < fewest:
        stretch = math.sqrt(fewest / (height * width))
        rows, columns = math.ceil(height * stretch / side), math.ceil(width * stretch / side)
    return rows * side, columns * side


def build_qwen(f: Fields, tower: TowerInput) -> RangeProcessor:
    """Build the processor from its settings."""
    # Qwen2.5-VL's towers, with patches of 14 pixels, normalise as CLIP does.
    check_shared(f, *((list(CLIP_MEAN), list(CLIP_STD)) if tower.patch == 14 else (HALF, HALF)))
    check_equal(f, "patch_size", tower.patch)
    check_equal(f, "merge_size", tower.merge)
    f.only("temporal_patch_size", 2)
    size = f.get("size", {})
    fewest = f.get("min_pixels", size.get("shortest_edge", size.get("min_pixels", 56 * 56)))
    most = f.get("max_pixels", size.get("longest_edge", size.get("max_pixels", 28 * 28 * 1280)))
    most = min(most, tower.max_patches * tower.patch**2)
    return RangeProcessor(
        tower.patch, tower.merge, tower.image_token, tower.image_id, fewest, most, read_resample(f, "bicubic")
    )
