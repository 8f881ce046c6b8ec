"""Resize images with the arithmetic of Pillow, bit for bit.

Vision models are sensitive to how their images were resized, and Pillow has changed its results between versions. This
resampler keeps those of Pillow 12 for uint8 images: antialiased filters, weights rounded to 22 bits, the horizontal
pass first, and each pass rounded and clipped to uint8. Pillow from 12.2 on runs the vertical pass first for some
shapes (very tall images); here the order never depends on the shape, as in the versions that the models were trained
with.

H height, W width, M numbers of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from dovetail.core.errors import UserError

_BITS = 22  # of a weight's fraction: a sum of 255 x weights fits an int32
_COLUMNS = 2048  # numbers of a row that are summed together: they stay in the CPU's cache


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _sinc(x: float) -> float:
    return 1.0 if x == 0.0 else math.sin(x * math.pi) / (x * math.pi)


def _lanczos(x: np.ndarray) -> np.ndarray:
    # The C library's sine, as in Pillow: numpy's vectorised one may differ in the last bit.
    values = [_sinc(v) * _sinc(v / 3) if -3.0 <= v < 3.0 else 0.0 for v in x.ravel().tolist()]
    return np.array(values).reshape(x.shape)


FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {  # with the support of each
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


def resize(image: np.ndarray, height: int, width: int, resample: str) -> np.ndarray:
    """Return `image` resized, as `PIL.Image.resize` does.

    Args:
        image: [H, W, 3] uint8.
        height: The height of the result.
        width: The width of the result.
        resample: The filter: "bilinear", "bicubic" or "lanczos".

    Returns:
        [height, width, 3] uint8.
    """
    if resample not in FILTERS:
        raise UserError(f"`resample` must be one of {', '.join(FILTERS)}, got {resample!r}.", param="resample")
    if image.shape[1] != width:
        turned = np.ascontiguousarray(image.transpose(1, 0, 2))
        image = _resize_rows(turned, width, resample).transpose(1, 0, 2)
    return _resize_rows(np.ascontiguousarray(image), height, resample)


def _resize_rows(image: np.ndarray, size: int, resample: str) -> np.ndarray:
    """Return `image` with `size` rows."""
    if len(image) == size:
        return image
    rows = image.reshape(len(image), -1)  # [H, M]
    out = np.empty((size, rows.shape[1]), np.uint8)
    _kernel()(rows, *_weights(len(image), size, resample), out)
    return out.reshape(size, *image.shape[1:])


@cache
def _kernel() -> Callable[..., None]:
    """Return the compiled loop over rows; it releases Python's lock, so that a server's other threads run meanwhile."""
    from numba import njit

    def weigh(rows, starts, ends, weights, out):
        sums = np.empty(_COLUMNS, np.int32)
        for left in range(0, rows.shape[1], _COLUMNS):
            count = min(_COLUMNS, rows.shape[1] - left)
            for i in range(out.shape[0]):
                sums[:] = 1 << (_BITS - 1)  # one half: the shift below then rounds
                for k in range(starts[i], ends[i]):
                    weight = weights[i, k - starts[i]]
                    row = rows[k, left : left + count]
                    for m in range(count):
                        sums[m] += weight * np.int32(row[m])
                for m in range(count):
                    out[i, left + m] = min(max(sums[m] >> _BITS, 0), 255)

    return njit(weigh, nogil=True, cache=True)


@lru_cache(maxsize=64)
def _weights(before: int, after: int, resample: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each output, its first input, the input after its last, and the weights between them as integers."""
    shape, support = FILTERS[resample]
    scale = before / after
    stretch = max(scale, 1.0)
    reach = support * stretch
    centers = (np.arange(after) + 0.5) * scale
    # Casting to int truncates, as C does.
    starts = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + reach + 0.5).astype(np.int64), before)
    inputs = starts[:, None] + np.arange(math.ceil(reach) * 2 + 1)
    values = shape((inputs - centers[:, None] + 0.5) * (1.0 / stretch))
    values = np.where(inputs < ends[:, None], values, 0.0)
    total = np.zeros(after)
    for column in values.T:  # one after another, as Pillow adds them: np.sum adds pairs
        total += column
    values /= np.where(total == 0.0, 1.0, total)[:, None]
    scaled = values * (1 << _BITS)
    return starts, ends, np.where(values < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
