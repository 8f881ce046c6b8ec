"""Round the weights of a model to a scheme of core.formats.ROUNDED: for good, or in the forward pass of training."""

from __future__ import annotations

from typing import Any

import jax

from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.frozen import frozen_spec
from dovetail.ops.quant.weight import rounded


def round_params(params: Params, cfg: ModelConfig, scheme: str) -> Params:
    """Return the weights with the projections of layers rounded to a scheme."""
    return tree_map(rounded, frozen_spec(cfg, scheme), params)


def straight_through(params: Params, cfg: ModelConfig, scheme: str) -> Params:
    """Return the values of the rounded weights as arrays, with the gradients of the weights themselves.

    A step computes with what will be served; rounding has a gradient of 0 almost everywhere, and is left out of it.
    """

    def one(leaf: ParamSpec, weight: jax.Array) -> Any:
        if leaf.format is None:
            return weight
        return weight + jax.lax.stop_gradient(rounded(leaf, weight).dense() - weight)

    return tree_map(one, frozen_spec(cfg, scheme), params)
