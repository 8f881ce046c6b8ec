"""Compute types by name: the dtype of weights and activations, and the precision of products.

Products of f32 need a setting: by default an NVIDIA GPU rounds their factors to TF32 (10 of 23 bits of fraction) and a
TPU to bf16 (7 bits). jax's own setting is used, while a function is traced, so that XLA's products, our kernels and
upstream kernels all read the same one. A function traced under another setting is compiled again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UserError

_EXACT = "highest"


@dataclass(frozen=True)
class Compute:
    """Name a dtype and a precision; a static argument of jitted functions.

    `f32` has f32 products everywhere; `tf32` has TF32 products on NVIDIA GPUs and f32 products elsewhere.
    """

    name: str
    dtype: np.dtype

    def products(self, platform: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Return the context in which to trace a function, and its backward pass, for this precision of f32 products.

        Half-precision types keep jax's default: their factors are exact in any product of f32 (a router's), and
        upstream's TPU kernels refuse bf16 factors under a higher setting.

        Args:
            platform: Where the function will run; None for jax's default backend.
        """
        if self.dtype != jnp.float32:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(_EXACT if self.is_exact(platform) else "default")

    def is_exact(self, platform: str | None = None) -> bool:
        """Return whether products have f32 factors; tensor cores of NVIDIA GPUs cannot compute those."""
        has_tf32 = (platform or jax.default_backend()) in ("cuda", "gpu")
        return self.dtype == jnp.float32 and not (self.name == "tf32" and has_tf32)

    def describe(self, platform: str | None = None) -> str:
        """Describe the products of this type on a platform."""
        if self.is_exact(platform):
            return "products of f32" + (", because this chip has no TF32" if self.name == "tf32" else "")
        return f"products of {'TF32' if self.name == 'tf32' else self.name}, summed in f32"


COMPUTES = {
    name: Compute(name, jnp.dtype(dtype))
    for name, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32), ("tf32", jnp.float32), ("f16", jnp.float16))
}
_LONG_NAMES = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def compute_of(asked: Any) -> Compute:
    """Return the Compute of a short or long name, or of a dtype (float32 is `f32`)."""
    try:
        name = asked if isinstance(asked, str) else jnp.dtype(asked).name
    except TypeError:
        name = repr(asked)
    found = COMPUTES.get(_LONG_NAMES.get(name, name))
    if found is None:
        raise UserError(f"dtype {asked!r} is not one of {', '.join(COMPUTES)}", param="dtype")
    return found


def is_traced_exact(dtype: Any) -> bool:
    """Return whether products of this dtype are f32 products in the current trace; tiles of kernels depend on it."""
    return dtype == jnp.float32 and jax.config.jax_default_matmul_precision == _EXACT  # type: ignore[attr-defined]
