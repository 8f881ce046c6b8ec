"""A weight with low-rank adapters (LoRA, arXiv 2106.09685): W + up down, which is never written out for a product.

Several adapters are one whose ranks lie side by side, in `slots` of equal width: `chosen` says which of the ranks count
for each token, so that a batch may mix adapters. The update's scale is in `up` already.

R ranks; *in and *out are the weight's own dims, which may be several (heads and their dim); E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    slots: int = field(default=1, metadata={"static": True})  # adapters that there is room for

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def astype(self, dtype: Any) -> Adapted:
        """Of a base that is an array: a router's."""
        return replace(self, base=self.base.astype(dtype), down=self.down.astype(dtype), up=self.up.astype(dtype))

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        y = matmul(x, self.base, dims=dims, out_dtype=out_dtype)
        ranks = matmul(self._seen(x), self.down, dims=dims)
        update = matmul(self._counted(ranks), self.up, out_dtype=out_dtype)
        if self.magnitude is None:
            return y + update
        return (y + update) * (self.magnitude / self._norms(dims)).astype(y.dtype)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Latent attention multiplies from either side."""
        down, up = (x, self.down, "...nd,rd->...nr"), (self.up, "...nr,nfr->...nf")
        if transposed:
            down, up = (x, self.up, "...nf,nfr->...nr"), (self.down, "...nr,rd->...nd")
        ranks = jnp.einsum(down[2], *down[:2])
        if self.chosen is not None:
            ranks = ranks * self.chosen[..., None, :].astype(ranks.dtype)
        return per_head(x, self.base, transposed) + jnp.einsum(up[1], ranks, up[0])

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Widened:
    """The same for serving: `down` lies below the weight's own rows, so that one product gives both. Of a decode step's
    few tokens a product with `down` alone takes as long as one many times as wide.

    Kept in P parts, where so many devices share the weight's rows: each has all of `down`."""

    rows: jax.Array  # [P, out / P + R, *in]
    up: jax.Array  # [*out, R]
    chosen: jax.Array | None = None  # [..., R], as above
    slots: int = field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.up.shape[:-1], *self.rows.shape[2:]

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        *out, R = self.up.shape
        parts, own = self.rows.shape[0], self.rows.shape[1] - R
        y = matmul(x, self.rows, dims=dims, out_dtype=out_dtype)  # [..., P, out / P + R]
        ranks = y[..., own:].astype(x.dtype)
        if self.chosen is not None:
            ranks = ranks * self.chosen[..., None, :].astype(x.dtype)
        y = y[..., :own] + per_head(ranks, self.up.reshape(parts, own, R)).astype(y.dtype)
        return y.reshape(*x.shape[: x.ndim - dims], *out)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        raise NotImplementedError("models.serving_lora leaves such weights as they are")

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        raise NotImplementedError("adapters of experts are not served")


def merged(base: Any, down: jax.Array, up: jax.Array, dims: int) -> jax.Array:
    """W + up down as an array; with dims=0 of experts, [E, out, in]."""
    whole: Any = base if isinstance(base, ARRAYS) else base.dense()
    if dims == 0:
        return whole + jnp.einsum("eor,eri->eoi", up, down).astype(whole.dtype)
    return whole + jnp.tensordot(up, down, axes=1).astype(whole.dtype)


def row_norms(w: jax.Array, dims: int) -> jax.Array:
    """[*out] of w [*out, *in], in f32."""
    return jnp.sqrt(jnp.sum(w.astype(jnp.float32) ** 2, axis=tuple(range(w.ndim - dims, w.ndim))))


# --- which of several -------------------------------------------------------------------------------------------------


def choose(params: Any, numbers: jax.Array) -> Any:
    """Weights of which each token [...] takes one adapter: the number of its slot, from 1 on; 0: the weights alone."""

    def one(w: Any) -> Any:
        if not _is_adapted(w):
            return w
        width = w.up.shape[-1] // w.slots
        chosen = jax.nn.one_hot(numbers - 1, w.slots, dtype=w.up.dtype)  # of -1 a row of zeros
        return replace(w, chosen=jnp.repeat(chosen, width, axis=-1))

    return jax.tree.map(one, params, is_leaf=_is_adapted)


def of_rows(params: Any, rows: jax.Array) -> Any:
    """The same weights for these of the tokens alone."""

    def one(w: Any) -> Any:
        return replace(w, chosen=w.chosen[rows]) if _is_adapted(w) and w.chosen is not None else w

    return jax.tree.map(one, params, is_leaf=_is_adapted)


def _is_adapted(w: Any) -> bool:
    return isinstance(w, Adapted | Widened)
