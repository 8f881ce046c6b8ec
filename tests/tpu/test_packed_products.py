"""Products with 4-bit weights, compiled for TPUs: no weight is unpacked in HBM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dovetail.core.formats import ROUNDED
from dovetail.ops.linear import grouped, matmul
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.weight import Quantized
from dovetail.plan.topology import parse, tpu_devices

BF16 = jnp.dtype("bfloat16")


def a_weight(scheme: str, shape: tuple[int, ...]) -> Quantized:
    arrays = jax.eval_shape(lambda: pack(ROUNDED[scheme], jnp.zeros(shape)))
    return Quantized(arrays, ROUNDED[scheme], BF16, platform="tpu")


def packed_bytes(weight: Quantized) -> int:
    return math.prod(weight.shape[:-1]) * weight.format.row_bytes(weight.shape[-1])


def compiled(topology: str, function: Callable, *args: Any) -> tuple[int, float]:
    """Return the temporary memory of a call on one device, and the bytes that it reads and writes."""
    place = SingleDeviceSharding(tpu_devices(parse(topology))[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    made = jax.jit(function).lower(*args).compile()
    memory, cost = made.memory_analysis(), made.cost_analysis()
    assert memory is not None and cost is not None
    return memory.temp_size_in_bytes, cost["bytes accessed"]


@pytest.mark.tpu
@pytest.mark.parametrize(("scheme", "topology"), [("int4", "v6e:2x2"), ("mxfp4", "v5e:2x2")])
def test_a_matrix_is_not_unpacked_in_memory(libtpu, scheme, topology):
    weight, x = a_weight(scheme, (14336, 4096)), jax.ShapeDtypeStruct((64, 4096), BF16)
    temporary, accessed = compiled(topology, matmul, x, weight)
    assert temporary < packed_bytes(weight) / 8 and accessed < 2 * packed_bytes(weight)


@pytest.mark.tpu
def test_experts_are_not_unpacked_in_memory(libtpu):
    """Compile the shape of GPT-OSS, whose rows of bytes lie across the lanes of a tile."""
    weight, x = a_weight("mxfp4", (32, 5760, 2880)), jax.ShapeDtypeStruct((256, 2880), BF16)
    sizes = jax.ShapeDtypeStruct((32,), jnp.int32)
    temporary, accessed = compiled("v6e:2x2", lambda *args: grouped(*args, platform="tpu"), x, weight, sizes)
    assert temporary < packed_bytes(weight) / 8 and accessed < 1.5 * packed_bytes(weight)
