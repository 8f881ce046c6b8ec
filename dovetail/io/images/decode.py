"""Decode image files to RGB pixels, and refuse what is not one still picture.

Pillow decodes. Its own error texts are not passed on: they can contain addresses of this process.
"""

from __future__ import annotations

import base64
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.errors import RequestError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_BYTES = 20 * 2**20
MAX_PIXELS = 64_000_000  # 192 MB as RGB

_ORIENTATION = 0x0112  # the EXIF tag
_WHITE = (255, 255, 255)


def as_image(
    image: Any, *, param: str = "image", max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Return an image as RGB pixels, [H, W, 3] uint8.

    Args:
        image: A path, a data: URL, the bytes of a file, a PIL image, or an array of uint8: [H, W, 3], [H, W, 4] or
            [H, W].
        param: The name of the image in errors.
        max_bytes: The largest file.
        max_pixels: The most pixels, width times height.

    Raises:
        RequestError: The image is refused; its code is one of OpenAI's (`image_parse_error`, `image_too_large`, ...).
    """
    from PIL import Image

    if isinstance(image, str) and (image.startswith("data:") or "://" in image):
        image = _from_url(image, param, max_bytes)
    if isinstance(image, str | PathLike):
        image = _read_file(Path(image), param, max_bytes)
    if isinstance(image, bytes | bytearray | memoryview):
        return decode(bytes(image), param=param, max_bytes=max_bytes, max_pixels=max_pixels)
    if isinstance(image, np.ndarray):
        image = Image.fromarray(_checked_array(image, param))
    if not isinstance(image, Image.Image):
        got = type(image).__name__
        message = f"`{param}` must be a path, bytes, a PIL image or an array, got {got}."
        raise RequestError(message, param=param, code="invalid_image")
    _check_size(image.size, max_pixels, param)
    return _load(image, param)


def _read_file(path: Path, param: str, max_bytes: int) -> bytes:
    try:
        if path.stat().st_size > max_bytes:
            raise _too_many_bytes(path.stat().st_size, max_bytes, param)
        return path.read_bytes()
    except OSError as error:
        message = f"`{param}` cannot be read: {path}: {error.strerror}."
        raise RequestError(message, param=param, code="invalid_image") from error


def decode(
    data: bytes, *, param: str = "image", max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Return the pixels of a JPEG, PNG, WebP or GIF file, [H, W, 3] uint8.

    The picture is turned as its EXIF orientation says, and transparent pixels are put on white. The size in the header
    is checked before anything is decoded. Animations, and files that are a ZIP archive or a PDF document as well, are
    refused. `as_image` lists arguments and errors.
    """
    from PIL import Image

    if not data:
        raise RequestError(f"`{param}` is empty: expected an image file.", param=param, code="empty_image_file")
    if len(data) > max_bytes:
        raise _too_many_bytes(len(data), max_bytes, param)
    if _is_other_document(data):
        message = f"`{param}` must be an image file and nothing else, got one that is also a ZIP archive or a PDF."
        raise RequestError(message, param=param, code="invalid_image")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(None, max_pixels, param) from None
    except Exception:  # plugins raise many kinds for damaged files
        message = f"`{param}` must be a JPEG, PNG, WebP or GIF file; convert other formats (SVG, HEIC, TIFF) first."
        raise RequestError(message, param=param, code="unsupported_image_media_type") from None
    with image:
        _check_size(image.size, max_pixels, param)
        return _load(image, param)


def _load(image: Image.Image, param: str) -> np.ndarray:
    """Return the pixels of an opened image whose size was checked."""
    try:
        # The second picture of a phone's JPEG ("MPO") is a preview or a depth map.
        animated = image.format != "MPO" and getattr(image, "is_animated", False)
        if not animated:
            image.load()
            return np.asarray(_as_rgb(_upright(image)))
    except Exception:
        message = f"`{param}` cannot be decoded: the file is damaged or incomplete."
        raise RequestError(message, param=param, code="image_parse_error") from None
    message = f"`{param}` must be a still picture, got an animated {image.format}; send one of its frames."
    raise RequestError(message, param=param, code="unsupported_image_media_type")


def _upright(image: Image.Image) -> Image.Image:
    """Return the image turned as its EXIF orientation says."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata of a picture that is fine
        turn = None
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.info = image.info  # the transparent colour
    return turned


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16-bit gray: the high byte, as Pillow takes of 16-bit colours
        gray = np.clip(np.asarray(image), 0, 65535)
        clear = gray == image.info.get("transparency", -1)
        return Image.fromarray(np.where(clear, 255, gray >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    page = Image.new("RGB", image.size, _WHITE)
    page.paste(colours, mask=colours.getchannel("A"))
    return page


def _is_other_document(data: bytes) -> bool:
    """Return whether other programs would read the file as a PDF document or a ZIP archive (also JAR, APK, DOCX)."""
    at = data.rfind(b"PK\x05\x06", max(0, len(data) - 65557))  # the record at an archive's end, and its comment
    archive = at >= 0 and at + 22 + int.from_bytes(data[at + 20 : at + 22], "little") == len(data)
    return archive or b"%PDF-" in data[:1024]


def _from_url(url: str, param: str, max_bytes: int) -> bytes:
    """Return the bytes of a data: URL; others are not fetched."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        message = f"`{param}` must be a path or have the form data:image/png;base64,DATA, got {url[:40]!r}."
        raise RequestError(message, param=param, code="invalid_image_url")
    if len(data) > max_bytes * 4 // 3 + 4:
        raise _too_many_bytes(len(data) * 3 // 4, max_bytes, param)
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        message = f"`{param}` is not valid base64."
        raise RequestError(message, param=param, code="invalid_base64_image") from None


def _checked_array(image: np.ndarray, param: str) -> np.ndarray:
    shaped = image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))
    if image.dtype != np.uint8 or not shaped:
        got = f"{image.dtype} {list(image.shape)}"
        message = f"`{param}` must be an array of uint8 with the shape [height, width, 3], got {got}."
        raise RequestError(message, param=param, code="invalid_image")
    return np.ascontiguousarray(image)


def _check_size(size: tuple[int, int], max_pixels: int, param: str) -> None:
    if min(size) < 1:
        raise RequestError(f"`{param}` has no pixels.", param=param, code="invalid_image")
    if size[0] * size[1] > max_pixels:
        raise _too_many_pixels(size, max_pixels, param)


def _too_many_pixels(size: tuple[int, int] | None, limit: int, param: str) -> RequestError:
    got = "more" if size is None else f"{size[0]} x {size[1]}"
    message = f"`{param}` must have at most {limit:,} pixels, got {got}; send a smaller picture."
    return RequestError(message, param=param, code="image_too_large")


def _too_many_bytes(size: int, limit: int, param: str) -> RequestError:
    message = f"`{param}` must have at most {limit:,} bytes, got {size:,}; send a smaller file."
    return RequestError(message, param=param, code="image_file_too_large")
