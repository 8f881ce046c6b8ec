"""Weights in fewer bits: int8 and NF4, each a pytree that computes its own products (ops.linear.Weight).

A product unpacks the weight first, and the backward pass unpacks it again: a gradient keeps the packed weight, or
packing would save nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.ops.linear import grouped, matmul, per_head

NF4_BLOCK = 64
# the values as appendix E of arXiv 2305.14314 lists them
NF4_VALUES = np.asarray([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
_NF4_BOUNDS = (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2  # from here on the next value is the nearer one


class Quantized:
    """Compute the products of a weight that `dense` unpacks."""

    def dense(self) -> jax.Array:
        """Return the weight as an array."""
        raise NotImplementedError

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul does."""
        return _again(lambda x, w: matmul(x, w.dense(), dims=dims, out_dtype=out_dtype), x, self)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Multiply as ops.linear.per_head does."""
        return _again(lambda x, w: per_head(x, w.dense(), transposed), x, self)

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        """Multiply as ops.linear.grouped does."""
        return _again(lambda rows, w: grouped(rows, w.dense(), sizes, platform), rows, self)


def _again(product: Callable, x: jax.Array, weight: Quantized) -> jax.Array:
    return jax.checkpoint(product)(x, weight)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8(Quantized):
    """Hold integers from -127 to 127 and a scale for each vector along the last dim."""

    codes: jax.Array  # [..., n] int8
    scale: jax.Array  # [..., 1] f32
    dtype: Any = field(metadata={"static": True})  # of the unpacked weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unpacked weight."""
        return self.codes.shape

    def dense(self) -> jax.Array:
        """Return the weight as an array."""
        return (self.codes.astype(jnp.float32) * self.scale).astype(self.dtype)


def pack_int8(w: jax.Array) -> Int8:
    """Pack a weight [..., n]."""
    whole = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(whole), axis=-1, keepdims=True) / 127
    codes = jnp.round(whole / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return Int8(codes, scale, jnp.dtype(w.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nf4(Quantized):
    """Hold 4-bit codes of 16 values and the greatest magnitude of each block of 64 along the last dim.

    The values are quantiles of a normal distribution (arXiv 2305.14314). Two codes share a byte, the first in the
    upper half.
    """

    codes: jax.Array  # [..., n / 2] uint8
    scale: jax.Array  # [..., n / block] f32
    dtype: Any = field(metadata={"static": True})  # of the unpacked weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unpacked weight."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def dense(self) -> jax.Array:
        """Return the weight as an array."""
        halves = jnp.stack([self.codes >> 4, self.codes & 15], axis=-1)
        values = jnp.asarray(NF4_VALUES)[halves.astype(jnp.int32)].reshape(*self.scale.shape, -1)
        return (values * self.scale[..., None]).reshape(self.shape).astype(self.dtype)


def pack_nf4(w: jax.Array) -> Nf4:
    """Pack a weight [..., n]."""
    blocks = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, _nf4_block(w.shape))
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    shares = blocks / jnp.where(scale == 0, 1, scale)[..., None]
    codes = jnp.searchsorted(jnp.asarray(_NF4_BOUNDS), shares, side="left").astype(jnp.uint8)
    first, second = jnp.moveaxis(codes.reshape(*w.shape[:-1], -1, 2), -1, 0)
    return Nf4(first << 4 | second, scale, jnp.dtype(w.dtype))


def _nf4_block(shape: tuple[int, ...]) -> int:
    return math.gcd(shape[-1], NF4_BLOCK)


def _fits_nf4(shape: tuple[int, ...]) -> bool:
    """Return whether blocks have 16 values or more: smaller ones spend more on scales than on codes."""
    return _nf4_block(shape) >= 16


class Scheme(NamedTuple):
    """Describe a way to pack weights."""

    pack: Callable[[jax.Array], Quantized]
    fits: Callable[[tuple[int, ...]], bool]  # whether a weight of this shape can be packed


SCHEMES = {"int8": Scheme(pack_int8, lambda shape: True), "nf4": Scheme(pack_nf4, _fits_nf4)}
