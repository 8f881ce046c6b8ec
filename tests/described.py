"""Descriptions of devices that this machine does not have, to lower programs for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dovetail.core.mesh import MESH_AXES

GPU = AbstractDevice("NVIDIA H200", num_cores=1, platform="gpu")


def a_device(platform: str):
    """jax 0.12 lowers kernels for a kind of GPU, which a machine without one must be told of."""
    if platform != "cuda":
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU))


def a_mesh(axes: Mapping[str, int]) -> Any:
    """Of such GPUs."""
    sizes = tuple(axes.get(name, 1) for name in MESH_AXES)
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=GPU)
