"""Gemma 3 and SigLIP: every image is resized to one square."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.core.errors import UserError
from dovetail.io.images.item import ProcessedImage
from dovetail.io.images.patches import make_item
from dovetail.io.images.resample import resize
from dovetail.io.images.settings import HALF, TowerInput, check_equal, check_shared, read_resample
from dovetail.models.family import Fields


@dataclass(frozen=True)
class SquareProcessor:
    """Resize images to a square.

    Attributes:
        patch: The side of a patch.
        merge: How many patches become one feature, in each direction.
        image_token: The text of the image token.
        image_id: Its id.
        placeholder: What chat templates write for an image.
        size: The side of the square.
        resample: The filter.
        before: The text before the image tokens.
        after: The text after them.
    """

    patch: int
    merge: int
    image_token: str
    image_id: int
    placeholder: str
    size: int
    resample: str
    before: str = ""
    after: str = ""

    def __call__(self, image: np.ndarray, param: str = "image") -> ProcessedImage:
        """Return the one item of the image."""
        item = make_item(resize(image, self.size, self.size, self.resample), self.patch, self.merge, self)
        return ProcessedImage(self.before + self.image_token * (item.grid[0] * item.grid[1]) + self.after, (item,))

    def low_detail(self) -> SquareProcessor:
        """Return the processor itself: the tower reads one size."""
        return self


def build_gemma3(f: Fields, tower: TowerInput) -> SquareProcessor:
    """Build the processor of Gemma 3 from its settings."""
    f.only("do_pan_and_scan", False)
    f.skip("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
    start = tower.tokens.get("boi_token", "<start_of_image>")
    end = tower.tokens.get("eoi_token", "<end_of_image>")
    size = _size(f, tower)
    check_equal(f, "image_seq_length", (size // tower.patch // tower.merge) ** 2)
    resample = read_resample(f, "bilinear")
    return SquareProcessor(
        tower.patch, tower.merge, tower.image_token, tower.image_id, start, size, resample, f"\n\n{start}", f"{end}\n\n"
    )


def build_siglip(f: Fields, tower: TowerInput) -> SquareProcessor:
    """Build the processor of SigLIP, and of SigLIP 2 with a fixed size, from its settings."""
    size, resample = _size(f, tower), read_resample(f, "bicubic")
    return SquareProcessor(
        tower.patch, tower.merge, tower.image_token, tower.image_id, tower.image_token, size, resample
    )


def _size(f: Fields, tower: TowerInput) -> int:
    check_shared(f, HALF)
    sides = f.get("size", {"height": 224, "width": 224})
    size = sides.get("height")
    if sides != {"height": size, "width": size} or (size // tower.patch) ** 2 != tower.max_patches:
        raise UserError(f"{f.where}: size={sides} does not match the vision tower", param="size")
    return size
