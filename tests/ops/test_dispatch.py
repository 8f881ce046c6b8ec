"""What a kernel cannot do is not given to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dovetail.core.types import Packed, Paged
from dovetail.ops.dispatch import choose_paged, rotates_and_stores, why_not_ragged
from dovetail.ops.rope import Rope

NONE = jnp.zeros((1,), jnp.int32)


def paged(platform: str) -> Paged:
    return Paged(NONE[None], NONE, NONE, NONE, platform=platform)


REFUSED = {
    "a part of the head turns": dict(rope=Rope(10_000.0, 32)),
    "neighbouring pairs turn": dict(rope=Rope(10_000.0, 64, interleaved=True)),
    "nothing turns": dict(rope=None),
    "one norm over all heads": dict(norms="all"),
    "values are normed": dict(v_norm=True),
    "a head that is no power of two": dict(rope=Rope(10_000.0, 96), head_dim=96),
    "training": dict(ctx=Packed(NONE[None], platform="cuda")),
    "another platform": dict(ctx=paged("tpu")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_kernel_that_rotates_and_stores(case):
    usual = dict(ctx=paged("cuda"), rope=Rope(10_000.0, 64), head_dim=64, norms="head", v_norm=False)
    assert rotates_and_stores(**usual)
    assert rotates_and_stores(**usual | {"norms": ""})
    assert not rotates_and_stores(**usual | REFUSED[case])


def on_tpu(kind: str = "TPU v5"):
    device = jax.sharding.AbstractDevice(kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def heads(dim: int = 128, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((8, 64, dim), dtype)


@pytest.mark.parametrize(
    "kv_heads, dtype", [(1, "bf16"), (2, "bf16"), (4, "bf16"), (8, "bf16"), (16, "bf16"), (12, "f32")]
)
def test_a_tpu_takes_upstreams_kernel(kv_heads, dtype):
    q = heads(dtype=jnp.bfloat16 if dtype == "bf16" else jnp.float32)
    with on_tpu():
        assert why_not_ragged(q, kv_heads) is None and choose_paged("tpu", q, kv_heads) == "ragged"


@pytest.mark.parametrize(
    "q, kv_heads, sinks, reason",
    [
        (heads(64), 8, None, "multiples of 128 dims, and these have 64"),
        (heads(96), 8, None, "these have 96"),
        (heads(), 8, jnp.zeros(64), "no sinks"),
        (heads(dtype=jnp.float16), 8, None, "float16"),
        *((heads(), number, None, f"cannot tile {number} key heads") for number in (3, 6, 10, 12, 20)),
    ],
)
def test_what_upstreams_kernel_for_tpus_cannot_do_goes_to_the_reference(q, kv_heads, sinks, reason):
    with on_tpu():
        assert reason in (why_not_ragged(q, kv_heads, sinks) or "")
        assert choose_paged("tpu", q, kv_heads, sinks) == "reference"


def test_tpus_before_v4_do_not_take_it():
    for kind in ("TPU v2", "TPU v3"):
        with on_tpu(kind):
            assert "v4" in (why_not_ragged(heads(), 8) or "")
