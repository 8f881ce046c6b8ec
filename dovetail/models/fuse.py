"""Fewer, larger products for serving: q, k and v in one, gate and up in one. `decoder` takes either form.

A fused weight cannot be split over heads by rows, so it is for weights that a device holds whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dovetail.core.types import Params


def fuse(params: Params) -> Params:
    """The same model with fused projections where a layer has them apart."""
    return {**params, "layers": tuple(_fuse_layer(p) for p in params["layers"])}


def _fuse_layer(p: Params) -> Params:
    p = dict(p)
    if {"q", "k", "v"} <= set(p["attn"]):
        p["attn"] = _join(p["attn"], ("q", "k", "v"), "qkv")
    if {"gate", "up"} <= set(p.get("mlp", ())):
        p["mlp"] = _join(p["mlp"], ("gate", "up"), "gate_up")
    return p


def _join(p: Params, names: tuple[str, ...], joined: str) -> Params:
    rest = {k: v for k, v in p.items() if k.removesuffix("_bias") not in names}
    rest[joined] = jnp.concatenate([p[n] for n in names])
    if f"{names[0]}_bias" in p:
        rest[f"{joined}_bias"] = jnp.concatenate([p[f"{n}_bias"] for n in names])
    return rest


def fuse_taking(params: Params) -> Params:
    """As `fuse`, but takes the layers out of `params`, so that each is freed as soon as it is joined."""
    layers, fused = list(params.pop("layers")), []
    while layers:
        fused.append(jax.block_until_ready(_fuse_layer(layers.pop(0))))
    return {**params, "layers": tuple(fused)}
