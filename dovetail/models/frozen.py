"""Weights of a model that is not trained: an adapter's base, a reference, a teacher.

bf16 and f32 are plain arrays; other formats round the projections of layers (models.formats).
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from dovetail.core.formats import ROUNDED
from dovetail.core.mesh import Placement
from dovetail.core.spec import held_bytes, tree_map
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.formats import rounded_formats, with_formats
from dovetail.models.spec import spec
from dovetail.ops.quant.weight import abstract_weight, is_quantized

HELD = ("bf16", "f32", *(name for name in ROUNDED if name != "w8a8"))  # rounded activations have no gradient


@functools.lru_cache(maxsize=64)
def frozen_spec(cfg: ModelConfig, held: str) -> dict[str, Any]:
    """Return the specs of the weights; `held` is one of HELD."""
    return with_formats(spec(cfg), rounded_formats(spec(cfg), held))


def abstract_frozen(cfg: ModelConfig, held: str, dtype: Any, placement: Placement) -> Params:
    """Return the shapes and shardings of the weights.

    Args:
        cfg: The model.
        held: One of HELD.
        dtype: The type that the weights are computed in.
        placement: The mesh and its rules.
    """
    return tree_map(lambda leaf: abstract_weight(leaf, dtype, placement), frozen_spec(cfg, held))


def dense(params: Params) -> Params:
    """Return the weights with the quantised ones unpacked."""
    return jax.tree.map(lambda w: w.dense() if is_quantized(w) else w, params, is_leaf=is_quantized)


@functools.lru_cache(maxsize=256)
def frozen_bytes(cfg: ModelConfig, held: str, dtype: Any, placement: Placement) -> int:
    """Return the bytes of the weights on one device."""
    return held_bytes(abstract_frozen(cfg, held, dtype, placement))
