"""Choose the implementation of an operation by platform, mesh, shape and dtype: of all but products with weights.

The file of an operation has the reference, and asks here for a kernel. A kernel that fails, fails loudly.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Callable
from platform import machine
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.formats import KV_SCALES
from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.capabilities import (
    ARM,
    NVIDIA,
    has_cudnn,
    has_fp8,
    has_numba,
    has_tokamax,
    has_triton,
    is_hopper,
    is_one_gpu,
)
from dovetail.ops.kernels.gpu.needs import why_not_norm, why_not_row, why_not_store
from dovetail.ops.kernels.tpu.needs import (
    heads_here,
    whole,
    why_not_flat,
    why_not_heads,
    why_not_ragged,
    why_not_rows,
    why_not_splash,
)
from dovetail.ops.packed import packed_attention
from dovetail.ops.paged import flat_attention, is_rounded, paged_attention, write_heads
from dovetail.ops.rope import Rope

log = logging.getLogger(__name__)
NAMES_ITSELF = ("splash", "tokamax")  # kernels that name what they give `attention`: named once more it is kept twice
CUDNN_DIM, HOPPER_DIM = 128, 256  # of a head, at most, in packed attention
MASKED_ROW = 8192  # tokens of a row with a mask in memory for cuDNN, at most
FEW_TOKENS = 8  # per sequence: decode, and the verification of drafts
NORM_VALUES = 1 << 18  # of a residual stream that one thread of a CPU normalises, at most: XLA uses all threads

# --- attention --------------------------------------------------------------------------------------------------------


def choose_packed(
    platform: str | None, q: Any, v: Any, softcap: float | None = None, sinks: Any = None, block_mask: bool = False
) -> str:
    """Return the packed implementation for these shapes: 'cudnn', 'splash', 'tokamax' or 'reference'.

    'splash' is upstream's for TPUs, and 'tokamax' its successor, used so far for what upstream's cannot do: the two
    have not been compared on a TPU yet. With `block_mask`, the tokens of an image see each other: 'cudnn' then has a
    mask in memory, so that rows must not be long, and 'tokamax' does not support it.
    """
    platform = platform or jax.default_backend()
    same_dim = q.shape[-1] == v.shape[-1]
    if platform in ("cuda", "gpu") and has_cudnn():
        half = q.dtype in (jnp.bfloat16, jnp.float16)
        fits = not block_mask or (q.shape[1] <= MASKED_ROW and q.shape[1] % 2 == 0)
        known = same_dim and q.shape[-1] <= (HOPPER_DIM if is_hopper() else CUDNN_DIM) and q.shape[-1] % 8 == 0
        if half and known and softcap is None and sinks is None:
            return "cudnn" if fits else "reference"
    if platform != "tpu" or why_not_rows(q):
        return "reference"
    if why_not_splash(q, sinks, block_mask) is None:
        return "splash"
    return "tokamax" if has_tokamax() and not block_mask else "reference"


def choose_paged(
    platform: str | None,
    q: Any,  # [T, N, H], of all devices
    kv_heads: int,
    sinks: jax.Array | None = None,
    placement: Placement | None = None,
    tables: Any = None,
    pages: Any = None,
    block_mask: bool = False,
) -> str:
    """Return the name of the paged implementation for these shapes.

    It is 'mosaic', 'mosaic_decode', 'triton', 'ragged', 'flat', 'numba' or 'reference'. The first two are for prompts
    and for few new tokens per sequence on Hopper, and asked for with tables and pages only. 'ragged' is upstream's for
    TPUs, 'flat' ours. Without tables and pages, those that `page_row` makes are assumed.
    With `block_mask`, the tokens of an image see each other, which all but 'ragged' support.
    """
    platform, H = platform or jax.default_backend(), q.shape[-1]
    if pages is not None and is_rounded(pages) and not reads_rounded(platform, pages.dtype):
        return "reference"
    if platform == "cpu" and q.dtype == jnp.float32 and has_numba():
        return "numba"
    if platform in NVIDIA and H >= 16 and H & (H - 1) == 0:
        if why_not_mosaic_decode(platform, q, placement, tables, pages, block_mask) is None:
            return "mosaic_decode"
        if why_not_mosaic(platform, q, placement, tables, pages, block_mask) is None:
            return "mosaic"
        return "triton" if has_triton() else "reference"
    if platform != "tpu":
        return "reference"
    is_flat = pages is not None and pages.ndim == 3
    if not is_flat and why_not_ragged(q, kv_heads, sinks, placement, tables, block_mask) is None:
        return "ragged"
    return "flat" if why_not_flat(q, kv_heads, placement, tables, pages) is None else "reference"


def reads_rounded(platform: str, dtype: Any) -> bool:
    """Return whether kernels of this platform read pages in a dtype of core.formats.KV_DTYPES.

    Triton converts e4m3 by an instruction of compute capability 8.9.
    """
    return platform in NVIDIA and (has_triton() if dtype == jnp.int8 else has_fp8())


def why_not_mosaic(
    platform: str, q: Any, placement: Placement | None, tables: Any, pages: Any, block_mask: bool
) -> str | None:
    """Return why attention to pages is not left to the kernel for prompts, or None."""
    if not is_one_gpu(platform, placement) or not is_hopper():
        return "not one Hopper GPU"
    if tables is None or (has_triton() and q.shape[0] <= FEW_TOKENS * tables.shape[0]):
        return "few new tokens per sequence"  # Triton's kernel is faster where decode.py cannot run
    from dovetail.ops.kernels.gpu.prompt import why_not_prompt

    return why_not_prompt(q, pages, block_mask)


def why_not_mosaic_decode(
    platform: str, q: Any, placement: Placement | None, tables: Any, pages: Any, block_mask: bool
) -> str | None:
    """Return why attention to pages is not left to the kernel for few new tokens per sequence, or None."""
    if not is_one_gpu(platform, placement) or not is_hopper():
        return "not one Hopper GPU"
    if tables is None or pages is None:
        return "neither tables nor pages"
    from dovetail.ops.kernels.gpu.decode import why_not_decode

    return why_not_decode(q, pages, tables.shape[0], block_mask)


def choose_bidirectional(platform: str | None, q: Any) -> str:
    """Return the implementation of attention in vision towers: 'cudnn' or 'reference'."""
    on_gpu = (platform or jax.default_backend()) in NVIDIA and has_cudnn()
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if on_gpu and half and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0 else "reference"


def choose_self_attention(placement: Placement | None, heads: Any, lengths: Any) -> str:
    """Return how a tower's self-attention runs: 'split' or 'apart'. `heads` is the abstract shape of q, [N, P, K, H].

    Split, the products of q, k, v and o have the columns of our kernel for Hopper. It knows no padding.
    """
    platform = placement.platform if placement else None
    if not is_one_gpu(platform, placement) or not is_hopper() or lengths is not None or heads.dtype != jnp.bfloat16:
        return "apart"
    from dovetail.ops.kernels.gpu.bidirectional import why_not_split

    return "apart" if why_not_split(*heads.shape[1:]) else "split"


def choose_latent(platform: str | None, q: Any, rank: int, ctx: Paged, pages: Any) -> str:
    """Return the implementation for queries [T, N, C] over pages of latents: 'flat' or 'reference'."""
    is_tpu = (platform or jax.default_backend()) == "tpu"
    can = is_tpu and why_not_flat(q, 1, ctx.placement, ctx.block_tables, pages, rank) is None
    return "flat" if can else "reference"


def page_row(
    platform: str | None,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
    has_sinks: bool = False,
    placement: Placement | None = None,
    block_mask: bool = False,
) -> tuple[int, ...]:
    """Return the shape of a token in pages: (2K, H), or one row of whole tiles per device.

    The flat row is for TPUs, where upstream's kernel cannot read (2K, H). It cannot attend with a block mask either,
    and pages have one shape for all steps: such a layer has flat ones, also for steps without an image.
    """
    if (name := jnp.dtype(dtype).name) in KV_SCALES:
        return 2 * kv_heads, head_dim + KV_SCALES[name]
    is_tpu = (platform or jax.default_backend()) == "tpu"
    if not is_tpu or why_not_heads(head_dim, dtype, kv_heads, has_sinks, placement, block_mask) is None:
        return 2 * kv_heads, head_dim
    here, parts = heads_here(kv_heads, placement)
    return (parts * whole(2 * here * head_dim),)


def latent_row(platform: str | None, channels: int) -> tuple[int, ...]:
    """Return the shape of a latent in pages, which all heads and devices share."""
    return (whole(channels),) if (platform or jax.default_backend()) == "tpu" else (1, channels)


def packed_kernel(name: str, gathered: bool = False) -> Callable:
    """Return the packed kernel of this name.

    `gathered` is for queries that are the last of their keys (ops.context).
    """
    if name == "cudnn" and gathered:
        from dovetail.ops.kernels.gpu.packed import gathered_attention as kernel
    elif name == "cudnn":
        from dovetail.ops.kernels.gpu.packed import packed_attention as kernel
    elif name == "splash" and gathered:
        from dovetail.ops.kernels.tpu.packed import gathered_attention as kernel
    elif name == "splash":
        from dovetail.ops.kernels.tpu.packed import packed_attention as kernel
    elif name == "tokamax":
        from dovetail.ops.kernels.tpu.packed import tokamax_attention as kernel
    else:
        kernel = packed_attention
    log_once("packed attention", f"{name}, gathered over context" if gathered else name)
    return kernel


def paged_kernel(name: str, flat_heads: int | None = None) -> Callable:
    """Return the paged kernel of this name; `flat_heads` are the key heads of each device if the pages are flat."""
    if name == "flat":
        assert flat_heads is not None
        from dovetail.ops.kernels.tpu.paged import flat_attention as ours

        kernel = functools.partial(ours, kv_heads=flat_heads)
    elif flat_heads is not None:
        kernel = functools.partial(flat_attention, rows=2 * flat_heads)
    elif name == "mosaic":
        from dovetail.ops.kernels.gpu.prompt import paged_attention as kernel
    elif name == "mosaic_decode":
        from dovetail.ops.kernels.gpu.decode import paged_attention as kernel
    elif name == "triton":
        from dovetail.ops.kernels.gpu.paged import paged_attention as kernel
    elif name == "ragged":
        from dovetail.ops.kernels.tpu.paged import paged_attention as kernel
    elif name == "numba":
        from dovetail.ops.kernels.cpu.paged import paged_attention as kernel
    else:
        kernel = paged_attention
    log_once("paged attention", name)
    return kernel


def store_kernel(ctx: Paged, k: jax.Array, pages: jax.Array) -> Callable:
    """Return the function that writes a layer's new keys and values into its pages."""
    name = choose_paged(ctx.platform, k, k.shape[1], pages=pages)
    if name == "triton":
        from dovetail.ops.kernels.gpu.store import write_heads as kernel
    elif is_hopper() and is_one_gpu(ctx.platform, ctx.placement):  # has not run on a card
        from dovetail.ops.kernels.gpu.mosaic.store_few import write_heads as kernel
    elif name == "numba":
        from dovetail.ops.kernels.cpu.store import write_heads as kernel
    else:
        kernel = write_heads
    return kernel


