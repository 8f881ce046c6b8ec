"""Products of few tokens in a step of decode that do more than multiply: they include a norm before, or an addition.

Such a step is a chain of small kernels, each of which takes about 2 us however little it does. So a norm is left to the
products that read it (`Normed`), and the last product of half a block to the addition to the residual stream
(`Product`). Both exist only where ops.dispatch_products.few_kernel has a kernel: elsewhere norms and products are
arrays at once.

T tokens, D model dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from dovetail.core.types import Packed, Paged
from dovetail.ops import norm as norms
from dovetail.ops.dispatch_products import few_kernel

ARRAYS = (jax.Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normed:
    """Hold what ops.norm.rms_norm is to be computed of, by the products that read it."""

    x: jax.Array  # [T, D]
    weight: jax.Array  # [D]
    eps: float = field(metadata={"static": True})
    offset: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the norm."""
        return self.x.shape

    @property
    def ndim(self) -> int:
        """Return the number of its dims."""
        return self.x.ndim

    @property
    def dtype(self) -> Any:
        """Return its dtype."""
        return self.x.dtype

    def array(self) -> jax.Array:
        """Return the norm."""
        return norms.rms_norm(self.x, self.weight, self.eps, self.offset)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product:
    """Hold a product that is to be added to the residual stream."""

    x: jax.Array  # [T, in]
    w: Any  # [D, in], an array
    bias: jax.Array | None = None  # [D]

    def added_to(self, residual: jax.Array) -> jax.Array:
        """Return residual [T, D] plus the product."""
        y = few_product(self.x, self.w, self.bias, residual=residual)
        assert y is not None
        return y

    def __radd__(self, residual: jax.Array) -> jax.Array:
        """Return residual [T, D] plus the product."""
        return self.added_to(residual)


def product_to_add(x: jax.Array, w: Any, bias: jax.Array | None, dims: int) -> Product | None:
    """Return the product of ops.linear.matmul, to be computed when it is added; None if there is no kernel for that."""
    if not isinstance(w, ARRAYS) or w.ndim != dims + 1:
        return None
    size = math.prod(w.shape[1:])
    rows, matrix = x.reshape(*x.shape[: x.ndim - dims], size), w.reshape(-1, size)
    return Product(rows, matrix, bias) if few_kernel(rows, matrix) else None


def add_rms_norm(
    ctx: Packed | Paged,
    x: jax.Array,
    delta: jax.Array | Product | None,
    weight: jax.Array | None,
    eps: float,
    offset: float = 0.0,
    readers: Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array | Normed]:
    """Return what ops.norm.add_rms_norm does, from a product too; if only products with `readers` read it, a Normed."""
    if isinstance(delta, Product):
        x, delta = delta.added_to(x), None
    if delta is None and weight is not None and readers and isinstance(ctx, Paged) and _include_norms(x, readers):
        return x, Normed(x, weight, eps, offset)
    return norms.add_rms_norm(ctx, x, delta, weight, eps, offset)


def _include_norms(x: jax.Array, readers: Mapping[str, Any]) -> bool:
    """Return whether kernels multiply x [T, D] by all of the weights that have its dim."""
    weights = [w for w in readers.values() if len(w.shape) > 1 and w.shape[-1] == x.shape[-1]]
    matrices = [w.reshape(-1, w.shape[-1]) for w in weights if isinstance(w, ARRAYS)]
    return len(weights) == len(matrices) > 0 and all(few_kernel(x, w) for w in matrices)


def few_product(
    x: jax.Array | Normed,
    w: Any,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    glu: Any = None,
    out_dtype: Any = None,
) -> jax.Array | None:
    """Multiply x [T, in] by w [out, in]; with `glu`, w is gate and then up. None if there is no kernel for that.

    The kernel runs on CUDA; a gradient is that of the products as XLA has them.
    """
    kernel = few_kernel(x, w, glu, out_dtype)
    if kernel is None:
        return None
    tokens, norm, static = x, None, {}
    if isinstance(x, Normed):
        tokens, norm, static = x.x, x.weight, dict(eps=x.eps, offset=x.offset)

    def ours(x: jax.Array, w: jax.Array, bias: Any, residual: Any, norm: Any) -> jax.Array:
        return kernel(x, w, bias, residual=residual, norm=norm, **static)

    reference = functools.partial(_reference, glu, static)
    return _on_cuda(ours, reference)(tokens, w, bias, residual, norm)


def _reference(glu: Any, static: dict, x: Any, w: Any, bias: Any, residual: Any, norm: Any) -> jax.Array:
    """Return what the kernel does."""
    y = (x if norm is None else norms.rms_norm(x, norm, **static)) @ w.T
    y = y if bias is None else y + bias.astype(y.dtype)
    y = glu(*lax.split(y, [y.shape[-1] // 2] * 2, axis=1)) if glu else y
    return y if residual is None else residual + y


def _on_cuda(kernel: Callable, reference: Callable) -> Callable:
    """Return a function that runs the kernel on CUDA, and elsewhere and for gradients the reference."""

    @jax.custom_vjp
    def run(*given: Any) -> jax.Array:
        return lax.platform_dependent(*given, cuda=kernel, default=reference)

    run.defvjp(lambda *given: (run(*given), given), lambda given, g: jax.vjp(reference, *given)[1](g))
    return run
