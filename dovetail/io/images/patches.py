"""Cut a resized image into the patches of an item.

P patches of an item, C numbers of a patch.
"""

from __future__ import annotations

import hashlib

import numpy as np

from dovetail.io.images.item import ImageItem


def make_item(image: np.ndarray, patch: int, merge: int, settings: object, *, blocks: bool = False) -> ImageItem:
    """Return the item of an image whose sides are multiples of `patch` times `merge`.

    Args:
        image: [H, W, 3] uint8.
        patch: The side of a patch in pixels.
        merge: How many patches become one feature, in each direction.
        settings: The processor's settings, for the key: an object whose `repr` names them all.
        blocks: Whether the patches of a feature follow each other; otherwise they go row by row.
    """
    height, width, _ = image.shape
    rows, columns, block = height // patch, width // patch, merge if blocks else 1
    cut = image.reshape(rows // block, block, patch, columns // block, block, patch, 3)
    patches = cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)
    y, x = np.mgrid[:rows, :columns].astype(np.int32)
    positions = np.stack([x, y], -1).reshape(rows // block, block, columns // block, block, 2)
    positions = positions.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    key = hashlib.blake2b(repr((settings, patch, merge, blocks, image.shape)).encode(), digest_size=32)
    key.update(np.ascontiguousarray(patches))
    return ImageItem(patches, positions, (rows // merge, columns // merge), key.digest())
