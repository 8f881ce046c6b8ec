"""Prepare images: decode, the random crop of Inception, flip and RandAugment for training; one crop for evaluation.

Every random number comes from the generator that the caller gives, so an image depends on its seed alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.errors import FileError
from dovetail.data.image_settings import Augment

if TYPE_CHECKING:
    from PIL.Image import Image

RATIO = (3 / 4, 4 / 3)  # of a random crop's width to its height
ATTEMPTS = 10  # to find a crop inside of the image; then all of it is used
EVALUATED = 256 / 224  # an image is evaluated on the middle of this many times the size
GREY = (128, 128, 128)  # where an operation moves the image away
ORIENTATION = 0x0112  # the tag of EXIF
Box = tuple[float, float, float, float]  # left, upper, right, lower


def open_image(raw: bytes | np.ndarray, where: str) -> Image:
    """Return an image from the bytes of a file, or from an array [H, W], [H, W, 1] or [H, W, 3] of uint8."""
    from PIL import Image, ImageOps

    if isinstance(raw, np.ndarray):
        return Image.fromarray(raw[..., 0] if raw.ndim == 3 and raw.shape[-1] == 1 else raw).convert("RGB")
    try:
        image = Image.open(io.BytesIO(raw))
        return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError):
        raise FileError(f"{where} is not a readable image: replace or remove it") from None


def train_image(raw: Any, where: str, size: int, augment: Augment, rng: np.random.Generator) -> np.ndarray:
    """Return an image [size, size, 3] uint8 with random changes."""
    image = open_image(raw, where)
    box = inception_box(image.size, augment.crop_area, rng) if augment.crop_area < 1 else (0, 0, *image.size)
    image = _resized(image, box, size, where)
    if augment.flip and rng.random() < 0.5:
        from PIL import ImageOps

        image = ImageOps.mirror(image)
    for _ in range(augment.randaugment):
        image = OPERATIONS[int(rng.random() * len(OPERATIONS))](image, augment.magnitude / 10, rng)
    return np.asarray(image)


def eval_image(raw: Any, where: str, size: int, crop: bool) -> np.ndarray:
    """Return an image [size, size, 3] uint8: the middle of it with `crop`, else the whole."""
    image = open_image(raw, where)
    width, height = image.size
    side = min(width, height) / EVALUATED
    left, upper = (width - side) / 2, (height - side) / 2
    box = (left, upper, left + side, upper + side) if crop else (0, 0, width, height)
    return np.asarray(_resized(image, box, size, where))


def inception_box(size: tuple[int, int], least: float, rng: np.random.Generator) -> Box:
    """Return a random box with `least` to all of the area, whose sides have a ratio from 3/4 to 4/3."""
    width, height = size
    for _ in range(ATTEMPTS):
        area = width * height * (least + rng.random() * (1 - least))
        ratio = math.exp(math.log(RATIO[0]) + rng.random() * math.log(RATIO[1] / RATIO[0]))
        wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if wide <= width and high <= height:
            left, upper = rng.random() * (width - wide), rng.random() * (height - high)
            return left, upper, left + wide, upper + high
    return 0, 0, width, height


def _resized(image: Image, box: Box, size: int, where: str) -> Image:
    """Return a box of the image, bilinear. A JPEG file is decoded at the lowest resolution that suffices."""
    from PIL import Image

    width, height = image.size
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    if shrink > 1:
        image.draft("RGB", (int(width / shrink), int(height / shrink)))
    x, y = image.size[0] / width, image.size[1] / height
    try:
        whole = image.convert("RGB")
    except (OSError, SyntaxError, ValueError):
        raise FileError(f"{where} is a damaged image: replace or remove it") from None
    return whole.resize((size, size), Image.Resampling.BILINEAR, (box[0] * x, box[1] * y, box[2] * x, box[3] * y))


# --- RandAugment: each operation takes (image, strength from 0 to 1, generator) ---------------------------------------

Operation = Callable[["Image", float, np.random.Generator], "Image"]


def _sign(rng: np.random.Generator) -> float:
    return 1.0 if rng.random() < 0.5 else -1.0


def _ops(name: str, argument: Callable[[float], int] | None = None) -> Operation:
    """Return a function of PIL.ImageOps as an operation."""

    def run(image: Image, strength: float, rng: np.random.Generator) -> Image:
        from PIL import ImageOps

        function = getattr(ImageOps, name)
        return function(image, argument(strength)) if argument else function(image)

    return run


def _enhanced(name: str) -> Operation:
    """Return an enhancement of PIL.ImageEnhance as an operation: factors from 0.1 to 1.9."""

    def run(image: Image, strength: float, rng: np.random.Generator) -> Image:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, name)(image).enhance(0.1 + 1.8 * strength)

    return run


def _moved(matrix: Callable[[float, int], tuple[float, ...]]) -> Operation:
    """Return an affine map as an operation, to a random side."""

    def run(image: Image, strength: float, rng: np.random.Generator) -> Image:
        from PIL import Image

        by = matrix(strength * _sign(rng), image.width)
        return image.transform(image.size, Image.Transform.AFFINE, by, fillcolor=GREY)

    return run


def _rotated(image: Image, strength: float, rng: np.random.Generator) -> Image:
    return image.rotate(30 * strength * _sign(rng), fillcolor=GREY)


def _brightened_darks(image: Image, strength: float, rng: np.random.Generator) -> Image:
    more = int(110 * strength)
    return image.point([min(value + more, 255) if value < 128 else value for value in range(256)] * 3)


def _cut_out(image: Image, strength: float, rng: np.random.Generator) -> Image:
    reach = strength * image.width * 40 / 224
    x, y = rng.random() * image.width, rng.random() * image.height
    image = image.copy()
    image.paste(GREY, (int(x - reach), int(y - reach), int(x + reach), int(y + reach)))
    return image


OPERATIONS: tuple[Operation, ...] = (
    _ops("autocontrast"),
    _ops("equalize"),
    _ops("invert"),
    _ops("posterize", lambda strength: max(1, int(4 * strength))),
    _ops("solarize", lambda strength: int(256 * strength)),
    _brightened_darks,
    _enhanced("Color"),
    _enhanced("Contrast"),
    _enhanced("Brightness"),
    _enhanced("Sharpness"),
    _rotated,
    _moved(lambda by, width: (1, 0.3 * by, 0, 0, 1, 0)),
    _moved(lambda by, width: (1, 0, 0, 0.3 * by, 1, 0)),
    _moved(lambda by, width: (1, 0, by * width * 100 / 224, 0, 1, 0)),
    _moved(lambda by, width: (1, 0, 0, 0, 1, by * width * 100 / 224)),
    _cut_out,
)
