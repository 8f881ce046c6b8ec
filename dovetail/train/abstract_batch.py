"""Describe the batches of a step as shapes with shardings, for compiling it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.training import Training
from dovetail.core.types import Batch, Column


def abstract_batch(
    settings: Training, columns: Mapping[str, Column], placement: Placement, entries: tuple[int, ...] = ()
) -> Batch:
    """Return a step's batch as shapes with shardings.

    Args:
        settings: The recipe.
        columns: The columns that the objective declares.
        placement: The mesh and its rules.
        entries: Entries of each table column, in the order of `columns`; by default 1.
    """
    shape = (settings.batch, settings.length)
    at = placement.sharding(("batch", "length"), shape)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
    mask: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)
    tables = [name for name, one in columns.items() if one.table]
    sizes = dict(zip(tables, entries or (1,) * len(tables), strict=True))
    further = {name: _abstract_column(one, shape, placement, sizes.get(name, 1)) for name, one in columns.items()}
    return Batch(ids, ids, ids, ids, mask, further)


def _abstract_column(column: Column, shape: tuple[int, int], placement: Placement, entries: int) -> Any:
    axes = ("batch", "length") if column.per_token else ("batch",)
    own = shape[: len(axes)]
    if column.width:
        axes, own = (*axes, None), (*own, column.width)
    if column.table:
        axes, own = ("batch", None, None), (shape[0], entries, column.width)
    return jax.ShapeDtypeStruct(own, jnp.dtype(column.dtype), sharding=placement.sharding(axes, own))