def rotates_and_stores(
    ctx: Packed | Paged, rope: Rope | None, head_dim: int, norms: str | None, v_norm: bool, dtype: Any = jnp.bfloat16
) -> bool:
    """Return whether one kernel normalises q and k, rotates and stores them.

    It does on one NVIDIA GPU, for heads that are rotated whole and by halves, and normalised each by itself (`norms` is
    not "all") or not at all.
    """
    if isinstance(ctx, Packed) or not is_one_gpu(ctx.platform, ctx.placement):
        return False
    if is_hopper():
        from dovetail.ops.kernels.gpu.mosaic.store_few import why_not_few

        if why_not_few(jax.ShapeDtypeStruct((head_dim,), dtype)):
            return False
    elif not has_triton():
        return False
    if rope is None or norms == "all" or v_norm:
        return False
    return rope.dim == head_dim and not rope.interleaved and head_dim >= 32 and head_dim & (head_dim - 1) == 0


def rotate_store_kernel(qkv: Any, kv_heads: int) -> Callable:
    """Return the kernel that normalises, rotates and stores qkv [T, N + 2K, H] (see `rotates_and_stores`)."""
    if is_hopper() and why_not_store(qkv, kv_heads) is None:
        from dovetail.ops.kernels.gpu.mosaic.store import rotate_store as kernel
    elif is_hopper():
        from dovetail.ops.kernels.gpu.mosaic.store_few import rotate_store as kernel
    else:
        from dovetail.ops.kernels.gpu.store import rotate_store as kernel
    return kernel


