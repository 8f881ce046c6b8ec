"""Attention over heads: its weights, its forward pass, and its cost.

D model dim, N heads, K key heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dovetail.core.formats import KV_DTYPES
from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec
from dovetail.core.types import Context, Params
from dovetail.ops.attention import attend, rotate_store, split_heads
from dovetail.ops.attention import store as store_pages
from dovetail.ops.dispatch import page_row, rotates_and_stores
from dovetail.ops.linear import is_joined, joined_matmul, matmul, matmuls
from dovetail.ops.norm import rms_norm
from dovetail.ops.paged import is_rounded
from dovetail.ops.rope import Rope, rotate


@dataclass(frozen=True)
class Attention:
    """Describe the attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None  # None: no positions (SmolLM3's every fourth layer)
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str = ""  # "head": over each head's dims; "all": over the heads together (OLMo)
    v_norm: bool = False  # values are normed too, without a weight (Gemma 4)
    k_is_v: bool = False  # the key projection gives the values as well (Gemma 4)
    sinks: bool = False  # a learned logit per head that takes weight and gives nothing (GPT-OSS)
    block_mask: bool = False  # the tokens of an image see each other (Gemma 3)
    kv_from: int | None = None  # reads the keys and values of this earlier layer (Gemma 4)

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def projections(self) -> dict[str, int]:
        """Return the products of the layer's input, each with its heads."""
        own = [] if self.kv_from is not None else ["k"] if self.k_is_v else ["k", "v"]
        return {"q": self.heads} | dict.fromkeys(own, self.kv_heads)

    def spec(self, declare: Callable[..., ParamSpec], norm: Callable[..., ParamSpec], D: int) -> dict[str, ParamSpec]:
        """Return the weights of the layer."""
        N, K, H = self.heads, self.kv_heads, self.head_dim
        tree = {"o": declare("attn.o", (D, N, H), ("embed", "heads", None), (D, N * H))}
        for x, heads in self.projections.items():
            axis = "heads" if x == "q" else "kv_heads"
            tree[x] = declare(f"attn.{x}", (heads, H, D), (axis, None, "embed"), (heads * H, D))
            if self.qkv_bias:
                shape, bias = (heads, H), dict(init="zeros", active=0.0)
                tree[f"{x}_bias"] = declare(f"attn.{x}_bias", shape, (axis, None), (math.prod(shape),), **bias)
        if self.out_bias:
            tree["o_bias"] = declare("attn.o_bias", (D,), (None,), init="zeros", active=0.0)
        if self.qk_norm:
            tree["q_norm"] = norm("attn.q_norm", H if self.qk_norm == "head" else N * H)
            if "k" in tree:
                tree["k_norm"] = norm("attn.k_norm", H if self.qk_norm == "head" else K * H)
        if self.sinks:
            tree["sinks"] = declare("attn.sinks", (N,), ("heads",), active=0.0)
        return tree

    # --- the forward --------------------------------------------------------------------------------------------------

    def __call__(
        self, p: Params, x: jax.Array, table: tuple, ctx: Context, entry: Any, eps: float, offset: float
    ) -> tuple[jax.Array, Any]:
        """Map x [..., D] to every head's output [..., N, H] and the layer's entry of the cache.

        Eps and offset are the norms'.
        """
        q, entry = self.store(p, x, table, ctx, entry, eps, offset)
        return self.attend(p, q, ctx, entry, self.window), entry

    def store(
        self, p: Params, x: jax.Array, table: tuple, ctx: Context, entry: Any, eps: float, offset: float
    ) -> tuple[jax.Array, Any]:
        """Do as `project_and_store`, with one kernel where there is one."""
        in_one = is_joined(p, self.projections) and "v" in self.projections
        in_one = in_one and not (entry is not None and is_rounded(entry))  # the kernel writes plain pages
        if not (in_one and rotates_and_stores(ctx, self.rope, self.head_dim, self.qk_norm, self.v_norm, x.dtype)):
            return self.project_and_store(p, x, table, ctx, entry, eps, offset)
        qkv = joined_matmul(x, p, self.projections)
        assert qkv is not None and qkv.shape[-3] == 1
        norms = (p["q_norm"], p["k_norm"]) if self.qk_norm else None
        return rotate_store(ctx, entry, qkv.reshape(*x.shape[:-1], *qkv.shape[-2:]), table, norms, eps, offset)

    def attend(self, p: Params, q: jax.Array, ctx: Context, entry: Any, window: int | None) -> jax.Array:
        """Map queries [..., N, H] to every head's output [..., N, H]."""
        ctx = ctx if self.block_mask else ctx.causal()
        of_pages = dict(sinks=p.get("sinks"), kv_heads=self.kv_heads)
        return attend(ctx, q, entry, scale=self.scale, window=window, softcap=self.softcap, **of_pages)

    def project_and_store(
        self, p: Params, x: jax.Array, table: tuple, ctx: Context, entry: Any, eps: float, offset: float
    ) -> tuple[jax.Array, Any]:
        """Map x [..., D] to every head's query [..., N, H] and the entry with the new keys and values."""
        q, *kv = matmuls(x, p, self.projections)
        q = self._turned(self._normed(q, p.get("q_norm"), eps, offset), table)
        if kv:
            k, v = kv[0], kv[-1]
            k = self._turned(self._normed(k, p.get("k_norm"), eps, offset), table)
            entry = store_pages(ctx, entry, k, rms_norm(v, None, eps) if self.v_norm else v)
        return q, entry

    def _turned(self, x: jax.Array, table: tuple) -> jax.Array:
        return rotate(x, self.rope, table) if self.rope else x

    def _normed(self, x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
        """Normalise x [..., N, H] for each head or for all heads together."""
        if weight is None:
            return x
        if self.qk_norm == "all":
            return rms_norm(x.reshape(*x.shape[:-2], -1), weight, eps, offset).reshape(x.shape)
        return rms_norm(x, weight, eps, offset)

    def merge(self, p: Params, x: jax.Array, multiply: Callable = matmul) -> jax.Array:
        """Map the heads' outputs [..., N, H] to [..., D]."""
        return multiply(x, p["o"], p.get("o_bias"), dims=2)

    # --- costs --------------------------------------------------------------------------------------------------------

    @property
    def cache_row(self) -> tuple[int, int] | None:
        """Return the shape (rows, dim) of one token in the cache; None for a layer that reads another's."""
        return None if self.kv_from is not None else (2 * self.kv_heads, self.head_dim)

    def page_dtype(self, dtype: Any, kv: str) -> np.dtype:
        """Return the dtype of the pages in a model of `dtype`; `kv` is a key of core.formats.KV_DTYPES, or auto.

        A sliding window reads few pages: its layers keep the model's dtype.
        """
        return jnp.dtype(KV_DTYPES[kv][0] if kv in KV_DTYPES and not self.window else dtype)

    def page_row(self, dtype: Any, platform: str | None, placement: Placement | None) -> tuple[int, ...] | None:
        """Return the shape of one token in its pages, which depends on the kernel that reads them."""
        if self.kv_from is not None:
            return None
        return page_row(platform, self.kv_heads, self.head_dim, dtype, self.sinks, placement, self.block_mask)

    def pages_partition(self, placement: Placement) -> PartitionSpec:
        """Return how the pages are split over the mesh."""
        return split_heads(placement, self.kv_heads)[1]

    @property
    def flops_per_key(self) -> float:
        """Return the FLOPs of one query against one key and its value, over all heads."""
        return 4.0 * self.heads * self.head_dim

    def keys_seen(self, length: float) -> float:
        """Return how many keys a query attends to at most, of `length` tokens."""
        return min(length, self.window) if self.window else length

    def activations(self, tensor: int) -> tuple[int, int, int]:
        """Return elements per token on one of `tensor` devices.

        (rotated q and k, outputs of its products, attention's output).
        """
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (q + k) // tensor, (q + 2 * k) // tensor, q // tensor
