"""Gated linear units: act(gate) * up, with GPT-OSS's clamped variant."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Glu:
    """Compute a gated linear unit; `kind` is silu or gelu_tanh.

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

    def activate(self, x: jax.Array) -> jax.Array:
        """Return the activation of the gate."""
        return jax.nn.silu(x) if self.kind == "silu" else jax.nn.gelu(x, approximate=self.kind == "gelu_tanh")
