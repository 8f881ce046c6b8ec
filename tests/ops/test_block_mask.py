"""Attention in which the tokens of an image see each other: packed, paged and on a CPU, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from later import later

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.types import Packed, Paged
from dovetail.ops.dispatch import choose_packed, choose_paged, page_row
from dovetail.ops.kernels.gpu.paged import paged_attention as triton_attention
from dovetail.ops.kernels.tpu import needs
from dovetail.ops.kernels.tpu import packed as splash
from dovetail.ops.kernels.tpu.paged import flat_attention
from dovetail.ops.packed import on_mesh, packed_attention
from dovetail.ops.paged import paged_attention, write_heads

pytestmark = pytest.mark.slow

numba = later("dovetail.ops.kernels.cpu.paged")
T, N, K, H, PAGE = 300, 4, 2, 16, 8
IMAGES = ((5, 25), (26, 30), (120, 280))  # where each image starts and ends
WINDOWS = [None, 9]
BLOCKS = splash.blocks
THOROUGH = pytest.mark.thorough


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, KEYS, VALUES = normal(0, T, N, H), normal(1, T, K, H), normal(2, T, K, H)
IDS, LAST = np.zeros(T, np.int32), np.arange(T, dtype=np.int32)
for number, (start, end) in enumerate(IMAGES, 1):
    IDS[start:end], LAST[start:end] = number, end - 1


def expected(window: int | None) -> np.ndarray:
    """[T, N, H] by the definition: (causal or of one image) and within the window."""
    q, k = np.arange(T)[:, None], np.arange(T)
    visible = (k <= q) | ((IDS[:, None] == IDS) & (IDS > 0))
    visible &= (k > q - window) if window else True
    keys, values = np.repeat(KEYS, N // K, axis=1), np.repeat(VALUES, N // K, axis=1)
    scores = np.where(visible, np.einsum("qnh,knh->nqk", Q, keys) * 0.3, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nqk,knh->qnh", weights / weights.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("window, tokens", [(None, 160), (9, None)])
def test_packed(window, tokens):
    ctx = Packed(jnp.ones((1, T), jnp.int32), image_ids=jnp.asarray(IDS[None]), image_tokens=tokens)
    got = jax.jit(lambda ctx: packed_attention(Q[None], KEYS[None], VALUES[None], ctx, scale=0.3, window=window))(ctx)
    np.testing.assert_allclose(got[0], expected(window), atol=1e-5)


@pytest.mark.parametrize("window", [pytest.param(None, marks=THOROUGH), 50])
def test_splash(window, monkeypatch):
    """The TPU kernel, interpreted: outputs and gradients on two rows of two documents, and several blocks of each."""
    monkeypatch.setattr(splash, "blocks", lambda T: dict.fromkeys(BLOCKS(T), 128))
    q, k, v = (jnp.asarray(normal(seed, 2, 384, heads, H)) for seed, heads in ((0, N), (1, K), (2, K)))
    images, segments = np.zeros((2, 384), np.int32), np.repeat([[1, 2]], 192, axis=1)
    for row, number, start, end in ((0, 1, 3, 150), (0, 2, 150, 160), (0, 3, 250, 384), (1, 1, 200, 270)):
        images[row, start:end] = number
    ctx = Packed(jnp.asarray(np.repeat(segments, 2, axis=0)), image_ids=jnp.asarray(images))

    def outputs_and_gradients(run):
        def loss(*qkv):
            out = run(*qkv, ctx, scale=0.3, window=window)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    ours = outputs_and_gradients(functools.partial(splash.packed_attention, interpret=True))
    for got, want in zip(*map(jax.tree.leaves, (ours, outputs_and_gradients(packed_attention))), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.thorough
def test_splash_on_a_mesh():
    """Each device has the images of its rows."""
    placement = Placement(make_mesh(dict(data=2, tensor=2), jax.devices()[:4]), TRAIN)
    q, k, v = (jnp.asarray(normal(seed, 2, 128, heads, H)) for seed, heads in ((0, N), (1, K), (2, K)))
    ids = jnp.asarray(np.stack([IDS[:128], IDS[100:228]]))
    ctx = Packed(jnp.ones((2, 128), jnp.int32), placement=placement, image_ids=ids)
    run = jax.jit(
        functools.partial(on_mesh, functools.partial(splash.packed_attention, interpret=True), ctx=ctx, scale=0.3)
    )
    np.testing.assert_allclose(run(q, k, v), packed_attention(q, k, v, ctx, scale=0.3), atol=1e-5)


def triton(ctx: Paged, q, pages, **options):
    return triton_attention(ctx, q, pages, block=32, interpret=True, **options)


def flat(ctx: Paged, q, pages, **options):
    return flat_attention(ctx, q, pages, kv_heads=K, interpret=pltpu.InterpretParams(), **options)


def numba_attention(*args, **options):
    return numba.paged_attention(*args, **options)


CHUNKS = ((0, 3), (3, 27 + 3), (30, 31), (31, 290), (290, 291), (291, T))


@pytest.mark.parametrize(
    "attention, chunks", [(paged_attention, ((0, 30), (30, T))), (numba_attention, CHUNKS)], ids=["reference", "numba"]
)
@pytest.mark.parametrize("window", WINDOWS)
def test_paged_in_chunks_that_hold_whole_images(window, attention, chunks):
    np.testing.assert_allclose(in_chunks(attention, (2 * K, H), chunks, window), expected(window), atol=1e-5)


@pytest.mark.parametrize(
    "attention, row, window",
    [(triton, (2 * K, H), None), (flat, (128,), 9)]
    + [pytest.param(triton, (2 * K, H), 9, marks=THOROUGH), pytest.param(flat, (128,), None, marks=THOROUGH)],
)
def test_kernels_of_accelerators(attention, row, window, monkeypatch):
    monkeypatch.setattr(needs, "KEYS", 2 * PAGE)  # several blocks of keys
    got = in_chunks(attention, row, ((0, 26), (26, 49)), window)
    np.testing.assert_allclose(got, expected(window)[: len(got)], atol=1e-5)


def in_chunks(attention, row: tuple[int, ...], chunks, window: int | None) -> np.ndarray:
    """[tokens, N, H] of a prompt in chunks, each with whole images; what no token wrote is NaN."""
    pages, got = jnp.full((40, PAGE, *row), jnp.nan), []
    tables = jnp.asarray(np.random.default_rng(3).permutation(40)[None].astype(np.int32))
    write, run = jax.jit(write_heads), jax.jit(functools.partial(attention, scale=0.3, window=window))
    for start, end in chunks:
        ctx = Paged(tables, jnp.asarray([end]), jnp.asarray([0, end - start]), jnp.ones(1, jnp.int32))
        pages = write(ctx, pages, KEYS[start:end], VALUES[start:end])
        ctx = Paged(tables, ctx.kv_lens, ctx.cu_q_lens, ctx.num_seqs, last_seen=jnp.asarray(LAST[start:end]))
        got.append(run(ctx, Q[start:end], pages))
    return np.concatenate(got)


def test_choices():
    rows, heads = (jax.ShapeDtypeStruct((*one, 32, 128), jnp.bfloat16) for one in ((1, 1024), (1024,)))
    assert choose_packed("tpu", rows, rows, block_mask=True) == "splash"
    assert choose_packed("cpu", rows, rows, block_mask=True) == "reference"
    assert choose_paged("cuda", heads, 8, block_mask=True) == "triton"
    assert choose_paged("cpu", jax.ShapeDtypeStruct(heads.shape, jnp.float32), 8, block_mask=True) == "numba"
    device = jax.sharding.AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert choose_paged("tpu", heads, 8) == "ragged"
        assert choose_paged("tpu", heads, 8, block_mask=True) == "flat"
        assert page_row("tpu", 8, 128, jnp.bfloat16) == (16, 128)
        assert page_row("tpu", 8, 128, jnp.bfloat16, block_mask=True) == (2048,)
