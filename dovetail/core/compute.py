"""What a model computes in, by name: the type of its weights and activations, and how exact its products are.

Products of f32 need a setting: by default an NVIDIA GPU rounds their factors to TF32 (10 bits of fraction of 23) and a
TPU to bf16 (7). It is jax's own setting, made while a function is traced, so that XLA's products, our
kernels and upstream's all read the same one; what is traced under another setting is compiled anew.
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
    """A static argument of what is jitted. `f32` has products of f32 everywhere; `tf32` has TF32's where the chip has
    them, which is on NVIDIA GPUs, and those of f32 elsewhere."""

    name: str
    dtype: np.dtype

    def products(self, platform: str | None = None) -> contextlib.AbstractContextManager[None]:
        """To trace in: every product of f32 is as exact as the name says, in the backward pass too if it is traced
        inside. `platform` is where the function will run (None: where jax runs by default).

        Half-precision types are left as jax has them. Their factors are exact in any product of f32 (a router's), and
        upstream's TPU kernels refuse bf16 factors where the setting asks for more.
        """
        if self.dtype != jnp.float32:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(_EXACT if self.is_exact(platform) else "default")

    def is_exact(self, platform: str | None = None) -> bool:
        """Whether products have factors of f32: no tensor core makes those of an NVIDIA GPU."""
        has_tf32 = (platform or jax.default_backend()) in ("cuda", "gpu")
        return self.dtype == jnp.float32 and not (self.name == "tf32" and has_tf32)

    def describe(self, platform: str | None = None) -> str:
        if self.is_exact(platform):
            return "products of f32" + (", for this chip has no TF32" if self.name == "tf32" else "")
        return f"products of {'TF32' if self.name == 'tf32' else self.name}, summed in f32"


COMPUTES = {
    name: Compute(name, jnp.dtype(dtype))
    for name, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32), ("tf32", jnp.float32), ("f16", jnp.float16))
}
_LONG_NAMES = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def compute_of(asked: Any) -> Compute:
    """By its name, short or long, or by a dtype (float32 is `f32`)."""
    try:
        name = asked if isinstance(asked, str) else jnp.dtype(asked).name
    except TypeError:
        name = repr(asked)
    found = COMPUTES.get(_LONG_NAMES.get(name, name))
    if found is None:
        raise UserError(f"dtype {asked!r} is not one of {', '.join(COMPUTES)}")
    return found


def is_traced_exact(dtype: Any) -> bool:
    """Whether products of this type are f32's in what is being traced: for a kernel whose tiles depend on it."""
    return dtype == jnp.float32 and jax.config.jax_default_matmul_precision == _EXACT  # type: ignore[attr-defined]
