"""A mesh has axes, tensors have dims: Rules say which mesh axes a tensor's logical dim is split over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.core.spec import ParamSpec, tree_map

MESH_AXES = ("data", "fsdp", "expert", "tensor")


@dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axes, as a tuple of pairs so that it can be hashed and be a static argument of jit."""

    table: tuple[tuple[str, tuple[str, ...]], ...]

    def axes_of(self, logical: str | None) -> tuple[str, ...]:
        return dict(self.table).get(logical or "", ())


# Tokens are split over every axis but tensor; weights over fsdp by their model dim, over tensor by heads or width.
TRAIN = Rules((
    ("batch", ("data", "fsdp", "expert")),
    ("embed", ("fsdp",)),
    ("heads", ("tensor",)), ("kv_heads", ("tensor",)), ("mlp", ("tensor",)), ("vocab", ("tensor",)),
    ("experts", ("expert",)),
))  # fmt: skip
# A step's tokens are few and every device sees them all; only weights and pages are split.
SERVE = Rules((
    ("heads", ("tensor",)), ("kv_heads", ("tensor",)), ("mlp", ("tensor",)), ("vocab", ("tensor",)),
    ("experts", ("expert",)),
))  # fmt: skip


def make_mesh(axes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all of MESH_AXES, those not named being 1: rules need not ask which axes there are."""
    unknown = set(axes) - set(MESH_AXES)
    if unknown:
        raise ValueError(f"mesh axes are {', '.join(MESH_AXES)}; got {', '.join(sorted(unknown))}")
    devices = list(devices if devices is not None else jax.devices())
    sizes = [axes.get(name, 1) for name in MESH_AXES]
    if math.prod(sizes) != len(devices):
        raise ValueError(f"a mesh of {dict(axes)} needs {math.prod(sizes)} devices; there are {len(devices)}")
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules to lay tensors out on it."""

    mesh: Mesh
    rules: Rules

    def partition(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """A mesh axis is used once; a dim that its mesh axes do not divide stays whole (2 KV heads on 8 devices)."""
        used: set[str] = set()
        parts: list[tuple[str, ...] | None] = []
        for logical, dim in zip(axes, shape, strict=True):
            names = tuple(n for n in self.rules.axes_of(logical) if n not in used and self.mesh.shape[n] > 1)
            fits = bool(names) and dim % math.prod(self.mesh.shape[n] for n in names) == 0
            parts.append(names if fits else None)
            used.update(names if fits else ())
        return PartitionSpec(*parts)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, self.partition(axes, shape))

    def shardings(self, specs: Any) -> Any:
        return tree_map(lambda s: self.sharding(s.axes, s.shape), specs)

    def size(self, logical: str) -> int:
        return math.prod(self.mesh.shape[n] for n in self.rules.axes_of(logical))


def param_sharding(placement: Placement | None, spec: ParamSpec) -> NamedSharding | None:
    return placement.sharding(spec.axes, spec.shape) if placement else None


def constrain(x: jax.Array, placement: Placement | None, *axes: str | None) -> jax.Array:
    """Pin an activation's layout; without a placement (one device) it is left alone."""
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, placement.sharding(axes, x.shape))
