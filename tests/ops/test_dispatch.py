"""Test that dispatch gives a kernel only what it supports."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.types import Packed, Paged
from dovetail.ops import dispatch, dispatch_products
from dovetail.ops.capabilities import has_tokamax
from dovetail.ops.describe import TPU_CASES, describe, describe_tpu
from dovetail.ops.dispatch import choose_paged, page_row, rotates_and_stores
from dovetail.ops.kernels.tpu.needs import ROOM, why_not_flat, why_not_ragged
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
        (heads(), 8, jnp.zeros(64), "support sinks"),
        *((heads(), number, None, f"cannot tile {number} key heads") for number in (3, 6, 10, 12, 20)),
    ],
)
def test_our_tpu_kernel_is_used_where_upstreams_cannot_be(q, kv_heads, sinks, reason):
    with on_tpu():
        assert reason in (why_not_ragged(q, kv_heads, sinks) or "")
        assert choose_paged("tpu", q, kv_heads, sinks) == "flat"


def test_the_reference_is_used_where_no_tpu_kernel_can_be():
    half = heads(dtype=jnp.float16)
    with on_tpu():
        assert "float16" in (why_not_ragged(half, 8) or "") and "float16" in (why_not_flat(half, 8) or "")
        assert choose_paged("tpu", half, 8) == "reference"
    for kind in ("TPU v2", "TPU v3"):
        with on_tpu(kind):
            assert "v4" in (why_not_ragged(heads(), 8) or "") and "v4" in (why_not_flat(heads(), 8) or "")
            assert choose_paged("tpu", heads(), 8) == "reference"
    assert "none is known" in (why_not_flat(heads(64), 8) or "")


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "page, tables, reason",
    [
        (array(9, 16, 16, 64), array(4, 9), "made for another kernel"),
        (array(9, 8, 1024), array(4, 9), "multiples of 16 tokens, and these have 8"),
        (array(9, 4096, 1024), array(4, 9), "MiB of VMEM, and a core has 16.0"),
        (array(9, 128, 1024), array(4, 2**16), "MiB of SMEM, and a core has 1.0"),
    ],
)
def test_pages_that_our_tpu_kernel_refuses(page, tables, reason):
    q = array(64, 16, 64)
    with on_tpu("TPU v4"):
        assert why_not_flat(q, 8, None, array(4, 9), array(9, 128, 1024)) is None
        assert reason in (why_not_flat(q, 8, None, tables, page) or "")
        assert choose_paged("tpu", q, 8, None, None, tables, page) == "reference"


def test_a_page_table_too_large_for_upstreams_kernel():
    with on_tpu():
        assert why_not_ragged(heads(), 8, None, None, array(256, 512)) is None
        assert "1.0 MiB of SMEM" in (why_not_ragged(heads(), 8, None, None, array(256, 1024)) or "")


@pytest.mark.parametrize(
    "kv_heads, dim, sinks, row",
    [(8, 128, False, (16, 128)), (8, 64, False, (1024,)), (1, 80, False, (256,)), (3, 128, False, (768,)),
     (8, 128, True, (2048,)), (1, 256, False, (2, 256)), (4, 256, False, (2048,))],  # Mosaic refuses several of 256
)  # fmt: skip
def test_pages_of_a_tpu_are_laid_out_for_the_kernel_that_reads_them(kv_heads, dim, sinks, row):
    assert page_row("tpu", kv_heads, dim, jnp.bfloat16, sinks) == row
    assert page_row("cuda", kv_heads, dim, jnp.bfloat16, sinks) == (2 * kv_heads, dim)


def test_flat_pages_have_whole_tiles_on_each_device_of_a_mesh():
    placement = Placement(make_mesh({"tensor": 4}, jax.devices()[:4]), SERVE)
    assert page_row("tpu", 4, 80, jnp.bfloat16, False, placement) == (4 * 256,)
    assert page_row("tpu", 3, 80, jnp.bfloat16, False, placement) == (512,)  # three heads stay together


def test_the_memory_of_a_core_equals_jaxs():
    for name, room in ROOM.items():
        version = pltpu.ChipVersion[f"TPU_{name.upper().replace('TPU', '')}"]
        cores = 1 if name in ("v2", "v3", "TPU7x") else version.num_physical_tensor_cores_per_chip
        info = pltpu.get_tpu_info_for_chip(version, cores)
        assert room == (info.smem_capacity_bytes, info.vmem_capacity_bytes), name


def test_the_table_of_kernels_gives_reasons():
    rows = describe_tpu()
    assert len(rows) == len(TPU_CASES) * len(ROOM)
    for what, generation, packed, paged, why in rows:
        has_kernel = generation not in ("v2", "v3") and what != "f16"
        assert (paged != "reference") == has_kernel, (what, generation)
        assert (packed != "reference") == (has_kernel and (not what.startswith("sinks") or has_tokamax()))
        assert ("packed: " in why) == (packed != "splash") and ("paged: " in why) == (paged != "ragged")


def small(name: str, *shape: int, dtype=jnp.bfloat16) -> str:
    """Return the kernel, in Mosaic or Triton, that dispatch chooses for x, qkv or logits of this shape."""
    x = array(*shape, dtype=dtype)
    kernel = {
        "norm": lambda: dispatch.norm_kernel(paged("cuda"), x),
        "store": lambda: dispatch.rotate_store_kernel(x, 8),
        "loss": lambda: dispatch.loss_kernel(dispatch.choose_loss(None, x)),
    }[name]()
    return kernel.__module__.rpartition(".")[2] if ".mosaic." in kernel.__module__ else "triton"


@pytest.mark.parametrize(
    "name, shape, on_hopper",
    [
        ("norm", (64, 1024), "norm"), ("norm", (64, 4096), "norm_few"), ("norm", (8192, 4096), "norm"),
        ("norm", (8192, 2880), "norm_few"), ("store", (64, 32, 128), "store"), ("store", (1, 32, 128), "store_few"),
        ("store", (64, 32, 64), "store_few"), ("store", (64, 26, 128), "store_few"),
        ("loss", (1024, 151_936), "cross_entropy"), ("loss", (1024, 50_257), "triton"),
    ],
)  # fmt: skip
def test_small_kernels_are_in_mosaic_on_hopper(monkeypatch, name, shape, on_hopper):
    monkeypatch.setattr(dispatch, "is_one_gpu", lambda *_: True)
    assert small(name, *shape) == "triton"
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    assert small(name, *shape) == on_hopper
    if name != "store":
        assert small(name, *shape, dtype=jnp.float16) == "triton"


@pytest.mark.slow
def test_info_says_which_backend_runs_and_why(monkeypatch):
    def rows() -> dict[str, str]:
        return {operation: name for operation, platform, name in describe() if platform == "cuda"}

    assert rows()["loss"] == "triton (no NVIDIA GPU here)"
    monkeypatch.setattr(dispatch.jax, "devices", lambda: [SimpleNamespace(compute_capability="8.0", platform="gpu")])
    assert rows()["norm"] == "triton (compute capability 8.0)"
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    assert rows()["rotation and store"] == rows()["sampling"] == "mosaic"
    assert rows()["loss"].startswith("mosaic; triton for ")


def test_without_triton_there_are_mosaic_and_the_references(monkeypatch):
    for module in (dispatch, dispatch_products):
        monkeypatch.setattr(module, "has_triton", lambda: False)
    monkeypatch.setattr(dispatch, "is_one_gpu", lambda *_: True)
    ctx, x, rope = paged("cuda"), array(64, 1024), Rope(10_000.0, 128)
    assert choose_paged("cuda", heads(), 8) == "reference"
    assert dispatch_products.grouped_kernel("cuda", x, array(8, 1024, 1024)) is None
    assert dispatch.sample_kernel("cuda", None) is None and not rotates_and_stores(ctx, rope, 128, "head", False)
    assert dispatch.norm_kernel(ctx, x) is None and dispatch.layer_norm_kernel(None, x) is None
    assert dispatch.choose_loss(None, x) == "reference"
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    assert dispatch.choose_norm(ctx, x) == dispatch.choose_loss(None, x) == "mosaic"
    assert dispatch.layer_norm_kernel(None, x).__module__.endswith("mosaic.layer_norm")
    assert dispatch.choose_sample("cuda", None) == "mosaic"


def test_sampling_is_in_mosaic_on_hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "is_one_gpu", lambda *_: True)
    assert dispatch.choose_sample("cuda", None) == "triton"
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    assert dispatch.sample_kernel("cuda", None).__module__.endswith("mosaic.sample")
