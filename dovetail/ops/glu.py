"""Gated linear units: act(gate) * up, with GPT-OSS's clamped variant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.ops.capabilities import NVIDIA

SLOPE, CUBE = 2 * (2 / math.pi) ** 0.5, 0.044715


@dataclass(frozen=True)
class Glu:
    """Compute a gated linear unit; `kind` is silu, gelu_tanh or gelu.

    With `limit`, it is GPT-OSS's: clamp, then gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: str = "silu"
    limit: float | None = None
    alpha: float = 1.702

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return act(gate) * up."""
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
            return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
        return self.activate(gate) * up

    def in_kernel(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return act(gate) * up by what kernels can compute: without a gradient, and without exact GELU."""
        if self.limit is not None:
            return self(gate, up)
        return gate * jax.nn.sigmoid(_inner(gate) if self.kind == "gelu_tanh" else gate) * up

    def activate(self, x: jax.Array) -> jax.Array:
        """Return the activation of the gate."""
        if self.kind == "gelu_tanh":
            return gelu_tanh(x)
        return jax.nn.silu(x) if self.kind == "silu" else jax.nn.gelu(x, approximate=False)


@jax.custom_vjp
def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return the tanh approximation of GELU; the backward pass keeps x alone.

    It is written as XLA knows it: cuBLAS then applies it in the product before, and writes x too if it is kept.
    """
    return jax.nn.gelu(x, approximate=True)


def _gelu_tanh_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if jax.default_backend() in NVIDIA:
        return gelu_tanh(x), x
    x32 = x.astype(jnp.float32)
    return (x32 * jax.nn.sigmoid(_inner(x32))).astype(x.dtype), x


def _inner(x: jax.Array) -> jax.Array:
    """Return 2 y of GELU's 0.5 (1 + tanh(y)), which is sigmoid(2 y): an exponential costs less than a tanh."""
    return SLOPE * (x + CUBE * x**3)


def _gelu_tanh_backward(x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    x32 = x.astype(jnp.float32)
    s = jax.nn.sigmoid(_inner(x32))
    slope = s + x32 * s * (1 - s) * SLOPE * (1 + 3 * CUBE * x32 * x32)
    return ((dy.astype(jnp.float32) * slope).astype(x.dtype),)


gelu_tanh.defvjp(_gelu_tanh_forward, _gelu_tanh_backward)
