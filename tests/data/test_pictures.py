"""Columns of images: documents of a row share their images, and multimodal RoPE counts in each document."""

from __future__ import annotations

from typing import Any

import numpy as np
from image_cases import FakeTower

from dovetail.core.types import Batch
from dovetail.data.pictures import PictureRows
from dovetail.io.images.item import ImageItem, ProcessedImage
from dovetail.models.towers.vision import Vision
from dovetail.ops.rope import spatial_positions

IMAGE = 9
GRIDS = {b"wide": (1, 3), b"square": (2, 2)}


def read(file: bytes) -> ProcessedImage:
    """An item of 4 patches per feature, whose pixels are the length of the file's name."""
    rows, columns = GRIDS[file]
    size = 4 * rows * columns
    item = ImageItem(np.full((size, 12), len(file), np.uint8), np.zeros((size, 2), np.int32), (rows, columns), file)
    return ProcessedImage("", (item,))


def test_documents_share_images_and_count_positions_from_their_start():
    documents = [
        ([1, 9, 9, 9, 2, 9, 9, 9, 9, 3], [b"wide", b"square"]),
        ([1, 9, 9, 9, 2, 9, 9, 9, 4], [b"wide", b"wide"]),  # twice: two images
        ([5, 6], []),
    ]
    tokens = np.asarray([token for own, _ in documents for token in own] + [0], np.int32)[None]
    sizes = [len(own) for own, _ in documents]
    segments = np.repeat([1, 2, 3, 0], [*sizes, 1])[None].astype(np.int32)
    given: Any = (tokens, tokens, tokens, segments, np.ones(tokens.shape, np.float32), {})
    tower: Any = FakeTower(12, 4, 16)
    rows = PictureRows(read, Vision(tower, IMAGE, mrope=(2, 1, 1)), 16)
    columns: Any = rows.add(Batch(*given), [[files for _, files in documents]], 3).columns
    assert columns["patches"].shape == (1, 3, 16 * 12)
    np.testing.assert_array_equal(columns["patches"].reshape(3, 16, 12).max((1, 2)), [4, 6, 4])
    wide, square, again = (4 * item + 1 + np.arange(4) for item in range(3))  # 4 features of each item
    text = [0]
    expected = [text, wide[:3], text, square, text, text, wide[:3], text, again[:3], text, text, text, text]
    np.testing.assert_array_equal(columns["image_index"][0], np.concatenate(expected))
    places = [[(1, 1, 3), (5, 2, 2)], [(1, 1, 3), (5, 1, 3)], []]
    wanted = [spatial_positions(size, own) for size, own in zip(sizes, places, strict=True)]
    np.testing.assert_array_equal(columns["rope_positions"][0, :-1], np.concatenate(wanted))
