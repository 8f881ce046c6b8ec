"""MediaLoader: the images of a request, read from their sources and processed for the model, beside the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dovetail.core.errors import RequestError, UserError
from dovetail.io.images.decode import decode
from dovetail.io.images.item import ProcessedImage
from dovetail.serve.config import ServerConfig
from dovetail.serve.media.source import ImageReference, MediaSources
from dovetail.serve.request_context import salted

if TYPE_CHECKING:  # it loads jax, which a server of a text model does without
    from dovetail.io.images.processor import ImageProcessor

MAX_THREADS = 4


@dataclass(frozen=True)
class ImagePlaceholder:
    """Say how a model's images are written in its prompts, as an ImageProcessor does."""

    image_id: int  # the token that a feature replaces
    placeholder: str


class LoadsImages(Protocol):
    """Define the interface of an MediaLoader and its stand-in."""

    placeholder: ImagePlaceholder

    async def load(self, images: Sequence[ImageReference]) -> list[ProcessedImage]:
        """Return the images, in order."""
        ...

    def close(self) -> None:
        """Drop the work that waits for a thread."""
        ...


class MediaLoader:
    """Load images of requests.

    Files are fetched on the event loop and decoded in threads of their own: decoding and resampling release Python's
    lock for most of their time, and no prompt without images waits for them.

    Args:
        processor: Processes images for the model.
        config: The server's options.
        sources: Reads the files; by default from where the options allow it.
    """

    def __init__(self, processor: ImageProcessor, config: ServerConfig, sources: MediaSources | None = None):
        self._processor, self._max_images = processor, config.limits.max_images
        self.placeholder = ImagePlaceholder(processor.image_id, processor.placeholder)
        self._sources = sources or MediaSources(config)
        self._cache = ProcessedImages(int(config.mm_processor_cache_gb * 2**30))
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="images")

    async def load(self, images: Sequence[ImageReference]) -> list[ProcessedImage]:
        """Return the images, in order. Cancellation ends their fetches.

        Raises:
            RequestError: There are too many, or one cannot be read; `param` is its field.
        """
        check_count(images, self._max_images)
        tasks = [asyncio.ensure_future(self._load(image)) for image in images]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, image: ImageReference) -> ProcessedImage:
        with _named(image.where):
            data, salt = await self._sources.fetch(image.url), salted(None) or ""
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._processed, image, data, salt)

    def _processed(self, image: ImageReference, data: bytes | None, salt: str) -> ProcessedImage:
        """Return the processed image, also from an earlier request of the same caller.

        Callers are kept apart as in the prefix cache: the time to the answer does not tell what others have sent.
        """
        data = self._sources.read(image.url) if data is None else data
        key = hashlib.sha256(f"{salt}\0{image.detail}\0".encode() + data).digest()
        found = self._cache.get(key)
        if found is None:
            from dovetail.io.images.processor import at_detail

            processor = at_detail(self._processor, image.detail)
            found = processor(decode(data, param=image.where), image.where)
            self._cache.put(key, found)
        return found

    def close(self) -> None:
        """Drop the work that waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class UnreadImages:
    """Stand in for an MediaLoader where a request is checked and not answered: count the images, read none."""

    def __init__(self, placeholder: ImagePlaceholder, config: ServerConfig):
        self.placeholder, self._max_images = placeholder, config.limits.max_images

    async def load(self, images: Sequence[ImageReference]) -> list[ProcessedImage]:
        """Return images without tokens."""
        check_count(images, self._max_images)
        return [ProcessedImage("", ())] * len(images)

    def close(self) -> None:
        """Do nothing."""


class ProcessedImages:
    """Keep the processed images that were used last, up to `max_bytes`. It may be used from any thread."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()  # the one used last comes last
        self._lock = threading.Lock()

    def get(self, key: bytes) -> ProcessedImage | None:
        """Return the image of that key, if it is kept."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def put(self, key: bytes, image: ProcessedImage) -> None:
        """Keep an image, and drop those that were not used for longest."""
        with self._lock:
            if key not in self._images and _size(image) <= self._max_bytes:
                self._images[key] = image
                self._bytes += _size(image)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._images.popitem(last=False)[1])


def check_count(images: Sequence[ImageReference], most: int) -> None:
    """Refuse more images than a prompt may have."""
    if len(images) > most:
        message = f"a prompt must have at most {most} images on this server (--limit-mm-per-prompt), got {len(images)}"
        raise RequestError(message, param=images[most].where, code="too_many_images")


def _size(image: ProcessedImage) -> int:
    return sum(item.patches.nbytes + item.positions.nbytes for item in image.items)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Name the field of the request in errors of an image."""
    try:
        yield
    except UserError as error:
        if error.param == where:
            raise
        raise RequestError(f"`{where}`: {error}", param=where, code=error.code or "invalid_image_url") from None
