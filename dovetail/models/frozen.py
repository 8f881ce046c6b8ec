"""A model's weights as they are held where nothing trains them: an adapter's base, a reference, a teacher.

bf16 and f32 are plain arrays; int8 and nf4 pack the projections of layers (ops.quant), and all else stays as it is
computed with: embeddings, norms, routers.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import numpy as np

from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec, is_spec, leaf_dtype, path_name
from dovetail.models.config import ModelConfig
from dovetail.models.spec import spec
from dovetail.ops.quant import int8, nf4

SCHEMES: dict[str, ModuleType] = {"int8": int8, "nf4": nf4}
HELD = ("bf16", "f32", *SCHEMES)


def abstract_frozen(cfg: ModelConfig, held: str, dtype: Any, placement: Placement) -> Any:
    """The weights' shapes and places; `dtype` is what they are computed with."""

    def one(path: tuple, leaf: ParamSpec) -> Any:
        own = leaf_dtype(leaf, dtype)
        plain = jax.ShapeDtypeStruct(leaf.shape, own)
        scheme = scheme_of(path_name(path), leaf, held)
        shapes = jax.eval_shape(scheme.pack, plain) if scheme else plain
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.sharding(leaf.axes, x.shape)), shapes
        )

    return jax.tree_util.tree_map_with_path(one, spec(cfg), is_leaf=is_spec)


def pack(path: str, leaf: ParamSpec, weight: jax.Array, held: str, placement: Placement | None) -> Any:
    """One weight as it is held."""
    scheme = scheme_of(path, leaf, held)
    if scheme is None:
        return weight
    packed = jax.jit(scheme.pack)(weight)
    return (
        packed
        if placement is None
        else jax.tree.map(lambda x: jax.device_put(x, placement.sharding(leaf.axes, x.shape)), packed)
    )


def dense(params: Any) -> Any:
    """As arrays, all of them: what was packed is unpacked."""
    return jax.tree.map(
        lambda w: w.dense() if hasattr(w, "dense") else w, params, is_leaf=lambda w: hasattr(w, "dense")
    )


def scheme_of(path: str, leaf: ParamSpec, held: str) -> ModuleType | None:
    """What packs it; None: it stays an array."""
    scheme = SCHEMES.get(held)
    is_projection = path.startswith("layers.") and leaf.active > 0 and len(leaf.shape) > 1
    if scheme is None or not is_projection or path.endswith(".router") or not scheme.fits(leaf.shape):
        return None
    return scheme


@functools.lru_cache(maxsize=256)
def frozen_bytes(cfg: ModelConfig, held: str, dtype: Any, placement: Placement) -> int:
    """Of one device."""
    abstract = jax.tree.leaves(abstract_frozen(cfg, held, dtype, placement))
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in abstract)
