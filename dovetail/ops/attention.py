"""Attention, the one place where training and serving differ.

`store` takes a layer's new keys and values, `attend` looks at what was stored. In a Packed context the store is the
keys and values themselves; in a Paged one it is the layer's pages with the new tokens written. Which implementation
runs is chosen here alone, by platform and shape; an implementation that fails, fails loudly.

B rows, T queries, S keys, N query heads, K key heads, G = N / K, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged, is_one_gpu
from dovetail.ops.paged import paged_attention, write_heads
from dovetail.ops.rope import Rope
from dovetail.ops.softmax import cap_and_mask, is_visible

log = logging.getLogger(__name__)


def store(ctx: Packed | Paged, entry: Any, k: jax.Array, v: jax.Array) -> Any:
    if isinstance(ctx, Packed):
        return k, v
    if choose_paged(ctx.platform, k) == "triton":
        from dovetail.ops.kernels.gpu.store import write_heads as write
    else:
        write = write_heads
    heads, pages = split_heads(ctx.placement, k.shape[1])
    return _per_device(write, ctx, (entry, k, v), (pages, heads, heads), pages)


def takes_whole(ctx: Packed | Paged, rope: Rope, head_dim: int) -> bool:
    """Whether `rotate_store` is there for these: one NVIDIA GPU, and whole heads that turn by halves."""
    if isinstance(ctx, Packed) or not is_one_gpu(ctx.platform, ctx.placement):
        return False
    return rope.dim == head_dim and not rope.interleaved and head_dim >= 32 and head_dim & (head_dim - 1) == 0


def rotate_store(
    ctx: Packed | Paged,
    entry: Any,
    qkv: jax.Array,
    tables: tuple,
    norms: tuple[jax.Array, jax.Array] | None,
    eps: float,
    offset: float,
) -> tuple[jax.Array, Any]:
    """(q [T, N, H], what was stored) from qkv [T, N + 2K, H]: the norms of q and k, the rotation and `store` in one."""
    from dovetail.ops.kernels.gpu.rotate_store import rotate_store as kernel

    assert isinstance(ctx, Paged), "see takes_whole"
    return kernel(ctx, entry, qkv, tables, norms, eps, offset)


def attend(
    ctx: Packed | Paged,
    q: jax.Array,
    stored: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """q [..., N, H] -> [..., N, H of the values]. `sinks` [N] are logits that take weight and give nothing."""
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if isinstance(ctx, Paged):
        name = choose_paged(ctx.platform, q, sinks, ctx.placement)
        log_once("paged", name)
        run = _paged_implementation(name)
        heads, pages = split_heads(ctx.placement, stored.shape[2] // 2)
        del options["sinks"]
        run = functools.partial(run, **options)
        given, specs = (
            ((q, stored), (heads, pages)) if sinks is None else ((q, stored, sinks), (heads, pages, P(heads[1])))
        )
        return _per_device(
            lambda ctx, q, stored, sinks=None: run(ctx, q, stored, sinks=sinks), ctx, given, specs, heads
        )
    k, v = stored
    if is_cut(ctx.placement, q.shape[1]):
        from dovetail.ops.context import context_attention

        return context_attention(q, k, v, ctx, **options)
    name = choose_packed(ctx.platform, q, v, softcap, sinks)
    log_once("packed", name)
    run = _packed_implementation(name)
    # XLA splits the others itself
    return on_mesh(run, q, k, v, ctx, **options) if name == "splash" else run(q, k, v, ctx, **options)


def is_cut(placement: Placement | None, length: int) -> bool:
    """Whether rows of this length lie in slices over the mesh's context axis."""
    return placement is not None and placement.partition(("length",), (length,))[0] is not None


def split_heads(placement: Placement | None, num_kv_heads: int) -> tuple[P, P]:
    """How [T, heads, H] and pages [P, page, 2K, H] lie on a mesh: by head, where its key heads can be dealt out."""
    fits = placement is not None and num_kv_heads % placement.size("kv_heads") == 0
    axis = placement.rules.axes_of("kv_heads") if fits and placement else None
    return P(None, axis, None), P(None, None, axis, None)


