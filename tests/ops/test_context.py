"""Test rows split along their length over eight devices: the outputs and gradients of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.types import Packed
from dovetail.ops import context, ring
from dovetail.ops.attention import attend
from dovetail.ops.context import is_cut
from dovetail.ops.kernels.gpu.packed import gathered_attention as cudnn
from dovetail.ops.kernels.tpu.packed import gathered_attention as splash
from dovetail.ops.latent import latent_attention
from dovetail.ops.packed import packed_attention

pytestmark = pytest.mark.slow

B, T, N, K, H, SCALE = 4, 48, 4, 2, 8, 0.3
OPTIONS = {
    "causal": {},
    "window within a slice": dict(window=4),
    "window over slices": dict(window=15),
    "soft cap, sinks": dict(softcap=2.0, sinks=True),
    "all": dict(window=20, softcap=3.0, sinks=True),
}
MESHES = {
    "2": dict(context=2, data=4),
    "4": dict(context=4, fsdp=2),
    "8": dict(context=8),
    "mixed": dict(context=2, tensor=2, fsdp=2),
    "fewer key heads than devices": dict(context=2, tensor=4),
}
FAST = [("mixed", "causal"), ("mixed", "all"), ("8", "window within a slice")]
SLOW = [("2", "all"), ("4", "causal"), ("4", "window over slices"), ("8", "soft cap, sinks"), ("8", "all")]
SLOW += [("fewer key heads than devices", "all")]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.thorough) for case in SLOW)]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def documents(rows: int, length: int) -> jax.Array:
    """Segment ids: a row of one document, others of several that end anywhere, padding at the end of the last."""
    ids = np.ones((rows, length), np.int32)
    for row in range(1, rows):
        cuts = np.random.default_rng(row).choice(np.arange(1, length), 3, replace=False)
        ids[row] = 1 + (np.arange(length)[:, None] >= cuts).sum(axis=1)
    ids[-1, -5:] = 0
    return jnp.asarray(ids)


def placed(mesh: str) -> Placement:
    return Placement(make_mesh(MESHES[mesh]), TRAIN)


@pytest.fixture(params=["gather", "ring"])
def way(request, monkeypatch) -> str:
    """Either way; the ring in blocks so small that a slice has several."""
    monkeypatch.setattr(context, "GATHER_BYTES", 0 if request.param == "ring" else 1 << 40)
    monkeypatch.setattr(ring, "BLOCK", 4)
    return request.param


def outputs_and_gradients(run, ids, *given):
    def loss(*given):
        out = run(*given) * (ids > 0)[..., None, None]
        return jnp.sum(jnp.sin(out)), out

    gradients, out = jax.jit(jax.grad(loss, tuple(range(len(given))), has_aux=True))(*given)
    return out, *gradients


def close(ours, theirs, atol=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


@pytest.mark.parametrize(("mesh", "kind"), CASES)
def test_split_rows_equal_whole_rows(mesh, kind, way):
    options = dict(OPTIONS[kind]) | dict(scale=SCALE)
    given = [normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)]
    given += [normal(9, N)] if options.pop("sinks", False) else []
    ids = documents(B, T)

    def ours(q, k, v, sinks=None):
        return attend(Packed(ids, placement=placed(mesh)), q, (k, v), sinks=sinks, **options)

    def theirs(q, k, v, sinks=None):
        return packed_attention(q, k, v, Packed(ids), sinks=sinks, **options)

    close(outputs_and_gradients(ours, ids, *given), outputs_and_gradients(theirs, ids, *given))


@pytest.mark.parametrize("mesh", ["mixed", pytest.param("8", marks=pytest.mark.thorough)])
def test_latents(mesh, way):
    """q_nope, q_rope, the latents, their rotary part, and the weights that expand them: each head's values differ in
    dim from its keys."""
    shapes = (B, T, N, 6), (B, T, N, 4), (B, T, 10), (B, T, 4), (N, 6, 10), (N, 5, 10)
    given, ids = [0.5 * normal(i, *shape) for i, shape in enumerate(shapes)], documents(B, T)

    def run(placement, *given):
        return latent_attention(Packed(ids, placement=placement), None, *given, scale=SCALE)[0]

    both = [outputs_and_gradients(functools.partial(run, p), ids, *given) for p in (placed(mesh), None)]
    close(*both)


def test_a_length_that_the_axis_does_not_divide_is_not_split():
    placement, ids = placed("8"), documents(2, 20)
    assert not is_cut(placement, 20) and not is_cut(None, 24) and is_cut(placement, 24)
    q, k, v = normal(0, 2, 20, N, H), normal(1, 2, 20, K, H), normal(2, 2, 20, K, H)
    ours = attend(Packed(ids, placement=placement), q, (k, v), scale=SCALE)
    np.testing.assert_allclose(ours, packed_attention(q, k, v, Packed(ids), scale=SCALE), atol=1e-6)


def test_a_device_gathers_what_its_window_reaches():
    def reach(window: int | None) -> int:
        return context.slices_of(placed("4"), 48, window).reach  # slices of 12

    assert [reach(w) for w in (None, 1, 2, 13, 14, 25, 26, 40, 1000)] == [3, 0, 1, 1, 2, 2, 3, 3, 3]


def test_the_ring_is_used_where_gathering_is_too_large():
    placement = placed("mixed")  # rows over 2 devices, heads over 2, slices over 2

    def way(rows: int, length: int, heads: int = 8, window: int | None = None) -> str:
        k = jax.ShapeDtypeStruct((rows, length, heads, 128), jnp.bfloat16)  # 512 bytes a head and token
        return context.choose_way(placement, k, k, window)

    assert way(2, 262_144) == "gather"  # 1 row, 4 heads: 512 MiB
    assert way(2, 262_144 + 2) == "ring"
    assert way(4, 262_144) == "ring"
    assert way(2, 262_144, heads=9) == "ring", "heads that cannot be dealt out"
    assert way(2, 1 << 20, window=4096) == "ring"
    assert context.choose_way(placed("8"), *[jax.ShapeDtypeStruct((1, 1 << 19, 8, 128), jnp.bfloat16)] * 2, 4096) == (
        "gather"
    ), "two slices of eight"


KERNELS = {
    "splash": functools.partial(splash, interpret=True),
    "cudnn": functools.partial(cudnn, implementation="xla"),  # the same call, answered where cuDNN is not
}


@pytest.mark.parametrize("kind", ["causal", "window over slices"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_for_the_last_queries(kernel, kind):
    """Where the queries are the last 128 of 256 keys."""
    options = OPTIONS[kind] | dict(scale=SCALE)
    q, k, v = normal(0, 2, 128, N, H), normal(1, 2, 256, K, H), normal(2, 2, 256, K, H)
    key_ids = documents(2, 256)
    ids = key_ids[:, 128:]

    def run(kernel):
        packed = functools.partial(kernel, ctx=Packed(ids), key_segments=key_ids, **options)
        return outputs_and_gradients(packed, ids, q, k, v)

    close(run(KERNELS[kernel]), run(packed_attention), atol=1e-4)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators(platform, way):
    """With its gradient, for a machine that is not here; on a TPU the gathered way is upstream's kernel."""
    q, k, v = (jax.ShapeDtypeStruct((4, 512, heads, 64), jnp.bfloat16) for heads in (N, K, K))
    placement = placed("mixed")

    def loss(q, k, v, ids):
        return jnp.sum(attend(Packed(ids, platform, placement), q, (k, v), scale=SCALE).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v, jax.ShapeDtypeStruct((4, 512), jnp.int32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("tpu_custom_call" in text) == (platform == "tpu" and way == "gather")
    assert ("all_gather" in text) == (way == "gather")
    assert ("collective_permute" in text) == (way == "ring")


def test_gathered_keys_are_not_saved_for_the_backward_pass(way):
    """A device keeps what it has of q, k, v and the output, and gathers again: else a layer would hold whole rows."""
    q, k, v = normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)
    ctx = Packed(documents(B, T), placement=placed("8"))
    pull = jax.eval_shape(lambda *qkv: jax.vjp(lambda q, k, v: attend(ctx, q, (k, v), scale=SCALE), *qkv)[1], q, k, v)
    kept = sum(x.size for x in jax.tree.leaves(pull))
    assert k.size < kept < 1.2 * (2 * q.size + k.size + v.size)
