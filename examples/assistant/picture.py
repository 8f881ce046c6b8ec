"""Pictures: check an upload and make it a JPEG without metadata."""

from __future__ import annotations

import base64
import binascii
import io
import warnings

from PIL import Image, ImageOps

MAX_BYTES = 6 * 2**20  # of an upload
MAX_PIXELS = 50_000_000  # by its header, before it is decoded
MAX_SIDE = 1024  # as stored


class PictureError(ValueError):
    """Say why an upload is refused."""


def clean(upload: bytes) -> bytes:
    """Return an uploaded JPEG or PNG as a JPEG of at most MAX_SIDE pixels, turned upright and without EXIF.

    Raises:
        PictureError: The upload is too large, of another format, or damaged.
    """
    if len(upload) > MAX_BYTES:
        raise PictureError(f"The photo must be at most {MAX_BYTES // 2**20} MB.")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(upload), formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise PictureError(f"The photo must have at most {MAX_PIXELS // 10**6} million pixels.")
            image.draft("RGB", (MAX_SIDE, MAX_SIDE))
            upright = ImageOps.exif_transpose(image).convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, PictureError):
            raise
        raise PictureError("The photo must be a whole JPEG or PNG file.") from None
    upright.thumbnail((MAX_SIDE, MAX_SIDE))
    opaque = Image.new("RGB", upright.size, "white")  # a new image has no metadata to save
    opaque.paste(upright, mask=upright.getchannel("A"))
    file = io.BytesIO()
    opaque.save(file, "JPEG", quality=85)
    return file.getvalue()


def from_base64(text: str) -> bytes:
    """Return the bytes of base64 text."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise PictureError("The photo must be sent as base64.") from None


def data_url(jpeg: bytes) -> str:
    """Return a JPEG as the URL that a model's server reads."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()
