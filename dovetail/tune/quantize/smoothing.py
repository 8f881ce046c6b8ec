"""Scale the inputs of weights before they are rounded, as AWQ does (arXiv 2306.00978).

Columns with large inputs are multiplied by a factor, so that they lose less by rounding, and what makes the input is
divided by it: the norm before, or the rows of the weight before. The model computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.formats import Format
from dovetail.models.config import Layer
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.unpack import unpack
from dovetail.tune.quantize.inputs import Grams

POWERS = tuple(i / 20 for i in range(1, 20))  # of the inputs' root mean square; 0 changes nothing


def smoothed(
    p: dict[str, Any], layer: Layer, offset: float, forms: Mapping[str, Format], grams: Grams
) -> tuple[dict[str, Any], Grams]:
    """Return a layer's plain weights with scaled inputs, and the grams of those.

    Args:
        p: The weights.
        layer: The layer's description.
        offset: What the model's norms add to their weights.
        forms: The formats of the weights by path.
        grams: The sums of outer products of their inputs.
    """
    tree, grams = {**p, "attn": dict(p["attn"])}, dict(grams)
    sides = [("attn_norm", "attn", tuple(layer.attn.projections))]
    if layer.mlp is not None and layer.moe is None:
        tree["mlp"] = dict(p["mlp"])
        sides.append(("mlp_norm", "mlp", tuple(layer.mlp.projections)))
    for norm, part, names in sides:
        paths = [f"{part}.{name}" for name in names]
        if norm not in tree or any(path not in grams or path not in forms for path in paths):
            continue
        factor = _factor(forms[paths[0]], tuple(_rows(tree[part][name]) for name in names), grams[paths[0]])
        tree[norm] = ((tree[norm] + offset) / factor - offset).astype(tree[norm].dtype)
        tree[part] |= {name: (tree[part][name] * factor).astype(tree[part][name].dtype) for name in names}
        gram = grams[paths[0]] / factor[:, None] / factor
        grams |= {path: gram for path in paths}
    if "mlp" in tree and layer.moe is None and layer.mlp and layer.mlp.glu.limit is None and "mlp.down" in forms:
        _smooth_down(tree["mlp"], forms["mlp.down"], grams)
    return tree, grams


def _smooth_down(mlp: dict[str, Any], form: Format, grams: Grams) -> None:
    """Scale the input of `down`, which is proportional to the rows of `up`."""
    factor = _factor(form, (_rows(mlp["down"]),), grams["mlp.down"])
    mlp["down"] = mlp["down"] * factor.astype(mlp["down"].dtype)
    mlp["up"] = mlp["up"] / factor.astype(mlp["up"].dtype)[:, None]
    if "up_bias" in mlp:
        mlp["up_bias"] = mlp["up_bias"] / factor.astype(mlp["up_bias"].dtype)
    grams["mlp.down"] = grams["mlp.down"] / factor[:, None] / factor


def _rows(weight: jax.Array) -> jax.Array:
    return weight.reshape(-1, weight.shape[-1])


@functools.partial(jax.jit, static_argnums=0)
def _factor(form: Format, weights: tuple[jax.Array, ...], gram: jax.Array) -> jax.Array:
    """Return the factors [I] of the columns with the least squared error of the products."""
    size = jnp.sqrt(jnp.maximum(jnp.diag(gram), 1e-12 * jnp.mean(jnp.diag(gram)) + 1e-30))

    def error(factor: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for w in weights:
            lost = unpack(form, pack(form, w * factor)) / factor - w
            total += jnp.sum((lost @ gram) * lost)
        return total

    def better(best: tuple, power: jax.Array) -> tuple[tuple, None]:
        factor = size**power
        factor = factor / jnp.sqrt(jnp.max(factor) * jnp.min(factor))
        lost = error(factor)
        keep = lost < best[0]
        return (jnp.where(keep, lost, best[0]), jnp.where(keep, factor, best[1])), None

    ones = jnp.ones_like(size)
    (_, factor), _ = jax.lax.scan(better, (error(ones), ones), jnp.asarray(POWERS))
    return factor
