"""EncoderCache: which rows of the feature buffer hold the features of which items of images.

The buffer is on the device (engine.device.encoder). An item is encoded before the first step that computes some of its
image tokens, and its rows can be given to another item as soon as that step is planned: the device runs steps in order.
So a reference lasts for one plan, and the cache never keeps two sequences waiting for each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from dovetail.io.images.item import ImageItem


class EncoderCache:
    """`num_rows` rows of features, found by an item's key; those of the item that was used longest ago are taken first.

    The rows of an item need not be adjacent, so that an item always fits where enough rows are free.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.encoded = self.hits = 0  # items that were encoded, and that a plan found here
        self.clear()

    def clear(self) -> None:
        """Forget all features: the weights have changed, or the buffer was freed."""
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()  # by key, the oldest use first
        self._new: dict[bytes, ImageItem] = {}  # not encoded yet
        self._held: dict[bytes, np.ndarray] = {}

    @property
    def num_used(self) -> int:
        """Return the rows that hold features."""
        return self.num_rows - len(self._free)

    def begin(self) -> None:
        """Begin a plan: no item is held."""
        self._held = {}

    def hold(self, item: ImageItem, count: int) -> bool:
        """Hold the `count` rows of an item until the next plan; return False if it does not fit.

        An item that is not here takes the place of others that the plan does not hold, and is encoded with the plan.
        """
        if item.key in self._held:
            return True
        if item.key in self._rows:
            self._rows.move_to_end(item.key)
            self.hits += 1
        elif not self._allocate(item, count):
            return False
        self._held[item.key] = self._rows[item.key]
        return True

    def _allocate(self, item: ImageItem, count: int) -> bool:
        if count > self.num_rows - sum(map(len, self._held.values())):
            return False
        while len(self._free) < count:
            self._evict()
        self._rows[item.key] = np.array([self._free.pop() for _ in range(count)], np.int32)
        self._new[item.key] = item
        return True

    def _evict(self) -> None:
        key = next(key for key in self._rows if key not in self._held)
        self._free += self._rows.pop(key).tolist()
        self._new.pop(key, None)

    def take(self) -> tuple[Mapping[bytes, np.ndarray], list[tuple[ImageItem, np.ndarray]]]:
        """Return the rows of the items that the plan holds, by key, and the items that must be encoded before it."""
        new = [(item, self._rows[key]) for key, item in self._new.items()]
        self.encoded += len(new)
        self._new = {}
        return self._held, new
