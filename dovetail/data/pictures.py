"""The images of examples: read from records, kept as files beside the tokens, and made into a batch's patches.

A store keeps the files, not the pixels: a photo of 100 KB may become 13 MB of tiles. The loader's threads decode them.

B rows, T tokens, M items of a row (padded), P patches of an item (padded), C numbers of a patch.
"""

from __future__ import annotations

import base64
import binascii
import io
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.types import Batch
from dovetail.io.chat import is_image
from dovetail.io.images.decode import as_image
from dovetail.io.images.item import ImageItem, ProcessedImage
from dovetail.io.images.processor import ImageProcessor
from dovetail.models.towers.vision import Vision
from dovetail.ops.rope import spatial_positions

FILES, TABLE = "images.bin", "images.npz"
NUMBERS = ("tokens", "items", "patches")  # of each image, in the table
# columns of a batch: see `PictureRows`
PATCHES, POSITIONS, INDEX, ROPE = COLUMNS = "patches", "patch_positions", "image_index", "rope_positions"
NO_IMAGES = "`dovetail sft`, `dpo`, `distill` and `rl` train on images, with a model that has a vision tower"


@dataclass(frozen=True)
class Picture:
    """Hold an image of an example, and what the model's processor makes of it."""

    file: bytes  # a JPEG, PNG, WebP or GIF file
    text: str  # takes the place of its placeholder
    tokens: int  # image tokens of the text
    items: int
    patches: int  # of its largest item


def read_picture(value: Any, processor: ImageProcessor, folder: Path) -> Picture:
    """Return the image of a record.

    Args:
        value: A path, a data: URL, bytes, a dict of `bytes` or `path` (as Hugging Face datasets store images), a PIL
            image or an array.
        processor: The model's.
        folder: The folder that relative paths start from.
    """
    file = _file(value, folder)
    found = processor(as_image(file, param="images"), "images")
    tokens = sum(item.grid[0] * item.grid[1] for item in found.items)
    return Picture(file, found.text, tokens, len(found.items), max(len(item.patches) for item in found.items))


def _file(value: Any, folder: Path) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:"):
        return _from_url(value)
    if isinstance(value, str) and "://" in value[:8]:
        raise UserError(f"images: {value[:60]!r} is not read from the network: download it, and give its path")
    if isinstance(value, str | Path):
        path = folder / Path(value).expanduser()
        if not path.is_file():
            raise UserError(f"images: there is no file {str(path)!r}; relative paths start from the data's folder")
        return path.read_bytes()
    return _as_png(as_image(value, param="images"))


