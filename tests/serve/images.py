"""Images for the server's tests, and a processor that shows in the prompt what it was given."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from dovetail.io.images.item import ProcessedImage


def file_of(width: int = 40, height: int = 30, seed: int = 0, form: str = "PNG", **options) -> bytes:
    """Return an image file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    """Return a file as a data: URL."""
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def png(**options) -> str:
    """Return a picture as a data: URL."""
    return data_url(file_of(**options))


@dataclass(frozen=True)
class SizeWriter:
    """Write an image's size into the prompt of a template that writes messages as JSON; there are no image tokens."""

    image_token: str = ""
    image_id: int = -1
    placeholder: str = '{"type": "image"}'
    head: str = "size"

    def __call__(self, image: np.ndarray, param: str = "image") -> ProcessedImage:
        return ProcessedImage(f"{self.head} {image.shape[1]} x {image.shape[0]}", ())

    def low_detail(self) -> SizeWriter:
        return replace(self, head="low")
