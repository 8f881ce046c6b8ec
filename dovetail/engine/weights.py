"""Weights on the device and the form of them that steps are compiled for: tree, shapes, types, placement."""

from __future__ import annotations

from typing import Any

import jax

from dovetail.core.types import Params


def form_of(params: Params) -> Any:
    """The same tree with what the steps are compiled for in place of each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


def is_form(params: Params) -> bool:
    """Whether this is the form alone: the arrays have been dropped."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))


def placed(params: Params, form: Any) -> Params:
    """The arrays where the form says they lie; those that lie there already are taken as they are."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, form)
