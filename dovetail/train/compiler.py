"""What XLA is told when it compiles a training step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax

from dovetail.core.chips import chip_of
from dovetail.core.mesh import Placement
from dovetail.ops.dispatch import compile_options

# The sparse cores of these send while the others compute. Without them libtpu (0.0.42, 0.0.48) makes of each gather of
# weights over a torus of three sides an all-reduce, twice the bytes, for which everything waits.
SPARSE_CORES = ("v5p", "TPU7x")
_BY_THEM = "xla_tpu_enable_sparse_core_collective_offload"
BY_SPARSE_CORES: Mapping[str, Any] = {
    f"{_BY_THEM}_all_gather": True,
    f"{_BY_THEM}_2d_all_gather": True,
    f"{_BY_THEM}_3d_all_gather": True,
    f"{_BY_THEM}_all_reduce": True,
    f"{_BY_THEM}_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
}
# Gradients that a loop over layers stacks are summed over devices where the loop ends, and not in every turn.
SUMMED_BEHIND_LOOPS: Mapping[str, Any] = {"xla_while_loop_all_reduce_dus_code_motion_max_size_bytes": 1 << 40}
_UNKNOWN = re.compile(r"No such compile option: '(\w+)'")


def options_of(placement: Placement, platform: str, tokens: int) -> dict[str, Any]:
    """For a step of so many tokens."""
    given = dict(compile_options(platform, tokens) or {})
    mesh = placement.mesh
    if platform != "tpu" or mesh.size == 1:
        return given
    chip = chip_of(mesh.devices.flat[0])
    if chip and chip.name in SPARSE_CORES:
        given |= BY_SPARSE_CORES
    if mesh.size == mesh.shape["data"]:  # cut weights would have to be whole behind the loop
        given |= SUMMED_BEHIND_LOOPS
    return given


def compiled(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """With those of the options that this compiler knows."""
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None or unknown[1] not in options:
            raise
        return compiled(lowered, {name: value for name, value in options.items() if name != unknown[1]})
