"""SmolVLM and Idefics3: an image is enlarged to whole tiles, and the tiles and a small copy of it are encoded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dovetail.core.errors import UserError
from dovetail.io.images.item import ProcessedImage
from dovetail.io.images.patches import make_item
from dovetail.io.images.resample import resize
from dovetail.io.images.settings import HALF, TowerInput, check_equal, check_shared, read_resample
from dovetail.models.family import Fields

_LARGEST = 4096  # transformers shrinks larger images once more


@dataclass(frozen=True)
class TileProcessor:
    """Split images into tiles.

    Attributes:
        patch: The side of a patch.
        merge: How many patches become one feature, in each direction.
        image_token: The text of the image token, which is also the placeholder.
        image_id: Its id.
        longest: The longest side of an image before it is enlarged to whole tiles.
        tile: The side of a tile.
        splits: Whether images are split; otherwise the small copy is the whole input.
        resample: The filter.
        around: The text before each tile and after the last.
        whole: The text before the small copy.
    """

    patch: int
    merge: int
    image_token: str
    image_id: int
    longest: int
    tile: int
    splits: bool
    resample: str
    around: str
    whole: str

    @property
    def placeholder(self) -> str:
        """Return what chat templates write for an image."""
        return self.image_token

    def __call__(self, image: np.ndarray, param: str = "image") -> ProcessedImage:
        """Return the tiles, row by row, and the small copy last."""
        image = resize(image, *_longest_side(*image.shape[:2], self.longest), self.resample)
        rows, columns = 0, 0
        tiles: list[np.ndarray] = []
        if self.splits:
            height, width = _whole_tiles(*image.shape[:2], self.tile)
            image = resize(image, height, width, self.resample)
            if max(height, width) > self.tile:
                rows, columns = height // self.tile, width // self.tile
            at = [(r * self.tile, c * self.tile) for r in range(rows) for c in range(columns)]
            tiles = [image[y : y + self.tile, x : x + self.tile] for y, x in at]
        tiles.append(resize(image, self.tile, self.tile, self.resample))
        items = tuple(make_item(tile, self.patch, self.merge, self) for tile in tiles)
        return ProcessedImage(self._text(rows, columns), items)

    def low_detail(self) -> TileProcessor:
        """Return the processor that encodes the small copy alone."""
        return replace(self, splits=False)

    def _text(self, rows: int, columns: int) -> str:
        tokens = self.image_token * (self.tile // self.patch // self.merge) ** 2
        lines = [
            "".join(f"{self.around}<row_{r + 1}_col_{c + 1}>{tokens}" for c in range(columns)) + "\n"
            for r in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + self.around + self.whole + tokens + self.around


def _longest_side(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size with this longest side and the other side even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


def _whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return the size in whole tiles: the longer side is rounded up first, and the other follows it."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile


def build_smolvlm(f: Fields, tower: TowerInput) -> TileProcessor:
    """Build the processor from its settings."""
    check_shared(f, HALF)
    f.skip("do_pad", "return_row_col_info")  # tiles of one size need no padding
    longest, tile = f.get("size", {}).get("longest_edge", 4 * 364), f.get("max_image_size", {}).get("longest_edge", 364)
    if longest > _LARGEST:
        raise UserError(f"{f.where}: size.longest_edge must be at most {_LARGEST}, got {longest}", param="size")
    side = tower.patch * tower.merge
    if tile % side or (tile // tower.patch) ** 2 != tower.max_patches:
        raise UserError(f"{f.where}: max_image_size={tile} does not match the vision tower", param="max_image_size")
    check_equal(f, "image_seq_len", (tile // side) ** 2)
    return TileProcessor(
        tower.patch, tower.merge, tower.image_token, tower.image_id, longest, tile, f.get("do_image_splitting", True),
        read_resample(f, "lanczos"), tower.tokens.get("fake_image_token", "<fake_token_around_image>"),
        tower.tokens.get("global_image_token", "<global-img>"),
    )  # fmt: skip
