"""A weight with low-rank adapters (LoRA, arXiv 2106.09685): W + up down, which products never materialise.

Several adapters are one with their ranks side by side, in `slots` of equal width: `chosen` selects the ranks of each
token, so that a batch may mix adapters. The scale of the update is already in `up`.

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
    """Replace `base` in the tree of weights (see ops.linear.Weight)."""

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
        """Return the shape of the weight."""
        return self.base.shape

    @property
    def dtype(self) -> Any:
        """Return the dtype of the weight."""
        return self.base.dtype

    def astype(self, dtype: Any) -> Adapted:
        """Cast the base, which must be an array (a router's)."""
        return replace(self, base=self.base.astype(dtype), down=self.down.astype(dtype), up=self.up.astype(dtype))

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul does."""
        y = matmul(x, self.base, dims=dims, out_dtype=out_dtype)
        ranks = matmul(self._seen(x), self.down, dims=dims)
        update = matmul(self._counted(ranks), self.up, out_dtype=out_dtype)
        if self.magnitude is None:
            return y + update
        return (y + update) * (self.magnitude / self._norms(dims)).astype(y.dtype)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Multiply as ops.linear.per_head does; latent attention multiplies from either side."""
        down, up = (x, self.down, "...nd,rd->...nr"), (self.up, "...nr,nfr->...nf")
        if transposed:
            down, up = (x, self.up, "...nf,nfr->...nr"), (self.down, "...nr,rd->...nd")
        ranks = jnp.einsum(down[2], *down[:2])
        if self.chosen is not None:
            ranks = ranks * self.chosen[..., None, :].astype(ranks.dtype)
        return per_head(x, self.base, transposed) + jnp.einsum(up[1], ranks, up[0])

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        """Multiply as ops.linear.grouped does."""
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
        """Return the norms [*out] of the rows of W + up down, as constants."""
        whole = merged(self.base, self.down, self.up, dims).astype(jnp.float32)
        return jax.lax.stop_gradient(row_norms(whole, dims))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Widened:
    """Replace a weight in serving: `down` is appended to the weight's rows, so that one product gives both.

    For the few tokens of a decode step, a product with `down` alone takes as long as one many times as wide. The rows
    are in P parts, for as many devices as share them: each has all of `down`.
    """

    rows: jax.Array  # [P, out / P + R, *in]
    up: jax.Array  # [*out, R]
    chosen: jax.Array | None = None  # [..., R], as above
    slots: int = field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the weight without the adapters."""
        return *self.up.shape[:-1], *self.rows.shape[2:]

    @property
    def dtype(self) -> Any:
        """Return the dtype of the weight."""
        return self.rows.dtype

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul does."""
        *out, R = self.up.shape
        parts, own = self.rows.shape[0], self.rows.shape[1] - R
        y = matmul(x, self.rows, dims=dims, out_dtype=out_dtype)  # [..., P, out / P + R]
        ranks = y[..., own:].astype(x.dtype)
        if self.chosen is not None:
            ranks = ranks * self.chosen[..., None, :].astype(x.dtype)
        y = y[..., :own] + per_head(ranks, self.up.reshape(parts, own, R)).astype(y.dtype)
        return y.reshape(*x.shape[: x.ndim - dims], *out)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Refuse: models.serving_lora does not widen such weights."""
        raise NotImplementedError("models.serving_lora leaves such weights as they are")

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        """Refuse: adapters of experts are not served."""
        raise NotImplementedError("adapters of experts are not served")


def merged(base: Any, down: jax.Array, up: jax.Array, dims: int) -> jax.Array:
    """Return W + up down as an array; with dims=0 for experts, [E, out, in]."""
    whole: Any = base if isinstance(base, ARRAYS) else base.dense()
    if dims == 0:
        return whole + jnp.einsum("eor,eri->eoi", up, down).astype(whole.dtype)
    return whole + jnp.tensordot(up, down, axes=1).astype(whole.dtype)


def row_norms(w: jax.Array, dims: int) -> jax.Array:
    """Return the norms [*out] of w [*out, *in], in f32."""
    return jnp.sqrt(jnp.sum(w.astype(jnp.float32) ** 2, axis=tuple(range(w.ndim - dims, w.ndim))))


# --- which of several -------------------------------------------------------------------------------------------------


def choose(params: Any, numbers: jax.Array) -> Any:
    """Return weights with one adapter for each token [...]: the number of its slot, from 1 on, or 0 for none."""

    def one(w: Any) -> Any:
        if not _is_adapted(w):
            return w
        width = w.up.shape[-1] // w.slots
        chosen = jax.nn.one_hot(numbers - 1, w.slots, dtype=w.up.dtype)  # of -1 a row of zeros
        return replace(w, chosen=jnp.repeat(chosen, width, axis=-1))

    return jax.tree.map(one, params, is_leaf=_is_adapted)


def of_rows(params: Any, rows: jax.Array) -> Any:
    """Return the weights for these tokens alone."""

    def one(w: Any) -> Any:
        return replace(w, chosen=w.chosen[rows]) if _is_adapted(w) and w.chosen is not None else w

    return jax.tree.map(one, params, is_leaf=_is_adapted)


def _is_adapted(w: Any) -> bool:
    return isinstance(w, Adapted | Widened)