# --- norm, loss, sampling ------------------------------------------------------------------------------------


def choose_norm(ctx: Packed | Paged, x: Any) -> str:
    """Return the implementation of the residual add and RMS norm of x [T, D]: a kernel's name or 'reference'.

    The kernels are 'mosaic', 'mosaic_few' and 'triton', and 'numba' for CPUs, which uses one thread.
    """
    if isinstance(ctx, Packed):
        return "reference"
    if (ctx.platform or jax.default_backend()) == "cpu":
        alone = ctx.placement is None or ctx.placement.mesh.size == 1
        serves = alone and x.dtype == jnp.float32 and x.size <= NORM_VALUES and has_numba()
        return "numba" if serves else "reference"
    if not is_one_gpu(ctx.platform, ctx.placement):
        return "reference"
    if is_hopper():
        from dovetail.ops.kernels.gpu.mosaic.norm_few import why_not_few

        if why_not_norm(x) is None:
            return "mosaic"
        if why_not_few(x) is None:
            return "mosaic_few"
    return "triton" if has_triton() else "reference"


def norm_kernel(ctx: Packed | Paged, x: Any) -> Callable | None:
    """Return the kernel that adds to x [T, D] and normalises at once; None for the reference."""
    name = choose_norm(ctx, x)
    if name == "mosaic":
        from dovetail.ops.kernels.gpu.mosaic.norm import add_rms_norm as kernel
    elif name == "mosaic_few":
        from dovetail.ops.kernels.gpu.mosaic.norm_few import add_rms_norm as kernel
    elif name == "triton":
        from dovetail.ops.kernels.gpu.norm import add_rms_norm as kernel
    elif name == "numba":
        from dovetail.ops.kernels.cpu.norm import add_rms_norm as kernel
    else:
        return None
    return kernel


