"""Weights of a model that is not trained: an adapter's base, a reference, a teacher.

bf16 and f32 are plain arrays; int8 and nf4 pack the projections of layers (ops.quant). Embeddings, norms and routers
stay in the type that they are computed in.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec, is_spec, leaf_dtype, path_name
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.spec import spec
from dovetail.ops.quant import SCHEMES, Scheme

HELD = ("bf16", "f32", *SCHEMES)


def abstract_frozen(cfg: ModelConfig, held: str, dtype: Any, placement: Placement) -> Params:
    """Return the shapes and shardings of the weights.

    Args:
        cfg: The model.
        held: One of HELD.
        dtype: The type that the weights are computed in.
        placement: The mesh and its rules.
    """

    def one(path: tuple, leaf: ParamSpec) -> Any:
        own = leaf_dtype(leaf, dtype)
        plain = jax.ShapeDtypeStruct(leaf.shape, own)
        scheme = _scheme_of(path_name(path), leaf, held)
        shapes = jax.eval_shape(scheme.pack, plain) if scheme else plain
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.sharding(leaf.axes, x.shape)), shapes
        )

    return jax.tree_util.tree_map_with_path(one, spec(cfg), is_leaf=is_spec)


def pack(path: str, leaf: ParamSpec, weight: jax.Array, held: str, placement: Placement | None) -> Any:
    """Return the weight at `path` as it is held."""
    scheme = _scheme_of(path, leaf, held)
    if scheme is None:
        return weight
    packed = jax.jit(scheme.pack)(weight)
    if placement is None:
        return packed
    return jax.tree.map(lambda x: jax.device_put(x, placement.sharding(leaf.axes, x.shape)), packed)


def dense(params: Params) -> Params:
    """Return the weights with the packed ones unpacked."""
    return jax.tree.map(
        lambda w: w.dense() if hasattr(w, "dense") else w, params, is_leaf=lambda w: hasattr(w, "dense")
    )


def _scheme_of(path: str, leaf: ParamSpec, held: str) -> Scheme | None:
    """Return what packs the weight; None if it stays an array."""
    scheme = SCHEMES.get(held)
    is_projection = path.startswith("layers.") and leaf.active > 0 and len(leaf.shape) > 1
    if scheme is None or not is_projection or path.endswith(".router") or not scheme.fits(leaf.shape):
        return None
    return scheme


@functools.lru_cache(maxsize=256)
def frozen_bytes(cfg: ModelConfig, held: str, dtype: Any, placement: Placement) -> int:
    """Return the bytes of the weights on one device."""
    abstract = jax.tree.leaves(abstract_frozen(cfg, held, dtype, placement))
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in abstract)
