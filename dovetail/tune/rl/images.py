"""RolloutImages: the images of episodes, as items of requests (sampler) and as columns of batches (trainer)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.core.types import Batch
from dovetail.data.pictures import PictureRows, distinct, picture_reader
from dovetail.io.images.item import ImagePrompt
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.images.prompt import locate
from dovetail.models.towers.vision import Vision
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.layout import Layout
from dovetail.tune.rl.prompts import PromptRecord

KEEP = 64  # processed images that are remembered: all completions of a prompt have the same


class RolloutImages:
    """Find the images of episodes: those of their prompts, and of observations after them.

    Args:
        processor: The policy's.
        vision: How the policy sees images.
        records: The prompts, with their images as files.
    """

    def __init__(self, processor: ImageProcessor, vision: Vision, records: Iterable[PromptRecord]):
        self._read, self._image_id = picture_reader(processor, KEEP), processor.image_id
        self._records = {record.index: record for record in records}
        self._rows = PictureRows(self._read, vision, max_patches(self._records.values()))
        self._items = 1  # of a row so far: fewer would compile the step again

    def prompt(self, episode: Episode) -> ImagePrompt | list[int]:
        """Return the tokens of an episode so far, with its images, as the prompt of a request."""
        tokens, files = episode.tokens.tolist(), self._files(episode)
        return locate(tokens, [self._read(file) for file in files], self._image_id) if files else tokens

    def add(self, batch: Batch, layout: Layout, episodes: Sequence[Episode]) -> Batch:
        """Return the batch with the columns of images (data.pictures.PictureRows), if any prompt has some."""
        if not self._rows.patches:
            return batch
        rows: list[list[tuple[int, Any]]] = [[] for _ in range(layout.rows)]
        for (row, _, start), episode in zip(layout.at, episodes, strict=True):
            rows[row].append((start, self._files(episode)))
        files = [[own for _, own in sorted(row)] for row in rows]
        self._items = max(self._items, *map(self._num_items, files))
        return self._rows.add(batch, files, self._items)

    def _num_items(self, documents: Sequence[Sequence[bytes]]) -> int:
        keys = {key for files in documents for key in distinct(files)}
        return sum(len(self._read(file).items) for file, _ in keys)

    def _files(self, episode: Episode) -> list[bytes]:
        own = [image.file for image in self._records[episode.prompt_index].images]
        return own + [base64.b64decode(file) for file in episode.images]


def max_patches(records: Iterable[PromptRecord]) -> int:
    """Return the most patches of an item of the prompts' images; 0 without images."""
    return max((image.patches for record in records for image in record.images), default=0)


def max_items(records: Iterable[PromptRecord]) -> int:
    """Return the most items of the images of a prompt, whose completions share them in a row; 0 without images."""
    return max((sum(image.items for image in record.images) for record in records), default=0)