def layer_norm_kernel(placement: Placement | None, x: Any) -> Callable | None:
    """Return the kernel of a residual add and layer norm of x [.., D] with its gradient; None for the reference.

    On Hopper it is in Mosaic GPU: Triton's takes 6% less time there, and 10% less with the gradient, but is deprecated.
    """
    if not is_one_gpu(placement.platform if placement else None, placement):
        return None
    if is_hopper() and why_not_row(x) is None:
        from dovetail.ops.kernels.gpu.mosaic.layer_norm import add_layer_norm as kernel
    elif has_triton():
        from dovetail.ops.kernels.gpu.layer_norm import add_layer_norm as kernel
    else:
        return None
    return kernel


def choose_loss(placement: Placement | None, logits: Any) -> str:
    """Return the implementation of cross entropy and its gradient for logits [.., V], by its name.

    It is 'mosaic', 'triton' or 'reference'.
    """
    if not is_one_gpu(placement.platform if placement else None, placement):
        return "reference"
    if is_hopper() and why_not_row(logits) is None:
        return "mosaic"
    return "triton" if has_triton() else "reference"


def loss_kernel(name: str) -> Callable:
    """Return the kernel of this name: cross entropy and its gradient in one."""
    if name == "mosaic":
        from dovetail.ops.kernels.gpu.mosaic.cross_entropy import cross_entropy_rows as kernel
    else:
        from dovetail.ops.kernels.gpu.cross_entropy import cross_entropy_rows as kernel
    return kernel


def choose_sample(platform: str | None, placement: Placement | None) -> str:
    """Return the implementation of sampling: 'mosaic', 'triton' or 'reference'."""
    if not is_one_gpu(platform, placement):
        return "reference"
    if is_hopper():
        return "mosaic"
    return "triton" if has_triton() else "reference"


def sample_kernel(platform: str | None, placement: Placement | None) -> Callable | None:
    """Return the kernel from logits to tokens and their log-probabilities; None for the reference."""
    name = choose_sample(platform, placement)
    if name == "reference":
        return None
    if name == "mosaic":
        from dovetail.ops.kernels.gpu.mosaic.sample import sample as kernel
    else:
        from dovetail.ops.kernels.gpu.sample import sample as kernel
    log_once("sampling", name)
    return kernel


def import_kernels(platform: str | None, quantized: bool = False) -> None:
    """Register the kernels of engine steps with XLA: a step loaded from disk names them without tracing.

    On Hopper, the import sets the path of the library that a Mosaic kernel is compiled with when its step is loaded.
    The CPU's kernels of quantised weights are compiled for seconds at their first import.
    """
    if (platform or jax.default_backend()) in NVIDIA and is_hopper():
        from dovetail.ops.kernels.gpu import prompt  # noqa: F401
    if (platform or jax.default_backend()) == "cpu" and has_numba():
        for name in itertools.chain.from_iterable(cpu_kernels(quantized)):
            importlib.import_module(name)
    if (platform or jax.default_backend()) in NVIDIA:
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401


def cpu_kernels(quantized: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the modules of a CPU's kernels, in groups that take about as long to compile."""
    second = ("few_rows", *(["packed_rows"] if quantized else []), *(["many_rows"] if machine() in ARM else []))
    groups = ("paged", "norm", "store"), second
    return tuple(tuple(f"dovetail.ops.kernels.cpu.{name}" for name in group) for group in groups)


# --- programs ---------------------------------------------------------------------------------------------------------


def compile_options(platform: str | None, tokens: int) -> dict[str, Any] | None:
    """Return XLA's options for a step of this many tokens.

    XLA's own matrix products are best for a few rows. For more its choice is wrong and takes half the compile time (64
    rows of an 8B model: 10% of a step), and cuBLAS's, which remain, also add the residual stream if it is large (see
    ops.norm).
    """
    on_gpu = (platform or jax.default_backend()) in NVIDIA
    return {"xla_gpu_enable_triton_gemm": False} if on_gpu and tokens > 8 else None


@functools.cache
def log_once(operation: str, name: str) -> None:
    """Log the implementation of an operation, once."""
    log.info("%s: %s", operation, name)
