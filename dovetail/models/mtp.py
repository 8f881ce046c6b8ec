"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a block for each token further ahead.

At depth k, with h^0 the trunk's hidden states and t the tokens of a document,

    h^k_i = norm(block_k(proj_k [norm(embed(t_{i+k})); norm(h^{k-1}_i)]))

is unembedded by the trunk's own head and compared with t_{i+k+1}. Embedding and head are the trunk's, so their gradient
comes from here too. Any model may have such layers: their block is that of its last layer.

Published checkpoints keep them as layers after the last, each with a copy of the embedding and of the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Batch, Context, Packed, Params
from dovetail.models.block import Residual, block, norm
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.decoder import embed
from dovetail.models.registry import family_of
from dovetail.models.spec import COMMON, layer_spec
from dovetail.ops.linear import matmul
from dovetail.ops.moe import RouterStats


def mtp_depth(cfg: ModelConfig) -> int:
    """Return how many tokens further ahead are predicted: the number of layers in config.json, else one."""
    hf = cfg.to_hf()
    return int(hf.get("num_nextn_predict_layers") or hf.get("mtp_num_hidden_layers") or 1)


def mtp_layer(cfg: ModelConfig) -> Layer:
    """Return the last layer's description without its links to the trunk.

    Another layer's keys, its own token embeddings.
    """
    layer = dataclasses.replace(cfg.layers[-1], per_layer_dim=0)
    if layer.attn.kv_from is not None:
        layer = dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, kv_from=None))
    return layer


def mtp_spec(cfg: ModelConfig) -> tuple[dict[str, Any], ...]:
    """Return the weights of the layers of multi-token prediction."""
    return tuple(_depth_spec(cfg, len(cfg.layers) + i) for i in range(mtp_depth(cfg)))


def with_mtp(specs: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Return a model's specs with those of its multi-token prediction under `mtp`."""
    return {**specs, "mtp": mtp_spec(cfg)}


def _depth_spec(cfg: ModelConfig, i: int) -> dict[str, Any]:
    D, prefix = cfg.dim, f"model.layers.{i}."

    def norm(name: str) -> ParamSpec:
        init = "zeros" if cfg.norm_offset else "ones"
        return ParamSpec((D,), (None,), Stored((f"{prefix}{name}.weight",), (D,)), init, active=0.0)

    proj = Stored((f"{prefix}eh_proj.weight",), (D, 2 * D))
    return {
        "embed_norm": norm("enorm"),
        "hidden_norm": norm("hnorm"),
        "proj": ParamSpec((D, 2 * D), (None, "embed"), proj),
        "block": layer_spec(cfg, family_of(cfg), mtp_layer(cfg), i),
        "norm": norm("shared_head.norm"),
    }


def mtp_copies(cfg: ModelConfig) -> dict[str, str]:
    """Return tensors that a published checkpoint also has, each with the tensor that it is a copy of."""
    names = COMMON | dict(family_of(cfg).names)
    embedding, head = names["embed"], names["embed" if cfg.tied else "head"]
    copies: dict[str, str] = {}
    for i in range(len(cfg.layers), len(cfg.layers) + mtp_depth(cfg)):
        copies[f"model.layers.{i}.embed_tokens.weight"] = embedding
        copies[f"model.layers.{i}.shared_head.head.weight"] = head
    return copies


def ahead(batch: Batch, k: int) -> Batch:
    """Return the batch of depth k: at index i are the token k later and its target.

    The target counts where it did before, if the document of i has not ended yet. Positions and segments stay.
    """

    def later(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, k:], ((0, 0), (0, k)))

    goes_on = (later(batch.segment_ids) == batch.segment_ids) & (batch.segment_ids > 0)
    return dataclasses.replace(
        batch,
        tokens=later(batch.tokens),
        targets=later(batch.targets),
        loss_mask=later(batch.loss_mask) * goes_on,
        columns={name: later(x) if x.ndim > 1 else x for name, x in batch.columns.items()},
    )


def mtp_hidden(
    params: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, ctx: Packed, run: Callable = block
) -> list[tuple[jax.Array, Batch, RouterStats | None]]:
    """Return for each depth the states to unembed [B, T, D], the batch with their targets, and router statistics.

    Args:
        params: The weights.
        cfg: The model.
        hidden: The result of decoder.forward for the batch.
        batch: The batch.
        ctx: The attention context.
        run: block.block, or that with rematerialisation.
    """
    found = []
    for k, p in enumerate(params["mtp"], start=1):
        # On the way back the layers below wait for this depth's gradients, and its weights are gathered here: XLA else
        # holds both through the loops over layers and microsteps (26 of DeepSeek V3's layers on v5p: 74 GiB, 53 without
        # a depth).
        hidden, p = jax.lax.optimization_barrier((hidden, p))
        later = ahead(batch, k)
        token = embed(params, cfg, later.tokens, ctx.placement)
        hidden, _, stats = mtp_step(p, cfg, token, hidden, batch.positions, ctx, None, run)
        found.append((hidden, later, stats))
    return found


def mtp_step(
    p: Params,
    cfg: ModelConfig,
    token: jax.Array,
    hidden: jax.Array,
    positions: jax.Array,
    ctx: Context,
    entry: Any,
    run: Callable = block,
) -> tuple[jax.Array, Any, RouterStats | None]:
    """Run one depth.

    Args:
        p: The depth's weights.
        cfg: The model.
        token: Embeddings [..., D] of the later tokens.
        hidden: The states [..., D] of the depth before.
        positions: [...], those of `hidden`.
        ctx: The attention context.
        entry: The depth's entry of the cache.
        run: See `mtp_hidden`.

    Returns:
        The states to unembed, the entry of the cache, and the router's statistics.
    """
    layer = mtp_layer(cfg)
    table = layer.attn.rope.tables(positions) if layer.attn.rope else ()
    # the token's half is first in checkpoints and second in the paper's equation
    both = jnp.concatenate([norm(p["embed_norm"], cfg, token), norm(p["hidden_norm"], cfg, hidden)], axis=-1)
    x = matmul(both, p["proj"])
    stream, entry, stats = run(p["block"], Residual(x), table, ctx, entry, None, None, cfg=cfg, layer=layer)
    return stream.add_and_norm(None, p["norm"], cfg, ctx)[1], entry, stats
