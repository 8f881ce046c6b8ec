"""Multi-head latent attention (DeepSeek): its weights, its forward pass, and its cost; the operation is in ops.latent.

D model dim, N heads, R the latent's rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec
from dovetail.core.types import Context, Params
from dovetail.ops.dispatch import latent_row
from dovetail.ops.latent import latent_attention
from dovetail.ops.linear import matmul
from dovetail.ops.norm import rms_norm
from dovetail.ops.rope import Rope, rotate


@dataclass(frozen=True)
class Latent:
    """Describe the latent attention of one layer."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: Rope
    bias: bool = False
    norm_eps: float = 1e-6  # of the two latents' norms, whatever the model's own is

    kv_from: ClassVar[None] = None
    window: ClassVar[None] = None
    projections: ClassVar[dict[str, int]] = {}  # products of one input that may be joined

    # --- weights ------------------------------------------------------------------------------------------------------

    def spec(self, declare: Callable[..., ParamSpec], norm: Callable[..., ParamSpec], D: int) -> dict[str, ParamSpec]:
        """Return the weights of the layer."""
        N, R, H = self.heads, self.kv_rank, self.nope_dim + self.rope_dim
        up = self.nope_dim + self.v_dim  # one stored tensor holds every head's key part, then its value part
        k_cut = dict(view=(N, up, R), at=(slice(None), slice(0, self.nope_dim)))
        v_cut = dict(view=(N, up, R), at=(slice(None), slice(self.nope_dim, up)))
        tree = {
            "kv_a": declare("attn.kv_a", (R + self.rope_dim, D), (None, "embed")),
            "kv_a_norm": norm("attn.kv_a_norm", R),
            "k_up": declare("attn.kv_b", (N, self.nope_dim, R), ("heads", None, "embed"), (N * up, R), cut=k_cut),
            "v_up": declare("attn.kv_b", (N, self.v_dim, R), ("heads", None, "embed"), (N * up, R), cut=v_cut),
            "o": declare("attn.o", (D, N, self.v_dim), ("embed", "heads", None), (D, N * self.v_dim)),
        }
        if self.q_rank is None:
            tree["q"] = declare("attn.q", (N, H, D), ("heads", None, "embed"), (N * H, D))
        else:
            tree["q_a"] = declare("attn.q_a", (self.q_rank, D), (None, "embed"))
            tree["q_a_norm"] = norm("attn.q_a_norm", self.q_rank)
            tree["q_b"] = declare("attn.q_b", (N, H, self.q_rank), ("heads", None, "embed"), (N * H, self.q_rank))
        if self.bias:
            sizes = {"kv_a": R + self.rope_dim, "o": D} | ({"q_a": self.q_rank} if self.q_rank else {})
            for x, size in sizes.items():
                tree[f"{x}_bias"] = declare(f"attn.{x}_bias", (size,), (None,), init="zeros", active=0.0)
        return tree

    # --- the forward --------------------------------------------------------------------------------------------------

    def __call__(
        self, p: Params, x: jax.Array, table: tuple, ctx: Context, entry: Any, eps: float, offset: float
    ) -> tuple[jax.Array, Any]:
        """Map x [..., D] to every head's output [..., N, V] and the layer's entry of the cache."""
        q_nope, q_rope = jnp.split(self._queries(p, x), [self.nope_dim], axis=-1)
        latent, k_rope = jnp.split(matmul(x, p["kv_a"], p.get("kv_a_bias")), [self.kv_rank], axis=-1)
        latent = rms_norm(latent, p["kv_a_norm"], self.norm_eps)
        q_rope = rotate(q_rope, self.rope, table)
        k_rope = rotate(k_rope[..., None, :], self.rope, table)[..., 0, :]
        ctx = ctx.causal()
        return latent_attention(ctx, entry, q_nope, q_rope, latent, k_rope, p["k_up"], p["v_up"], scale=self.scale)

    def _queries(self, p: Params, x: jax.Array) -> jax.Array:
        if self.q_rank is None:
            return matmul(x, p["q"])
        latent = rms_norm(matmul(x, p["q_a"], p.get("q_a_bias")), p["q_a_norm"], self.norm_eps)
        return matmul(latent, p["q_b"])

    def merge(self, p: Params, x: jax.Array, multiply: Callable = matmul) -> jax.Array:
        """Map the heads' outputs [..., N, V] to [..., D]."""
        return multiply(x, p["o"], p.get("o_bias"), dims=2)

    # --- costs --------------------------------------------------------------------------------------------------------

    @property
    def cache_row(self) -> tuple[int, int]:
        """Return the shape (rows, dim) of one token in the cache."""
        return 1, self.kv_rank + self.rope_dim

    def page_dtype(self, dtype: Any, kv: str) -> np.dtype:
        """Return the dtype of the pages in a model of `dtype`: latents are not rounded."""
        return np.dtype(dtype)

    def page_row(self, dtype: Any, platform: str | None, placement: Placement | None) -> tuple[int, ...]:
        """Return the shape of one token in its pages, which depends on the kernel that reads them."""
        return latent_row(platform, self.cache_row[1])

    def pages_partition(self, placement: Placement) -> PartitionSpec:
        """Return how the pages are split over the mesh."""
        return PartitionSpec()  # the latent is common to all heads

    @property
    def flops_per_key(self) -> float:
        """Return the FLOPs of one query against one key and its value, over all heads."""
        return 2.0 * self.heads * (self.nope_dim + self.rope_dim + self.v_dim)

    def keys_seen(self, length: float) -> float:
        """Return how many keys a query attends to, of `length` tokens."""
        return length

    def activations(self, tensor: int) -> tuple[int, int, int]:
        """Return elements per token on one of `tensor` devices.

        (rotated q and k, outputs of its products, attention's output).
        """
        q, kv = self.heads * (self.nope_dim + self.rope_dim), self.heads * (self.nope_dim + self.v_dim)
        latents = (self.q_rank or 0) + self.kv_rank + self.rope_dim
        return 2 * q // tensor, (q + kv) // tensor + latents, self.heads * self.v_dim // tensor
