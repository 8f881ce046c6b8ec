"""Compute batches of images by number, as data.loader does for text: a batch depends on data, seed and number alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.core.errors import RecipeError
from dovetail.core.fingerprint import of_sources
from dovetail.core.types import ImageBatch
from dovetail.data.augment import eval_image, train_image
from dovetail.data.image_settings import ImageData
from dovetail.data.image_source import LabelledImages, open_images
from dovetail.data.pack import key, place, ranks

AHEAD = 4  # batches prepared in advance, at least
_HELD_OUT = 0x6865_6C64  # names the shuffle of the hold-out split, which does not depend on the seed
_CHANGES = 1  # folded into the seed of an image's random changes, so that they differ from the order


@dataclass(frozen=True)
class ImageLoader:
    """Yield batches of `batch` images over all hosts, of which this host gets a contiguous share.

    Attributes:
        source: The images.
        chosen: The numbers of the images to use.
        data: The settings.
        size: The side of an image in pixels.
        batch_size: Images of a batch over all hosts.
        train: Whether images are shuffled, repeated and changed at random. Otherwise batches hold the images once and
            in order, then padding.
        encode: Maps a caption to tokens; None: there are no captions.
        host_index: The number of this host.
        host_count: The number of hosts.
    """

    source: LabelledImages
    chosen: np.ndarray
    data: ImageData
    size: int
    batch_size: int
    train: bool = True
    encode: Callable[[str], np.ndarray] | None = None
    host_index: int = 0
    host_count: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.host_count:
            raise RecipeError(
                f"batch must be a multiple of the {self.host_count} hosts, got {self.batch_size}", param="batch"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.source.classes

    def batch(self, step: int) -> ImageBatch:
        """Return this host's images of a batch."""
        share = self.batch_size // self.host_count
        first = step * self.batch_size + self.host_index * share
        rows = [self._row(position) for position in range(first, first + share)]
        images, labels, weights, texts = zip(*rows, strict=True)
        columns = {} if self.encode is None else {"text": np.stack(texts)}
        return ImageBatch(np.stack(images), np.asarray(labels, np.int32), np.asarray(weights, np.float32), columns)  # type: ignore[arg-type]

    def _row(self, position: int) -> tuple[np.ndarray, int, float, np.ndarray | None]:
        """Return (image, label, weight, tokens) at a position of the endless list of images."""
        count = len(self.chosen)
        if not self.train and position >= count:
            return np.zeros((self.size, self.size, 3), np.uint8), 0, 0.0, self.encode("") if self.encode else None
        epoch, index = divmod(position, count)
        i = int(self.chosen[place(index, count, self.data.seed, epoch) if self.train else index])
        label = int(self.source.labels[i])
        return self._image(i, position), label, 1.0, self.encode(self.caption(i)) if self.encode else None

    def _image(self, i: int, position: int) -> np.ndarray:
        raw, where, augment = self.source.read(i), self.source.where(i), self.data.augment
        if not self.train:
            return eval_image(raw, where, self.size, crop=augment.crop_area < 1)
        rng = np.random.Generator(np.random.Philox(key=key(self.data.seed, position, _CHANGES)))
        return train_image(raw, where, self.size, augment, rng)

    def caption(self, i: int) -> str:
        """Return the text of an image: its own, or the name of its class in the prompt."""
        if self.source.texts is not None:
            return self.source.texts[i]
        return self.data.prompt.format(self.classes[self.source.labels[i]])

    def iterate(self, start_step: int = 0) -> Iterator[ImageBatch]:
        """Yield batches from `start_step` on, prepared by Grain's threads or processes; close() ends them."""
        import grain

        cores = os.cpu_count() or 1
        steps = grain.MapDataset.range(start_step, sys.maxsize).map(self.batch)
        threads = 1 if self.data.workers else min(16, cores)
        found: Any = steps.to_iter_dataset(grain.ReadOptions(threads, max(AHEAD, threads)))
        if self.data.workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():  # Grain reads absl's flags, which only a program of absl parses
                flags.FLAGS.mark_as_parsed()
            found = found.mp_prefetch(grain.MultiprocessingOptions(self.data.workers, 2))
        found = iter(found)
        try:
            yield from found
        finally:
            found.close()

    def documents(self, step: int) -> int:
        """Return 1: an image is a whole row."""
        return 1

    def notes(self, step: int) -> Mapping[str, float]:
        """Return the number of images of the batch."""
        return {"images": self.batch_size}


def open_image_data(
    data: ImageData,
    size: int,
    batch: int,
    encode: Callable[[str], np.ndarray] | None = None,
    *,
    host_index: int = 0,
    host_count: int = 1,
) -> tuple[ImageLoader, ImageLoader | None, dict[str, str]]:
    """Open the images of a recipe.

    Args:
        data: The settings.
        size: The side of an image in pixels.
        batch: Images of a step, over all hosts.
        encode: Maps a caption to tokens, if captions are wanted.
        host_index: The number of this host.
        host_count: The number of hosts.

    Returns:
        The training loader, the loader of the evaluation images (None without them), fingerprints of the sources.
    """
    source = open_images(data.path, data)
    if encode is not None and source.texts is None and (source.labels < 0).any():
        raise RecipeError(
            f"{source.name} has neither captions nor classes to make them from: set data.text_key",
            param="data.text_key",
        )
    held = split(len(source), data.held_out)
    hosts: dict[str, Any] = dict(host_index=host_index, host_count=host_count)
    rows = ImageLoader(source, np.flatnonzero(~held), data, size, batch, True, encode, **hosts)
    prints = [(data.path, source.digest)]
    if data.validation:
        other = open_images(data.validation, data)
        prints.append((data.validation, other.digest))
        evaluated = ImageLoader(other, np.arange(len(other)), data, size, batch, False, encode, **hosts)
    else:
        evaluated = ImageLoader(source, np.flatnonzero(held), data, size, batch, False, encode, **hosts)
    return rows, evaluated if len(evaluated.chosen) else None, of_sources(prints)


def split(count: int, share: float) -> np.ndarray:
    """Return [count] whether each image is held out, by a hash of its number: images added later do not change it."""
    return ranks(count, _HELD_OUT) < np.uint64(int(share * 2**64)) if share else np.zeros(count, bool)


def count_images(data: ImageData) -> int:
    """Return the number of training images."""
    source = open_images(data.path, data)
    return int((~split(len(source), data.held_out)).sum())