def _per_device(run: Callable, ctx: Paged, arrays: tuple, specs: tuple[P, ...], out: P) -> jax.Array:
    """Call what knows one device on each of a mesh, with its heads."""
    placement = ctx.placement
    if placement is None or placement.mesh.size == 1:
        return run(ctx, *arrays)
    alone = dataclasses.replace(ctx, placement=None)
    whole = jax.tree.map(lambda _: P(), alone)
    mapped = jax.shard_map(run, mesh=placement.mesh, in_specs=(whole, *specs), out_specs=out, check_vma=False)
    return mapped(alone, *arrays)


def on_mesh(run: Callable, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Packed, **options: Any) -> jax.Array:
    """Run a packed kernel that knows one device on a mesh of them: each gets its rows and its heads."""
    placement = ctx.placement
    if placement is None or placement.mesh.size == 1:
        return run(q, k, v, ctx, **options)
    axes = ("batch", None, "heads", None)
    k, v = keys_of_heads(placement, q, k, v)
    specs = [placement.partition(axes, x.shape) for x in (q, k, v)]

    def local(q, k, v, segment_ids):
        return run(q, k, v, Packed(segment_ids, ctx.platform), **options)

    rows = placement.partition(("batch", None), ctx.segment_ids.shape)
    mapped = jax.shard_map(local, mesh=placement.mesh, in_specs=(*specs, rows), out_specs=specs[0], check_vma=False)
    return mapped(q, k, v, ctx.segment_ids)


def keys_of_heads(placement: Placement, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """k and v, their heads repeated where a device that gets a part of the queries' heads would not get their keys'."""
    if q.shape[2] % placement.size("heads") or k.shape[2] % placement.size("kv_heads") == 0:
        return k, v
    return jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)


def choose_packed(
    platform: str | None, q: Any, v: Any, softcap: float | None = None, sinks: jax.Array | None = None
) -> str:
    """The packed implementation for these shapes: 'cudnn', 'splash' or 'reference'."""
    platform = platform or jax.default_backend()
    same_dim = q.shape[-1] == v.shape[-1]
    if platform in ("cuda", "gpu") and _has_cudnn():
        half = q.dtype in (jnp.bfloat16, jnp.float16)
        if half and same_dim and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0 and softcap is None and sinks is None:
            return "cudnn"
    if platform == "tpu" and same_dim and q.shape[1] % 128 == 0 and sinks is None:
        return "splash"
    return "reference"


def choose_paged(
    platform: str | None, q: Any, sinks: jax.Array | None = None, placement: Placement | None = None
) -> str:
    """The paged implementation for these shapes: 'triton', 'ragged' (upstream's for TPUs), 'numba' or 'reference'."""
    platform, H = platform or jax.default_backend(), q.shape[-1]
    if platform == "cpu" and q.dtype == jnp.float32 and _has_numba():
        return "numba"
    if platform in ("cuda", "gpu") and H >= 16 and H & (H - 1) == 0:
        return "triton"
    if platform == "tpu" and H % 128 == 0 and sinks is None and _knows_tpu(placement):
        return "ragged"
    return "reference"


def _knows_tpu(placement: Placement | None) -> bool:
    """Upstream's kernel is lowered for one kind of TPU: that of the mesh, of the context, or of this machine."""
    if placement is not None:
        return placement.platform == "tpu"
    context = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() == "tpu" or "TPU" in getattr(context, "device_kind", "")


def describe() -> list[tuple[str, str, str]]:
    """(context, platform, implementation) for a usual shape, as `dovetail info` shows it."""
    q = jax.ShapeDtypeStruct((1, 1024, 32, 128), jnp.bfloat16)
    rows = [("Packed", platform, choose_packed(platform, q, q)) for platform in ("cpu", "cuda", "tpu")]
    whole = jax.ShapeDtypeStruct(q.shape, jnp.float32)  # what a CPU computes in
    paged = [("cpu", choose_paged("cpu", whole)), *((name, choose_paged(name, q)) for name in ("cuda", "tpu"))]
    return rows + [("Paged", *row) for row in paged]


