"""All products of activations with weights: nothing else multiplies a weight.

A weight is an array in Hugging Face's order, [out, in], or an object with its own products (a quantised weight, one
with an adapter: see Weight); each function below calls it, so that callers need not know.

Several weights with the same input may be held as one (models.publish), so that their products are one: `matmuls` takes
both layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax import lax

from dovetail.ops.dispatch_products import (
    choose_product,
    grouped_each_kernel,
    grouped_kernel,
    product_kernel,
)
from dovetail.ops.few_tokens import ARRAYS, Normed, Product, few_product, product_to_add

PER_HEAD = {False: "...nd,nfd->...nf", True: "...nf,nfd->...nd"}  # N heads, D in, F out
# rows [M, in] in groups, weights [E, out, in]: no transpose is made
_PER_GROUP = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


class Weight(Protocol):
    """Describe a weight that is not an array.

    It is a pytree (jax.tree_util.register_dataclass) with the shape of the array; each method is the function of the
    same name below.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        ...

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as `matmul` below."""
        ...

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Multiply as `per_head` below."""
        ...

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        """Multiply as `grouped` below."""
        ...


class Table(Weight, Protocol):
    """Describe an embedding or a head that is not an array."""

    def lookup(self, index: jax.Array) -> jax.Array:
        """Look up as `lookup` below."""
        ...

    def matmul_transposed(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Multiply as `matmul_transposed` below."""
        ...


def matmul(x: Any, w: Any, bias: jax.Array | None = None, *, dims: int = 1, out_dtype: Any = None) -> jax.Array:
    """Multiply x [..., *in] by w [*out, *in], of which the last `dims` dims are the input's: -> [..., *out].

    x may be a norm that is left to its products (ops.few_tokens.Normed).
    """
    if not isinstance(w, ARRAYS):
        y = cast(Weight, w).matmul(_as_array(x), dims, out_dtype)
        return y if bias is None else y + bias.astype(y.dtype)
    # as matrices: XLA's CPU backend copies a weight of three dims, transposed, at every call
    out, size = w.shape[: w.ndim - dims], math.prod(w.shape[w.ndim - dims :])
    rows = x if isinstance(x, Normed) else x.reshape(*x.shape[: x.ndim - dims], size)
    matrix = w.reshape(-1, size)
    y = few_product(rows, matrix, None if bias is None else bias.reshape(-1), out_dtype=out_dtype)
    if y is not None:
        return y.reshape(*rows.shape[:-1], *out)
    y = _product(_as_array(rows), matrix, out_dtype)
    # as a vector, which cuBLAS adds itself: XLA would write out one of two dims for every row
    y = y if bias is None else y + bias.reshape(-1).astype(y.dtype)
    return y.reshape(*rows.shape[:-1], *out)


def matmul_to_add(x: jax.Array, w: Any, bias: jax.Array | None = None, *, dims: int = 1) -> jax.Array | Product:
    """Multiply as `matmul`; the product may be left to its addition to an array, the only use of it then."""
    product = product_to_add(x, w, bias, dims)
    return matmul(x, w, bias, dims=dims) if product is None else product


def _as_array(x: Any) -> jax.Array:
    return x.array() if isinstance(x, Normed) else x


def _product(x: jax.Array, w: Any, out_dtype: Any) -> jax.Array:
    """Multiply x [..., in] by w [out, in]."""
    name = choose_product(x, w)
    if name != "xla":
        return _cpu_product(name, x, w)
    return jnp.einsum("...d,fd->...f", x, w, preferred_element_type=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cpu_product(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, w, cpu=product_kernel(name), default=lambda x, w: x @ w.T)


def _cpu_product_forward(name: str, x: jax.Array, w: jax.Array):
    return _cpu_product(name, x, w), (x, w)


def _cpu_product_backward(_name: str, saved: tuple[jax.Array, jax.Array], g: jax.Array):
    x, w = saved
    return g @ w, g.T @ x


_cpu_product.defvjp(_cpu_product_forward, _cpu_product_backward)


def matmul_transposed(x: jax.Array, w: Any, out_dtype: Any = None) -> jax.Array:
    """Multiply x [..., out] by w [out, in] -> [..., in]: the gradient of `matmul` by its input."""
    if not isinstance(w, ARRAYS):
        return cast(Table, w).matmul_transposed(x, out_dtype)
    return jnp.einsum("...f,fd->...d", x, w, preferred_element_type=out_dtype)


def lookup(w: Any, index: jax.Array) -> jax.Array:
    """Return the rows at `index` of a table w [rows, ...]."""
    return w[index] if isinstance(w, ARRAYS) else cast(Table, w).lookup(index)


def per_head(x: jax.Array, w: Any, transposed: bool = False) -> jax.Array:
    """Multiply x [..., N, in] by w [N, out, in] -> [..., N, out]; transposed, x [..., N, out] -> [..., N, in]."""
    if not isinstance(w, ARRAYS):
        return cast(Weight, w).per_head(x, transposed)
    return jnp.einsum(PER_HEAD[transposed], x, w)


def grouped(rows: jax.Array, w: Any, sizes: jax.Array, platform: str | None = None) -> jax.Array:
    """Multiply rows [M, in] by w [E, out, in] -> [M, out]: the first sizes[0] rows by w[0], and so on.

    Rows after the last group have undefined results.
    """
    if not isinstance(w, ARRAYS):
        return cast(Weight, w).grouped(rows, sizes, platform)
    kernel = grouped_kernel(platform, rows, w)
    return kernel(rows, w, sizes) if kernel else lax.ragged_dot_general(rows, jnp.asarray(w), sizes, _PER_GROUP)


def grouped_each(
    rows: jax.Array, ws: tuple[Any, ...], sizes: jax.Array, platform: str | None = None
) -> tuple[jax.Array, ...]:
    """Multiply rows by each of several weights of one shape, as `grouped`."""
    kernel = grouped_each_kernel(platform, rows, ws)
    return kernel(rows, ws, sizes) if kernel else tuple(grouped(rows, w, sizes, platform) for w in ws)


# --- joined weights ---------------------------------------------------------------------------------------------------
#
# Joined, weights [n_i, .., in] are one [parts, sum(n_i) / parts, .., in]: each of the parts has its share of every one
# of them, so that each device of a mesh can have one.


def joined_name(names: Mapping[str, int]) -> str:
    """Return the name of the joined weight."""
    return "+".join(names)


def is_joined(p: Mapping[str, Any], names: Mapping[str, int]) -> bool:
    """Return whether the weights of these names are joined."""
    return len(names) > 1 and joined_name(names) in p


def matmuls(x: jax.Array, p: Mapping[str, Any], names: Mapping[str, int]) -> list[jax.Array]:
    """Multiply x by the weights of p with these names (name -> its first dim), each with its bias if there is one."""
    y = joined_matmul(x, p, names)
    if y is None:
        return [matmul(x, p[name], p.get(f"{name}_bias")) for name in names]
    at, parts = x.ndim - 1, y.shape[x.ndim - 1]
    ends = [sum(list(names.values())[: i + 1]) // parts for i in range(len(names) - 1)]
    return [
        part.reshape(*part.shape[:at], parts * part.shape[at + 1], *part.shape[at + 2 :])
        for part in jnp.split(y, ends, axis=at + 1)
    ]


def gated(x: jax.Array, p: Mapping[str, Any], names: Mapping[str, int], glu: Any) -> jax.Array:
    """Return glu(gate, up), of the products of x with the weights of p with these names (ops.glu.Glu)."""
    y = _gated_in_one(x, p, names, glu)
    return glu(*matmuls(x, p, names)) if y is None else y


def _gated_in_one(x: jax.Array, p: Mapping[str, Any], names: Mapping[str, int], glu: Any) -> jax.Array | None:
    """Return what `gated` does if one kernel can, else None."""
    joined = joined_name(names)
    if not is_joined(p, names):
        return None
    w, bias = p[joined], p.get(f"{joined}_bias")
    if not isinstance(w, ARRAYS):
        in_one = getattr(w, "gated", None) if bias is None else None
        return in_one(_as_array(x), glu) if in_one else None
    matrix = w.reshape(-1, w.shape[-1])
    # in several parts, each has its share of gate and of up
    return few_product(x, matrix, None if bias is None else bias.reshape(-1), glu=glu) if len(w) == 1 else None


def joined_matmul(x: jax.Array, p: Mapping[str, Any], names: Mapping[str, int]) -> jax.Array | None:
    """Return the one product [..., parts, sum / parts, ..] if p holds the weights joined, else None."""
    joined = joined_name(names)
    return matmul(x, p[joined], p.get(f"{joined}_bias")) if is_joined(p, names) else None
