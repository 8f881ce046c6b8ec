"""Gemma 4: an image keeps its aspect ratio and is resized to as many image tokens as fit a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dovetail.core.errors import UserError
from dovetail.io.images.item import ProcessedImage
from dovetail.io.images.patches import make_item
from dovetail.io.images.resample import resize
from dovetail.io.images.settings import TowerInput, check_shared, read_resample
from dovetail.models.family import Fields

BUDGETS = (70, 140, 280, 560, 1120)  # image tokens


@dataclass(frozen=True)
class BudgetProcessor:
    """Resize images to a budget of image tokens.

    Attributes:
        patch: The side of a patch.
        merge: How many patches become one feature, in each direction.
        image_token: The text of the image token, which is also the placeholder.
        image_id: Its id.
        budget: The most image tokens of an image.
        resample: The filter.
        start: The text before the image tokens.
        end: The text after them.
    """

    patch: int
    merge: int
    image_token: str
    image_id: int
    budget: int
    resample: str
    start: str
    end: str

    @property
    def placeholder(self) -> str:
        """Return what chat templates write for an image."""
        return self.image_token

    def __call__(self, image: np.ndarray, param: str = "image") -> ProcessedImage:
        """Return the one item of the image, without padding."""
        size = _fit(*image.shape[:2], self.patch * self.merge, self.budget)
        item = make_item(resize(image, *size, self.resample), self.patch, self.merge, self)
        return ProcessedImage(self.start + self.image_token * (item.grid[0] * item.grid[1]) + self.end, (item,))

    def low_detail(self) -> BudgetProcessor:
        """Return the processor with the smallest budget."""
        return replace(self, budget=min(self.budget, *BUDGETS))


def _fit(height: int, width: int, side: int, budget: int) -> tuple[int, int]:
    """Return the largest size in multiples of `side` with about this aspect ratio and at most `budget` squares."""
    factor = math.sqrt(budget * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        rows, columns = min(height // width, budget), 1
    return rows * side, columns * side


def build_gemma4(f: Fields, tower: TowerInput) -> BudgetProcessor:
    """Build the processor from its settings."""
    check_shared(f, None)
    # Of the 12B model, whose tower takes squares of 48 pixels as they are, patches and pooling are those of others.
    if (side := f.get("patch_size", 16) * f.get("pooling_kernel_size", 3)) != tower.patch * tower.merge:
        raise UserError(f"{f.where}: patch_size times pooling_kernel_size is {side}, and the model has "
                        f"{tower.patch * tower.merge}", param="patch_size")  # fmt: skip
    budget = f.get("max_soft_tokens", 280)
    if budget not in BUDGETS or budget * tower.merge**2 > tower.max_patches:
        raise UserError(f"{f.where}: max_soft_tokens={budget!r} is not supported", param="max_soft_tokens")
    f.skip("image_seq_length", "audio_seq_length", "audio_ms_per_token", "size")
    start, end = tower.tokens.get("boi_token", "<|image>"), tower.tokens.get("eoi_token", "<image|>")
    return BudgetProcessor(
        tower.patch, tower.merge, tower.image_token, tower.image_id, budget, read_resample(f, "bicubic"), start, end
    )
