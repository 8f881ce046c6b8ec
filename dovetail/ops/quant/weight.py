"""A quantised weight, which computes its own products (ops.linear.Weight): one class for every format.

The products here are the reference: unpack, then multiply. ops.dispatch_products chooses kernels that read the packed
arrays. A large matrix is unpacked in parts, and the backward pass unpacks it again: a gradient keeps the packed weight.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import UnsupportedError
from dovetail.core.formats import Format
from dovetail.core.mesh import Placement, array_shardings
from dovetail.core.spec import ParamSpec, leaf_dtype
from dovetail.ops.dispatch_products import gated_kernel, quantized_grouped_kernel, quantized_kernel
from dovetail.ops.linear import grouped, matmul, matmul_transposed, per_head
from dovetail.ops.quant.pack import PACKERS, pack
from dovetail.ops.quant.unpack import unpack

PART = 1 << 26  # values of a matrix that are unpacked at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """Hold a weight [*out, *in] as the arrays of a storage format, each [*out, n]."""

    arrays: dict[str, jax.Array]
    format: Format = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})  # of the unpacked weight
    inner: tuple[int, ...] = field(default=(), metadata={"static": True})  # the input's dims after the first
    placement: Placement | None = field(default=None, metadata={"static": True})
    platform: str | None = field(default=None, metadata={"static": True})  # None for jax's default

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the unpacked weight."""
        out = next(iter(self.arrays.values())).shape[:-1]
        size = self.format.size({name: x.shape[-1] for name, x in self.arrays.items()})
        return (*out, size // math.prod(self.inner), *self.inner)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the packed weight."""
        return sum(x.nbytes for x in self.arrays.values())

    def astype(self, dtype: Any) -> Quantized:
        """Return the weight with another dtype of its unpacked values; the arrays are the same."""
        return replace(self, dtype=jnp.dtype(dtype))

    def dense(self) -> jax.Array:
        """Return the weight as an array."""
        return unpack(self.format, self.arrays).astype(self.dtype).reshape(self.shape)

    def lookup(self, index: jax.Array) -> jax.Array:
        """Return the rows at `index` of a table [rows, dim]."""
        return replace(self, arrays={name: x[index] for name, x in self.arrays.items()}).dense()

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul does."""
        size, out = math.prod(self.shape[-dims:]), self.shape[:-dims]
        rows = x.reshape(*x.shape[: x.ndim - dims], size)
        kernel = quantized_kernel(self.format, rows, self.platform, self.placement, math.prod(out))
        if kernel is not None:
            y = kernel(rows, self._as_matrix(), out_dtype)
        else:
            y = self._as_matrix().unpacked_matmul(rows, out_dtype)
        return y.reshape(*rows.shape[:-1], *out)

    def gated(self, x: jax.Array, glu: Any) -> jax.Array | None:
        """Return what ops.linear.gated does if a kernel can, else None."""
        if self.inner or x.ndim != 2:
            return None
        out = math.prod(self.shape[:-1])
        kernel = gated_kernel(self.format, x, glu, self.platform, self.placement, out)
        return None if kernel is None else kernel(x, self._as_matrix(), glu)

    def matmul_transposed(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Multiply as ops.linear.matmul_transposed does."""
        return jax.checkpoint(lambda x, w: matmul_transposed(x, w.dense(), out_dtype))(x, self)

    def per_head(self, x: jax.Array, transposed: bool) -> jax.Array:
        """Multiply as ops.linear.per_head does."""
        return jax.checkpoint(lambda x, w: per_head(x, w.dense(), transposed))(x, self)

    def grouped(self, rows: jax.Array, sizes: jax.Array, platform: str | None) -> jax.Array:
        """Multiply as ops.linear.grouped does."""
        kernel = quantized_grouped_kernel(self.format, rows, platform or self.platform, self.placement)
        if kernel is not None:
            return kernel(rows, self, sizes)
        return jax.checkpoint(lambda rows, w: grouped(rows, w.dense(), sizes, platform))(rows, self)

    def unpacked_matmul(self, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Multiply x [..., in] by this matrix [out, in]: the reference, which unpacks a part of it at a time."""
        return jax.checkpoint(functools.partial(_multiply_parts, out_dtype=out_dtype))(x, self)

    def _as_matrix(self) -> Quantized:
        arrays = {name: x.reshape(-1, x.shape[-1]) for name, x in self.arrays.items()}
        return replace(self, arrays=arrays, inner=())


def _multiply_parts(x: jax.Array, weight: Quantized, out_dtype: Any) -> jax.Array:
    """Return the products [..., rows] of x [..., size] with a matrix that is unpacked some rows at a time.

    On a mesh it is unpacked at once: the parts would be gathered from all devices.
    """
    rows, size = weight.shape
    wanted = -(-rows * size // PART)
    is_split = weight.placement is not None and weight.placement.mesh.size > 1
    count = 1 if is_split else next((n for n in range(wanted, min(rows, 64 * wanted) + 1) if rows % n == 0), 1)
    if count == 1:
        return matmul(x, weight.dense(), out_dtype=out_dtype)
    size, found = rows // count, []
    for at in range(count):  # not lax.map: XLA allocates its results, of every layer of a model, before the first layer
        arrays = {name: a[at * size : (at + 1) * size] for name, a in weight.arrays.items()}
        before = found[-1] if found else x  # then the part is unpacked, not earlier
        arrays = jax.lax.optimization_barrier((arrays, jax.lax.stop_gradient(before)))[0]
        found.append(matmul(x, replace(weight, arrays=arrays).dense(), out_dtype=out_dtype))
    return jnp.concatenate(found, axis=-1)


# --- made from arrays and specs ---------------------------------------------------------------------------------------


def is_quantized(x: Any) -> bool:
    """Return whether `x` is a quantised weight, for `is_leaf`."""
    return isinstance(x, Quantized)


def quantized(leaf: ParamSpec, arrays: dict[str, Any], dtype: Any, placement: Placement | None = None) -> Quantized:
    """Return the weight of a spec with a format from its arrays, concrete or abstract."""
    assert leaf.format is not None
    inner = leaf.shape[len(leaf.shape) - leaf.input_dims + 1 :]
    return Quantized(arrays, leaf.format, leaf_dtype(leaf, dtype), inner, placement)


def abstract_weight(leaf: ParamSpec, dtype: Any, placement: Placement | None) -> Any:
    """Return the shapes and shardings of a weight: an abstract array, or a Quantized of such."""
    places = array_shardings(placement, leaf, dtype) if placement else {}
    arrays = {
        name: jax.ShapeDtypeStruct(shape, kind, sharding=places.get(name))
        for name, (shape, kind) in leaf.arrays(dtype).items()
    }
    return arrays[""] if leaf.format is None else quantized(leaf, arrays, dtype, placement)


def rounded(leaf: ParamSpec, weight: jax.Array, placement: Placement | None = None) -> Any:
    """Return a weight rounded to the format of its spec, which may be none."""
    if leaf.format is None:
        return weight
    if leaf.format.name not in PACKERS:
        raise UnsupportedError(
            f"weights cannot be rounded to {leaf.format.name}, which can only be read: choose another quantization",
            param="quantization",
        )
    out, size = leaf.rows
    arrays = _pack(leaf.format, weight.reshape(*out, size))
    if placement is not None:
        arrays = jax.device_put(arrays, array_shardings(placement, leaf, weight.dtype))
    return quantized(leaf, arrays, weight.dtype, placement)


_pack = jax.jit(pack, static_argnums=0)
