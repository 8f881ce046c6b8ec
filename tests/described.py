"""Descriptions of devices that this machine does not have, to lower programs for."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dovetail.core.mesh import MESH_AXES

TRITON = "The Pallas Triton backend is deprecated"
GPU = AbstractDevice("NVIDIA H200", num_cores=1, platform="gpu")


@contextlib.contextmanager
def a_device(platform: str):
    """Describe a kind of GPU: jax 0.12 lowers kernels for one; without it, the device must be described.

    On a GPU most kernels are in Triton, of which jax warns since 0.11 (tests/ops/test_gpu_kernels.py). That is expected
    within this context, and an error in all other tests.
    """
    if platform != "cuda":
        yield
        return
    mesh = AbstractMesh((), (), abstract_device=GPU)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", TRITON, DeprecationWarning)
        yield


def a_mesh(axes: Mapping[str, int]) -> Any:
    """Of such GPUs."""
    sizes = tuple(axes.get(name, 1) for name in MESH_AXES)
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=GPU)
