"""The engine's steps of every family with default options, lowered for a TPU without libtpu: their shapes pass our
checks and the kernels' own, and no layer's attention is the reference."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from tpu.families import FAMILIES

from dovetail.core.compute import compute_of
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import abstract
from dovetail.engine.build import AbstractEngine, programs_for
from dovetail.engine.options import EngineOptions
from dovetail.engine.pages import pages_that_fit
from dovetail.models.publish import serving_spec
from dovetail.models.registry import parse_config

KIND = AbstractDevice("TPU v6 lite", num_cores=1, platform="tpu")
CORNERS = [("llama3.1-8b", 8), ("deepseek-v2-lite", 1), ("gpt-oss-20b", 8)]
MATRIX = [(name, tensor) for name in FAMILIES for tensor in (1, 8)]
ALL = [*CORNERS, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MATRIX if case not in CORNERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor"), ALL)
def test_lowered(name, tensor):
    made, mesh = steps(name, tensor)
    for shape in made.corners()[1:]:
        program = made.programs.of(shape, made.params, made.programs.pages(made.pages))
        with jax.sharding.use_abstract_mesh(mesh):
            chosen = made.kernels(shape)
            text = (
                program.function.trace(*program.abstract, **program.static).lower(lowering_platforms=("tpu",)).as_text()
            )
        assert chosen and not any(kernel.startswith("reference") for kernel in chosen), shape
        for kernel in ("ragged", "flat"):
            called = f'kernel_name = "{kernel}_paged_attention' in text
            assert called == any(each.startswith(kernel) for each in chosen), shape


def steps(name: str, tensor: int) -> tuple[AbstractEngine, AbstractMesh]:
    cfg, options = (
        parse_config(dict(FAMILIES[name])),
        EngineOptions(tensor_parallel_size=tensor, kv_cache_memory_bytes=2**30),
    )
    mesh = mesh_of(tensor)
    placement = Placement(mesh, SERVE) if tensor > 1 else None  # type: ignore[arg-type]
    with jax.sharding.use_abstract_mesh(mesh):
        programs = replace(programs_for(cfg, options, compute_of("bf16"), placement, KIND), absent=None)
        params = abstract(serving_spec(programs.cfg, placement), jnp.bfloat16)
        return AbstractEngine(programs, params, pages_that_fit(programs, params, options)), mesh


def mesh_of(tensor: int) -> AbstractMesh:
    """Of one device none of the axes, as `Programs.device_kind` has it."""
    like = make_mesh({"tensor": 1}, jax.devices()[:1])
    axes, kinds = ({**like.shape, "tensor": tensor}, like.axis_types) if tensor > 1 else ({}, ())
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds, abstract_device=KIND)
