"""The parts that DFlash 2 adds to DFlash: convolutions around attention and MLP, and a choice among a few candidates.

A convolution sees the slots t of one block, from left to right. Its kernel has a weight for each channel and tap, and
an addition for each group of channels, a linear function of the slot's normed state:

    y_t = sum_i x_{t-i} * (base_i + delta_i(t))

One such state gives the kernels of two convolutions, of the input of the attention or MLP and of its output.

The candidates of a position are the tokens b with the highest logits U. With the token a before it and the state h:

    S(b) = U(b) + <A[a] * W h, B[b]>

W slots of a block, S sequences, D model dim, V vocabulary, G groups, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.spec import ParamSpec
from dovetail.core.types import Context, Params
from dovetail.models.block import Residual, feed_forward
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.draft.declare import declare
from dovetail.ops.linear import matmul


@dataclass(frozen=True)
class DynamicConv:
    """Describe the convolutions around the attention or the MLP of a layer."""

    taps: int
    group_size: int  # channels that share the addition to their kernel

    def spec(self, name: str, dim: int) -> dict[str, ParamSpec]:
        """Return the weights, whose published names start with `name`."""
        rows, mean = 2 * self.taps * (dim // self.group_size), f"constant:{1 / self.taps}"
        return {
            "base": declare(f"{name}.base_kernel", (2, self.taps, dim), (None,) * 3, init=mean, active=0.0),
            "projection": declare(f"{name}.kernel_projection.weight", (rows, dim), (None, "embed")),
        }

    def around(
        self, p: Params, x: jax.Array, slots: int, inner: Callable[[jax.Array], tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any]:
        """Return `inner` of x [..., D] with its input and its output convolved, and what else it returns."""
        delta = matmul(x, p["projection"]).reshape(*x.shape[:-1], 2, self.taps, -1)
        y, more = inner(self._convolved(x, p["base"][0], delta[..., 0, :, :], slots))
        return self._convolved(y, p["base"][1], delta[..., 1, :, :], slots), more

    def _convolved(self, x: jax.Array, base: jax.Array, delta: jax.Array, slots: int) -> jax.Array:
        """Convolve x [..., D] with the kernels base [taps, D] + delta [..., taps, G]."""
        blocks = x.reshape(-1, slots, x.shape[-1])
        kernels = base + jnp.repeat(delta, self.group_size, axis=-1)
        kernels = kernels.reshape(-1, slots, *base.shape)
        moved = [jnp.pad(blocks, ((0, 0), (i, 0), (0, 0)))[:, :slots] for i in range(self.taps)]
        return jnp.sum(jnp.stack(moved, axis=2) * kernels, axis=2).reshape(x.shape).astype(x.dtype)


@dataclass(frozen=True)
class CandidateSelector:
    """Describe the choice of a draft token among the most likely ones."""

    rank: int
    top_k: int

    def spec(self, vocab: int, dim: int) -> dict[str, ParamSpec]:
        """Return the weights A, B and W."""
        table, name = ((vocab, self.rank), ("vocab", None)), "candidate_selector"
        return {
            "before": declare(f"{name}.predecessor_codebook", *table, init="ones", active=0.0),
            "after": declare(f"{name}.successor_codebook", *table, active=0.0),
            "projection": declare(f"{name}.hidden_projection.weight", (self.rank, dim), (None, "embed")),
        }

    def edges(self, p: Params, hidden: jax.Array, previous: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return A[a] * W h [..., R] and B [V, R], whose product is added to the logits.

        Args:
            p: The weights.
            hidden: [..., D], the states that the logits are made of.
            previous: [...], the tokens before.
        """
        return p["before"][previous] * matmul(hidden, p["projection"]), p["after"]

    def scores(self, p: Params, logits: jax.Array, hidden: jax.Array, previous: jax.Array) -> jax.Array:
        """Return the scores [S, V] of the candidates, -inf for other tokens.

        Args:
            p: The weights.
            logits: [S, V].
            hidden: [S, D]: see `edges`.
            previous: [S].
        """
        values, ids = jax.lax.top_k(logits, self.top_k)
        context, after = self.edges(p, hidden, previous)
        edges = jnp.einsum("sr,skr->sk", context, after[ids], preferred_element_type=jnp.float32)
        return jnp.full_like(logits, -jnp.inf).at[jnp.arange(len(ids))[:, None], ids].set(values + edges)


def conv_block(
    p: Params, stream: Residual, table: tuple, ctx: Context, entry: Any, slots: int, *, cfg: ModelConfig, layer: Layer,
    conv: DynamicConv,
) -> tuple[Residual, Any]:  # fmt: skip
    """Run one layer with convolutions on blocks of `slots` slots (see models.block.block)."""

    def attend(x: jax.Array) -> tuple[jax.Array, Any]:
        y, pages = layer.attn(p["attn"], x, table, ctx, entry, cfg.norm_eps, cfg.norm_offset)
        return layer.attn.merge(p["attn"], y), pages

    stream, h = stream.add_and_norm(None, p["attn_norm"], cfg, ctx)
    h, pages = conv.around(p["attn_conv"], h, slots, attend)
    stream, h = stream.add_and_norm(h, p["mlp_norm"], cfg, ctx)
    h, _ = conv.around(p["mlp_conv"], h, slots, lambda x: feed_forward(p, cfg, layer, stream.x, x, ctx))
    return Residual(stream.x, h), pages
