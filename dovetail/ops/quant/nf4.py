"""NF4 (arXiv 2305.14314): 4 bits that name one of 16 values, the quantiles of a normal distribution, times the greatest
magnitude of a block of 64 along the last dim. Two codes are one byte, the first in the upper half."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.ops.quant.scheme import FewBits

BLOCK = 64
# the values as the paper's appendix E lists them
VALUES = np.asarray([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
BETWEEN = (VALUES[1:] + VALUES[:-1]) / 2  # from here on the next value is the nearer one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nf4(FewBits):
    codes: jax.Array  # [..., n / 2] uint8
    scale: jax.Array  # [..., n / block] f32
    dtype: Any = field(metadata={"static": True})  # what it was, and is given back in

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def dense(self) -> jax.Array:
        halves = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1)
        values = jnp.asarray(VALUES)[halves.astype(jnp.int32)].reshape(*self.scale.shape, -1)
        return (values * self.scale[..., None]).reshape(self.shape).astype(self.dtype)


def pack(w: jax.Array) -> Nf4:
    blocks = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, _block(w.shape))
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    shares = blocks / jnp.where(scale == 0, 1, scale)[..., None]
    codes = jnp.searchsorted(jnp.asarray(BETWEEN), shares, side="left").astype(jnp.uint8)
    first, second = jnp.moveaxis(codes.reshape(*w.shape[:-1], -1, 2), -1, 0)
    return Nf4(first << 4 | second, scale, jnp.dtype(w.dtype))


def fits(shape: tuple[int, ...]) -> bool:
    """Blocks of fewer than 16 would need more for their scales than for their codes."""
    return _block(shape) >= 16


def _block(shape: tuple[int, ...]) -> int:
    return math.gcd(shape[-1], BLOCK)
