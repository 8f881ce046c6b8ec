"""Make the arrays that an engine keeps on its device, and describe them without data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.host import return_zeros
from dovetail.core.types import Params


def zeros_of(abstract: Any) -> Any:
    """Allocate the arrays of a tree of abstract ones; a CPU's take memory where they are written."""
    return jax.tree.map(_zeros, abstract)


def _zeros(abstract: Any) -> jax.Array:
    made = jnp.zeros(abstract.shape, abstract.dtype, device=abstract.sharding)
    for shard in made.addressable_shards:
        if shard.device.platform == "cpu":
            whole = jax.block_until_ready(shard.data)
            return_zeros(whole.unsafe_buffer_pointer(), whole.nbytes)
    return made


def abstract_of(arrays: Any) -> Any:
    """Return the same tree with a ShapeDtypeStruct for each array: shape, type and sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def is_abstract(params: Params) -> bool:
    """Return whether the arrays of this tree have been dropped."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
