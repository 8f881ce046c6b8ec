"""Round a weight with knowledge of its inputs: to the nearest code, or with GPTQ's compensation.

Both choose the range of each group first: the share of it with the least squared error of the products, as far as the
inputs are independent. A weight is rows [O, I]; its gram [I, I] is the sum of the outer products of its inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.formats import Format
from dovetail.ops.quant.pack import codes_of, packed_codes, scales_of, values_of

SHARES = tuple(1 - 0.03 * i for i in range(16))  # of a group's range, from all of it down to 55%
DAMPING = 0.01  # added to the gram's diagonal, in means of it
BLOCK = 128  # columns that are rounded before the rest of the weight is updated

Arrays = dict[str, jax.Array]


class WeightInputs:
    """Hold the gram [I, I] of the inputs that some weights share."""

    def __init__(self, gram: jax.Array):
        self.gram, self.diagonal = gram, jnp.diag(gram)

    @functools.cached_property
    def order(self) -> jax.Array:
        """Return the columns, those with large inputs first."""
        return jnp.argsort(-self.diagonal)

    @functools.cached_property
    def factor(self) -> np.ndarray:
        """Return the upper Cholesky factor of the inverse of the damped gram, its columns in `order`.

        It is computed on the host, in f64. Columns without inputs stand alone.
        """
        from scipy.linalg import get_lapack_funcs

        gram, order = np.asarray(self.gram, np.float64), np.asarray(self.order)
        diagonal = np.diag(gram)
        gram = gram + np.diag(DAMPING * diagonal.mean() + (diagonal == 0))
        lower = np.linalg.cholesky(gram[np.ix_(order[::-1], order[::-1])])
        (trtri,) = get_lapack_funcs(["trtri"], [lower])
        inverse, _ = trtri(lower, lower=1)
        return inverse[::-1, ::-1].astype(np.float32)


Rounding = Callable[[Format, jax.Array, WeightInputs], Arrays]


def nearest(form: Format, rows: jax.Array, inputs: WeightInputs) -> Arrays:
    """Round each value to its nearest code, under fitted scales."""
    return _nearest(form, rows, inputs.diagonal)


@functools.partial(jax.jit, static_argnums=0)
def _nearest(form: Format, rows: jax.Array, importance: jax.Array) -> Arrays:
    scale, zero = _fitted(form, rows, importance)
    codes = codes_of(form, rows, _spread(form, scale, rows), None if zero is None else _spread(form, zero, rows))
    return _arrays(form, codes, scale, zero)


def gptq(form: Format, rows: jax.Array, inputs: WeightInputs) -> Arrays:
    """Round column by column; the error of each is compensated in the columns that are not rounded yet.

    As in arXiv 2210.17323, columns with large inputs come first; scales are those of the weight before (groups stay
    neighbours), and the compensation of later blocks is added after each block.
    """
    return _gptq(form, rows, inputs.diagonal, inputs.order, inputs.factor)


@functools.partial(jax.jit, static_argnums=0)
def _gptq(form: Format, rows: jax.Array, importance: jax.Array, order: jax.Array, upper: jax.Array) -> Arrays:
    rows, size = rows.astype(jnp.float32), rows.shape[1]
    scale, zero = _fitted(form, rows, importance)
    w, s = rows[:, order], _spread(form, scale, rows)[:, order]
    z = None if zero is None else _spread(form, zero, rows)[:, order]
    block = math.gcd(size, BLOCK)

    def round_block(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, codes = carry
        at = i * block
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=block, axis=1)
        own, own_s, own_z = cut(w), cut(s), None if z is None else cut(z)
        factor = jax.lax.dynamic_slice(upper, (at, at), (block, block))

        def round_column(j: jax.Array, carry: tuple) -> tuple:
            own, made, errors = carry
            column, sj, zj = own[:, j], own_s[:, j], None if own_z is None else own_z[:, j]
            code = codes_of(form, column, sj, zj)
            error = (column - values_of(form, code, sj, zj)) / factor[j, j]
            own = own - error[:, None] * factor[j]
            return own, made.at[:, j].set(code.astype(jnp.float32)), errors.at[:, j].set(error)

        zeros = jnp.zeros_like(own)
        _, made, errors = jax.lax.fori_loop(0, block, round_column, (own, zeros, zeros))
        w = w - errors @ jax.lax.dynamic_slice_in_dim(upper, at, block, axis=0)
        return w, jax.lax.dynamic_update_slice_in_dim(codes, made, at, axis=1)

    _, codes = jax.lax.fori_loop(0, size // block, round_block, (w, jnp.zeros_like(w)))
    codes = codes[:, jnp.argsort(order)]
    kinds = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8, "w8a8": jnp.int8}
    return _arrays(form, codes.astype(kinds.get(form.name, jnp.uint8)), scale, zero)


def _fitted(form: Format, rows: jax.Array, importance: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the scales and zero points [O, n] with the least squared error, weighted by column."""
    size, group = rows.shape[1], form.group or rows.shape[1]
    more = [(0, 0), (0, -size % group)]
    groups = jnp.pad(rows.astype(jnp.float32), more).reshape(len(rows), -1, group)
    weights = jnp.pad(importance[None], more).reshape(1, -1, group)

    def tried(share: jax.Array) -> tuple:
        scale, zero = scales_of(form, groups, share)
        s, z = scale[..., None], None if zero is None else zero[..., None]
        error = groups - values_of(form, codes_of(form, groups, s, z), s, z)
        return jnp.sum(error**2 * weights, axis=-1), scale, zero

    def better(best: tuple, share: jax.Array) -> tuple[tuple, None]:
        found = tried(share)
        keep = found[0] < best[0]
        return jax.tree.map(lambda new, old: jnp.where(keep, new, old), found, best), None

    (_, scale, zero), _ = jax.lax.scan(better, tried(jnp.float32(1)), jnp.asarray(SHARES[1:], jnp.float32))
    return scale, zero


def _spread(form: Format, groups: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the number of its group for each value."""
    each = form.group or rows.shape[1]
    return jnp.repeat(groups.astype(jnp.float32), each, axis=1)[:, : rows.shape[1]]


def _arrays(form: Format, codes: jax.Array, scale: jax.Array, zero: jax.Array | None) -> Arrays:
    made = {"codes": packed_codes(form, codes), "scale": scale}
    return made if zero is None else made | {"zero": zero.astype(jnp.uint8)}
