"""int8: whole numbers from -127 to 127, times a scale for each vector along the last dim (its greatest over 127)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.ops.quant.scheme import FewBits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8(FewBits):
    codes: jax.Array  # [..., n] int8
    scale: jax.Array  # [..., 1] f32
    dtype: Any = field(metadata={"static": True})  # what it was, and is given back in

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dense(self) -> jax.Array:
        return (self.codes.astype(jnp.float32) * self.scale).astype(self.dtype)


def pack(w: jax.Array) -> Int8:
    whole = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(whole), axis=-1, keepdims=True) / 127
    codes = jnp.round(whole / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return Int8(codes, scale, jnp.dtype(w.dtype))


def fits(shape: tuple[int, ...]) -> bool:
    return True