def _from_url(url: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
    except binascii.Error:
        pass
    raise UserError(f"images: expected a data: URL in base64, got {url[:40]!r}")


def _as_png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def count_images(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of image parts of messages."""
    contents = [message.get("content") for message in messages]
    return sum(is_image(part) for content in contents if isinstance(content, list) for part in content)


# --- on disk ----------------------------------------------------------------------------------------------------------


class PictureWriter:
    """Write the images of documents, one document after another; without images it writes no file."""

    def __init__(self, folder: Path):
        self._folder, self._files, self._out = folder, ExitStack(), None
        self._counts, self._sizes = array("q"), array("q")
        self._numbers = {name: array("q") for name in NUMBERS}

    def add(self, pictures: Sequence[Picture]) -> None:
        """Write the images of the next document."""
        self._counts.append(len(pictures))
        for picture in pictures:
            if self._out is None:
                self._out = self._files.enter_context((self._folder / FILES).open("wb"))
            self._out.write(picture.file)
            self._sizes.append(len(picture.file))
            for name, values in self._numbers.items():
                values.append(getattr(picture, name))

    def close(self) -> None:
        """Close the file."""
        self._files.close()

    def finish(self) -> None:
        """Close the file, and write where each image is."""
        self.close()
        if self._out is not None:
            first, offsets = (np.concatenate([[0], np.cumsum(x)]) for x in (self._counts, self._sizes))
            numbers: Any = {name: np.asarray(values) for name, values in self._numbers.items()}
            np.savez(self._folder / TABLE, first=first, offsets=offsets, **numbers)


class StoredPictures:
    """Read the images of a store."""

    def __init__(self, folder: Path):
        table = self._table = dict(np.load(folder / TABLE))
        self._first, self._offsets = table["first"], table["offsets"]  # [documents + 1] images, [images + 1] bytes
        self.max_patches = int(table["patches"].max())
        self._bytes = np.memmap(folder / FILES, np.uint8, "r")
        self.arrays = self._bytes, self._first, self._offsets

    @classmethod
    def of(cls, folder: Path) -> StoredPictures | None:
        """Return the images of a store's folder; None if it has none."""
        return cls(folder) if (folder / TABLE).exists() else None

    def items(self, document: int) -> list[int]:
        """Return the number of items of each image of a document."""
        return self._table["items"][self._first[document] : self._first[document + 1]].tolist()

    def files(self, document: int) -> list[bytes]:
        """Return the files of a document's images."""
        return [self._bytes[self._offsets[i] : self._offsets[i + 1]].tobytes() for i in self._places(document)]

    def pictures(self, document: int) -> tuple[Picture, ...]:
        """Return the images of a document, without their text."""
        numbers = [{name: int(self._table[name][i]) for name in NUMBERS} for i in self._places(document)]
        return tuple(Picture(file, "", **own) for file, own in zip(self.files(document), numbers, strict=True))

    def _places(self, document: int) -> range:
        return range(int(self._first[document]), int(self._first[document + 1]))


# --- batches ----------------------------------------------------------------------------------------------------------


ReadPicture = Callable[[bytes], ProcessedImage]


def picture_reader(processor: ImageProcessor, keep: int = 0) -> ReadPicture:
    """Return a function that decodes and processes a file; it remembers the last `keep` files."""

    def read(file: bytes) -> ProcessedImage:
        return processor(as_image(file, param="images"), "images")

    return lru_cache(keep)(read) if keep else read


@dataclass(frozen=True)
class PictureRows:
    """Add the columns of images to batches.

    `patches` [B, M, P * C] uint8 and `patch_positions` [B, M, P * 2] int32 are the items of each row, and `image_index`
    [B, T] int32 is 0, or 1 + the number of the feature among those of the row that replaces the token's embedding.
    Documents of a row with the same image share its items: the two of a preference, the completions of a prompt. With
    multimodal RoPE, `rope_positions` [B, T, 3] int32 are the positions in time, height and width.
    """

    read: ReadPicture
    vision: Vision
    patches: int  # P

    def add(self, batch: Any, rows: Sequence[Sequence[Sequence[bytes]]], items: int) -> Batch:
        """Return the batch with the images of its rows, padded to at least `items` items.

        Args:
            batch: numpy arrays.
            rows: The files of each document of each row, in the order of their tokens.
            items: The most items of a row (`distinct`), over all hosts.
        """
        B, M, C = len(rows), bucket(items), self.vision.tower.patch_dim
        pixels = np.zeros((B, M, self.patches, C), np.uint8)
        positions = np.zeros((B, M, self.patches, 2), np.int32)
        index, rope = np.zeros(batch.tokens.shape, np.int32), np.zeros((*batch.tokens.shape, 3), np.int32)
        for b, documents in enumerate(rows):
            found, order = self._items(documents)
            for m, item in enumerate(found):
                positions[b, m] = -1
                pixels[b, m, : len(item.patches)] = item.patches
                positions[b, m, : len(item.patches)] = item.positions
            is_image = batch.tokens[b] == self.vision.image_token
            index[b, is_image] = self._index(found, order)
            if self.vision.mrope:
                rope[b] = _rope_positions(batch.segment_ids[b], is_image, [found[m].grid for m in order])
        columns = {PATCHES: pixels.reshape(B, M, -1), POSITIONS: positions.reshape(B, M, -1), INDEX: index}
        columns |= {ROPE: rope} if self.vision.mrope else {}
        return replace(batch, columns={**batch.columns, **columns})

    def _items(self, documents: Sequence[Sequence[bytes]]) -> tuple[list[ImageItem], list[int]]:
        """Return the items of a row, and the item of each image of its documents in order."""
        found: list[ImageItem] = []
        places: dict[tuple[bytes, int], range] = {}
        order: list[int] = []
        for key in (key for files in documents for key in distinct(files)):
            if key not in places:
                items = self.read(key[0]).items
                places[key] = range(len(found), len(found) + len(items))
                found += items
            order += places[key]
        return found, order

    def _index(self, items: Sequence[ImageItem], order: Sequence[int]) -> np.ndarray:
        each = self.patches // self.vision.tower.patches_per_feature
        own = [m * each + np.arange(items[m].grid[0] * items[m].grid[1]) for m in order]
        return np.concatenate([np.zeros(0, np.int64), *own]) + 1


def _rope_positions(segments: np.ndarray, is_image: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return positions [T, 3] of a row, whose image tokens are those of items with these grids, in order."""
    found, left = np.zeros((len(segments), 3), np.int32), list(grids)
    edges = np.flatnonzero(np.diff(segments, prepend=-1, append=-1))
    for first, end in pairwise(edges.tolist()):
        at, images = first, []
        while len(after := np.flatnonzero(is_image[at:end])):
            rows, columns = left.pop(0)
            start = int(at + after[0])
            images.append((start - first, rows, columns))
            at = start + rows * columns
        found[first:end] = spatial_positions(end - first, images)
    return found


def distinct(files: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Return a key for each image of a document; one that occurs twice is two images, whose tokens are not one block.

    Equal keys of other documents in the row are the same image.
    """
    return [(file, list(files[:i]).count(file)) for i, file in enumerate(files)]


def bucket(items: int) -> int:
    """Return the items that a row is padded to: few sizes, each at most a quarter above the one before it."""
    step = 1 << max(0, items.bit_length() - 3)
    return max(1, -(-items // step) * step)
