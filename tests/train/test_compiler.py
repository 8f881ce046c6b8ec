"""Test the compiler options of a training step: only known ones, and only where they help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.train.prepare import BY_SPARSE_CORES, SUMMED_BEHIND_LOOPS, compiled, options_of


def placement(kind: str, **axes: int) -> Any:
    size = int(np.prod(list(axes.values())))
    devices = np.asarray([SimpleNamespace(device_kind=kind, platform="tpu") for _ in range(size)])
    return SimpleNamespace(mesh=SimpleNamespace(size=size, shape={"data": 1, **axes}, devices=devices))


def test_options_unknown_to_the_compiler_are_left_out():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    run = compiled(lowered, {"xla_of_another_year": True, "xla_cpu_enable_fast_math": False, "xla_nor_this": 3})
    assert run(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_wrong_value_is_an_error():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_enable_fast_math"):
        compiled(lowered, {"xla_cpu_enable_fast_math": "perhaps"})


@pytest.mark.parametrize(("kind", "sparse"), [("TPU v5", True), ("TPU7x", True), ("TPU v6 lite", False)])
def test_weights_are_gathered_by_sparse_cores_where_there_are_some(kind, sparse):
    found = options_of(placement(kind, fsdp=8), "tpu", 4096)
    assert found == (dict(BY_SPARSE_CORES) if sparse else {})


def test_gradient_sums_overlap_loops_where_weights_are_replicated():
    assert options_of(placement("TPU v5 lite", data=4), "tpu", 4096) == dict(SUMMED_BEHIND_LOOPS)
    assert options_of(placement("TPU v5 lite", data=2, fsdp=2), "tpu", 4096) == {}


def test_one_device_has_no_collective_options():
    assert options_of(placement("TPU v5", data=1), "tpu", 4096) == {}
