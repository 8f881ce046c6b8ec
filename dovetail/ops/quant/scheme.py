"""What the schemes share: a packed weight is a pytree that knows its products (ops.linear.Weight).

A product unpacks the weight first. That is done once more for the backward pass: what a gradient keeps is the packed
weight, or nothing would be saved by packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dovetail.ops.linear import grouped, matmul, per_head


class FewBits:
    """Products of a weight that gives itself back by `dense`."""

    def dense(self) -> jax.Array:
        raise NotImplementedError

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        return _again(lambda x, w: matmul(x, w.dense(), dims=dims, out_dtype=out_dtype), x, self)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        return _again(lambda x, w: per_head(x, w.dense(), transposed), x, self)

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        return _again(lambda rows, w: grouped(rows, w.dense(), sizes, platform), rows, self)


def _again(product: Callable, x: jax.Array, weight: FewBits) -> jax.Array:
    return jax.checkpoint(product)(x, weight)
