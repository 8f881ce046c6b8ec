"""Describe a model that another framework defines: its weights by name, and its forward pass as a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Batch, Params


class RowLogits(Protocol):
    """Return the logits [B, T, V] of a batch of token rows."""

    def __call__(
        self, params: Params, constants: Params, batch: Batch, key: jax.Array | None = None, packed: bool = True
    ) -> jax.Array:
        """Run the model.

        Args:
            params: The weights.
            constants: Further arrays.
            batch: The rows.
            key: For dropout; None turns it off.
            packed: Whether a row may hold several documents; otherwise the model's own causal mask is enough.
        """
        ...


@dataclass(frozen=True, eq=False)
class ExternalModel:
    """Hold a causal language model that Dovetail does not implement.

    Attributes:
        weights: The trained weights by name.
        constants: Further arrays that the forward pass reads: buffers, frozen weights.
        logits: The forward pass over token rows.
        load: Returns the initial values of weights and constants, on the host.
        save: Writes weights, given as host arrays by name, into a folder that the other framework reads.
    """

    weights: Mapping[str, ParamSpec]
    constants: Mapping[str, ParamSpec]
    logits: RowLogits
    load: Callable[[], dict[str, np.ndarray]]
    save: Callable[[Path, Mapping[str, Any]], None]

    def spec(self) -> dict[str, ParamSpec]:
        """Return the weights as a tree."""
        return dict(self.weights)


def weight_spec(name: str, shape: tuple[int, ...], is_table: bool = False, dtype: str | None = None) -> ParamSpec:
    """Declare a weight of an external model.

    Matrices are split over devices along their first dim that can be: the meaning of the dims is not known.

    Args:
        name: Its name.
        shape: Its shape.
        is_table: Whether rows are looked up only: it is not decayed, and has no FLOPs.
        dtype: Its own dtype; None: the training's.
    """
    axes = ("embed",) * len(shape) if len(shape) > 1 else (None,) * len(shape)
    active = 0.0 if is_table or len(shape) < 2 else 1.0
    return ParamSpec(shape, axes, Stored((name,), shape), active=active, dtype=dtype)


def gathered(weights: Params, specs: Mapping[str, ParamSpec], placement: Placement) -> Params:
    """Return the weights whole on every device, for use; their gradients are split again.

    Without it XLA may split activations along the dim by which a weight is split, whatever the module does with it.
    """
    whole = NamedSharding(placement.mesh, PartitionSpec())
    add = functools.partial(jax.lax.with_sharding_constraint, shardings=whole)  # with the next, a reduce-scatter

    def one(x: jax.Array, at: NamedSharding) -> jax.Array:
        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, whole)

        gather.defvjp(lambda x: (gather(x), None), lambda _, grad: (jax.lax.with_sharding_constraint(add(grad), at),))
        return gather(x)

    return {name: one(x, placement.sharding(specs[name].axes, x.shape)) for name, x in weights.items()}