def _paged_implementation(name: str):
    if name == "triton":
        from dovetail.ops.kernels.gpu.paged import paged_attention as implementation
    elif name == "ragged":
        from dovetail.ops.kernels.tpu.paged import paged_attention as implementation
    elif name == "numba":
        from dovetail.ops.kernels.cpu.paged import paged_attention as implementation
    else:
        implementation = paged_attention
    return implementation


def _packed_implementation(name: str):
    if name == "cudnn":
        from dovetail.ops.kernels.gpu.packed import packed_attention as implementation
    elif name == "splash":
        from dovetail.ops.kernels.tpu.packed import packed_attention as implementation
    else:
        implementation = packed_attention
    return implementation


@functools.cache
def _has_cudnn() -> bool:
    """cuDNN's call is built against the library that is loaded: it cannot be lowered where there is none."""
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def log_once(context: str, name: str) -> None:
    log.info("%s attention: %s", context, name)


def packed_attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]; S is T without `key_segments`
    v: jax.Array,  # [B, S, K, Hv]
    ctx: Packed,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    key_segments: jax.Array | None = None,  # [B, S]
) -> jax.Array:
    """The exact reference. Queries go in chunks that see only the keys they may reach, so scores are never [T, T].

    With `key_segments` there are S >= T keys and the queries are the last T of them (ops.context)."""
    T = q.shape[1]
    key_segments = ctx.segment_ids if key_segments is None else key_segments
    before = key_segments.shape[1] - T
    chunk = max(128, -(-T // 16))  # small enough for a core's cache, few enough to compile
    # A chunk's probabilities are computed again in the backward pass, not kept: memory stays linear in T.
    one = jax.checkpoint(functools.partial(_attend_chunk, scale=scale, window=window, softcap=softcap))
    outputs = []
    for start in range(0, T, chunk):
        rows = slice(start, min(start + chunk, T))
        keys = slice(max(0, before + start - window + 1) if window else 0, before + rows.stop)
        positions = before + jnp.arange(rows.start, rows.stop), jnp.arange(keys.start, keys.stop)
        segments = ctx.segment_ids[:, rows], key_segments[:, keys]
        outputs.append(one(q[:, rows], k[:, keys], v[:, keys], segments, positions, sinks))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def _attend_chunk(q, k, v, segments, positions, sinks, **options):
    return attend_block(q, k, v, segments, positions, sinks, **options)[0].astype(v.dtype)


def attend_block(q, k, v, segments, positions, sinks=None, *, scale, window, softcap) -> tuple[jax.Array, jax.Array]:
    """Some queries over some keys: (out [B, T, N, H], log of the softmax's denominator [B, T, N]), both f32.

    `segments` ([B, T], [B, S]) and `positions` ([T], [S]) are the queries' and the keys'."""
    B, T, N, H = q.shape
    K, G = k.shape[2], N // k.shape[2]
    # a key head's queries are rows of one product, [T * G, H] @ [H, S]: many small products would be far slower
    q_rows = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    scores = jnp.einsum("bkrh,bskh->bkrs", q_rows, k, preferred_element_type=jnp.float32) * scale
    visible = is_visible(positions[0][:, None], positions[1], window)
    visible = visible & (segments[0][:, :, None] == segments[1][:, None, :])  # [B, T, S]
    scores = cap_and_mask(scores.reshape(B, K, T, G, -1), visible[:, None, :, None], softcap)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(K, 1, G, 1)
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    rows = weights.reshape(B, K, T * G, -1).astype(v.dtype)
    out = jnp.einsum("bkrs,bskh->bkrh", rows, v, preferred_element_type=jnp.float32)
    # divided last: the output is smaller than the scores
    out = (out.reshape(B, K, T, G, -1) / total).transpose(0, 2, 1, 3, 4).reshape(B, T, N, -1)
    return out, (top + jnp.log(total))[..., 0].transpose(0, 2, 1, 3).reshape(B, T, N)
