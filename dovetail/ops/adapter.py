"""A weight with low-rank adapters (LoRA, arXiv 2106.09685): W + up down, which is never written out for a product.

Several adapters are one whose ranks lie side by side: `chosen` says which of them count for each token, so that a batch
may mix adapters. The update's scale is in `up` already.

R ranks; *in and *out are the weight's own dims, which may be several (heads and their dim); E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.ops.linear import ARRAYS, grouped, matmul, per_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """Takes the place of `base` in the tree of weights: see ops.linear.Weight."""

    base: Any  # [*out, *in], an array or a quantised weight
    down: jax.Array  # [R, *in]; of experts [E, R, in]
    up: jax.Array  # [*out, R]; of experts [E, out, R]
    chosen: jax.Array | None = None  # [..., R]: 1 or 0 for each token; None: all count
    magnitude: jax.Array | None = None  # [*out]: what each row's norm is made to be (DoRA, arXiv 2402.09353)
    key: jax.Array | None = None  # of dropout
    dropout: float = field(default=0.0, metadata={"static": True})  # the share of inputs that the adapter does not see

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        y = matmul(x, self.base, dims=dims, out_dtype=out_dtype)
        ranks = matmul(self._seen(x), self.down, dims=dims)
        update = matmul(self._counted(ranks), self.up, out_dtype=out_dtype)
        if self.magnitude is None:
            return y + update
        return (y + update) * (self.magnitude / self._norms(dims)).astype(y.dtype)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Latent attention multiplies from either side: the update is written out, a small matrix per head."""
        return per_head(x, self.base, transposed) + per_head(x, self.up @ self.down, transposed)

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        y = grouped(rows, self.base, sizes, platform)
        ranks = grouped(self._seen(rows), self.down, sizes, platform)
        return y + grouped(ranks, self.up, sizes, platform)

    def _seen(self, x: jax.Array) -> jax.Array:
        if self.key is None or not self.dropout:
            return x
        kept = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0).astype(x.dtype)

    def _counted(self, ranks: jax.Array) -> jax.Array:
        return ranks if self.chosen is None else ranks * self.chosen.astype(ranks.dtype)

    def _norms(self, dims: int) -> jax.Array:
        """[*out]: of each row of W + up down; they count as constants."""
        whole = merged(self.base, self.down, self.up, dims).astype(jnp.float32)
        return jax.lax.stop_gradient(row_norms(whole, dims))


def merged(base: Any, down: jax.Array, up: jax.Array, dims: int) -> jax.Array:
    """W + up down as an array; with dims=0 of experts, [E, out, in]."""
    whole: Any = base if isinstance(base, ARRAYS) else base.dense()
    if dims == 0:
        return whole + jnp.einsum("eor,eri->eoi", up, down).astype(whole.dtype)
    return whole + jnp.tensordot(up, down, axes=1).astype(whole.dtype)


def row_norms(w: jax.Array, dims: int) -> jax.Array:
    """[*out] of w [*out, *in], in f32."""
    return jnp.sqrt(jnp.sum(w.astype(jnp.float32) ** 2, axis=tuple(range(w.ndim - dims, w.ndim))))
