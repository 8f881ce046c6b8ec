"""Choose the implementation of an operation by platform, mesh, shape and dtype; nothing else does.

The file of an operation has the reference, and asks here for a kernel. A kernel that fails, fails loudly. `describe`
lists the choices, as `dovetail info` shows them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from platform import machine
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from dovetail.core.chips import CHIPS
from dovetail.core.formats import KV_SCALES, Format
from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.kernels.gpu.needs import why_not_norm, why_not_row, why_not_store
from dovetail.ops.kernels.tpu.needs import (
    heads_here,
    room_of,
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
NVIDIA = ("cuda", "gpu")
ARM = ("aarch64", "arm64")
NAMES_ITSELF = ("splash", "tokamax")  # kernels that name what they give `attention`: named once more it is kept twice
CUDNN_DIM, HOPPER_DIM = 128, 256  # of a head, at most, in packed attention
MASKED_ROW = 8192  # tokens of a row with a mask in memory for cuDNN, at most
FEW_TOKENS = 8  # per sequence: decode, and the verification of drafts
X86 = ("x86_64", "amd64")
# Most rows of a product that `few_rows` takes, by CPU. On Arm `many_rows` is faster from 8 rows on. On x86 XLA's own is
# faster from about 24 rows on, and `many_rows`, whose vectors hold four numbers, never is.
FEW_ROWS = {**dict.fromkeys(ARM, 7), **dict.fromkeys(X86, 16)}

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
    if platform in ("cuda", "gpu") and _has_cudnn():
        half = q.dtype in (jnp.bfloat16, jnp.float16)
        fits = not block_mask or (q.shape[1] <= MASKED_ROW and q.shape[1] % 2 == 0)
        known = same_dim and q.shape[-1] <= (HOPPER_DIM if _is_hopper() else CUDNN_DIM) and q.shape[-1] % 8 == 0
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
    if platform == "cpu" and q.dtype == jnp.float32 and _has_numba():
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

    Triton converts e4m3 by an instruction of compute capability 8.9. A kernel has the same loads and products as for
    plain pages; of the conversions the compiled code was read, and no speed measured.
    """
    return platform in NVIDIA and (dtype == jnp.int8 or _has_fp8())


def why_not_mosaic(
    platform: str, q: Any, placement: Placement | None, tables: Any, pages: Any, block_mask: bool
) -> str | None:
    """Return why attention to pages is not left to the kernel for prompts, or None.

    It replaces the one in Triton once an engine has run with it on a card: so far it was measured alone.
    """
    if has_triton():
        return "Triton's kernel is there"
    if not is_one_gpu(platform, placement) or not _is_hopper():
        return "not one Hopper GPU"
    if tables is None or q.shape[0] <= FEW_TOKENS * tables.shape[0]:
        return "few new tokens per sequence"
    from dovetail.ops.kernels.gpu.prompt import why_not_prompt

    return why_not_prompt(q, pages, block_mask)


def why_not_mosaic_decode(
    platform: str, q: Any, placement: Placement | None, tables: Any, pages: Any, block_mask: bool
) -> str | None:
    """Return why attention to pages is not left to the kernel for few new tokens per sequence, or None."""
    if not unmeasured():
        return "not measured on a card"
    if not is_one_gpu(platform, placement) or not _is_hopper():
        return "not one Hopper GPU"
    if tables is None or pages is None:
        return "neither tables nor pages"
    from dovetail.ops.kernels.gpu.decode import why_not_decode

    return why_not_decode(q, pages, tables.shape[0], block_mask)


def choose_bidirectional(platform: str | None, q: Any) -> str:
    """Return the implementation of attention in vision towers: 'cudnn' or 'reference'."""
    on_gpu = (platform or jax.default_backend()) in NVIDIA and _has_cudnn()
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if on_gpu and half and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0 else "reference"


def choose_self_attention(placement: Placement | None, heads: Any, lengths: Any) -> str:
    """Return how a tower's self-attention runs: 'split' or 'apart'. `heads` is the abstract shape of q, [N, P, K, H].

    Split, the products of q, k, v and o have the columns of our kernel for Hopper. It knows no padding.
    """
    platform = placement.platform if placement else None
    if not is_one_gpu(platform, placement) or not _is_hopper() or lengths is not None or heads.dtype != jnp.bfloat16:
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
    if choose_paged(ctx.platform, k, k.shape[1], pages=pages) == "triton":
        from dovetail.ops.kernels.gpu.store import write_heads as kernel

        return kernel
    return write_heads


def rotates_and_stores(ctx: Packed | Paged, rope: Rope | None, head_dim: int, norms: str | None, v_norm: bool) -> bool:
    """Return whether one kernel normalises q and k, rotates and stores them.

    It does on one NVIDIA GPU, for heads that are rotated whole and by halves, and normalised each by itself (`norms` is
    not "all") or not at all.
    """
    if isinstance(ctx, Packed) or not is_one_gpu(ctx.platform, ctx.placement) or not has_triton():
        return False
    if rope is None or norms == "all" or v_norm:
        return False
    return rope.dim == head_dim and not rope.interleaved and head_dim >= 32 and head_dim & (head_dim - 1) == 0


def rotate_store_kernel(qkv: Any, kv_heads: int) -> Callable:
    """Return the kernel that normalises, rotates and stores qkv [T, N + 2K, H] (see `rotates_and_stores`)."""
    if _is_hopper() and why_not_store(qkv, kv_heads) is None:
        from dovetail.ops.kernels.gpu.mosaic.store import rotate_store as kernel
    else:
        from dovetail.ops.kernels.gpu.store import rotate_store as kernel
    return kernel


# --- norm, experts, loss, sampling ------------------------------------------------------------------------------------


def choose_norm(ctx: Packed | Paged, x: Any) -> str:
    """Return the implementation of the residual add and RMS norm of x [T, D]: 'mosaic', 'triton' or 'reference'."""
    if isinstance(ctx, Packed) or not is_one_gpu(ctx.platform, ctx.placement):
        return "reference"
    if _is_hopper() and why_not_norm(x) is None:
        return "mosaic"
    return "triton" if has_triton() else "reference"


def norm_kernel(ctx: Packed | Paged, x: Any) -> Callable | None:
    """Return the kernel that adds to x [T, D] and normalises at once; None for the reference."""
    name = choose_norm(ctx, x)
    if name == "mosaic":
        from dovetail.ops.kernels.gpu.mosaic.norm import add_rms_norm as kernel
    elif name == "triton":
        from dovetail.ops.kernels.gpu.norm import add_rms_norm as kernel
    else:
        return None
    return kernel


def layer_norm_kernel(placement: Placement | None, x: Any) -> Callable | None:
    """Return the kernel of a residual add and layer norm of x [.., D] with its gradient; None for the reference.

    The one in Mosaic GPU takes 6% longer on Hopper, and 10% with the gradient.
    """
    if not is_one_gpu(placement.platform if placement else None, placement):
        return None
    if has_triton():
        from dovetail.ops.kernels.gpu.layer_norm import add_layer_norm as kernel
    elif _is_hopper() and why_not_row(x) is None:
        from dovetail.ops.kernels.gpu.mosaic.layer_norm import add_layer_norm as kernel
    else:
        return None
    return kernel


def choose_grouped(platform: str | None, rows: Any, w: Any) -> str:
    """Return the product of rows [M, in], in groups, with w [E, out, in]: 'mosaic' (Hopper), 'triton' or 'xla'.

    XLA's would run every expert on every row on a GPU.
    """
    if (platform or jax.default_backend()) not in NVIDIA:
        return "xla"
    if _is_hopper() and rows.dtype == w.dtype:
        from dovetail.ops.kernels.gpu.grouped_hopper import why_not_hopper

        if why_not_hopper(len(rows), *w.shape[1:], w.dtype) is None:
            return "mosaic"
    return "triton" if has_triton() else "xla"


def grouped_kernel(platform: str | None, rows: Any, w: Any) -> Callable | None:
    """Return the grouped matmul; None for XLA's."""
    name = choose_grouped(platform, rows, w)
    if name == "xla":
        return None
    if name == "mosaic":
        from dovetail.ops.kernels.gpu.grouped_hopper import grouped_matmul as kernel
    else:
        from dovetail.ops.kernels.gpu.grouped import grouped_matmul as kernel
    log_once("experts", name)
    return kernel


def experts_kernel(x: Any, params: Any, glu: Any, platform: str | None, placement: Placement | None) -> Callable | None:
    """Return the kernel from the routed tokens of a step, x [T, D], to their outputs; None for grouped products."""
    if not is_one_gpu(platform, placement) or not _is_hopper():
        return None
    from dovetail.ops.kernels.gpu.experts import few_token_experts, why_not_few_tokens

    if why_not_few_tokens(x, params, glu):
        return None
    log_once("experts of few tokens", "mosaic")
    return few_token_experts


def choose_product(x: Any, w: Any) -> str:
    """Return the implementation of x [rows, in] times w [out, in] on a CPU: 'few_rows', 'many_rows' or 'xla'."""
    if why_not_ours(x, w):
        return "xla"
    return "few_rows" if x.shape[0] <= FEW_ROWS[machine().lower()] else "many_rows"


def why_not_ours(x: Any, w: Any) -> str | None:
    """Return why a product is left to XLA, or None.

    XLA takes several times as long for two rows as for one, on Arm and on x86; with many rows it reaches three quarters
    of the peak of an Arm CPU.
    """
    cpu = machine().lower()
    if cpu not in FEW_ROWS:
        return f"not measured on {cpu}"
    if not _has_numba():
        return "numba is not installed"
    if not x.dtype == w.dtype == jnp.float32:
        return "not f32"
    if x.ndim != 2:  # a training step's may be split over devices, which our kernels do not support
        return "x is not a matrix"
    return f"more than {FEW_ROWS[cpu]} rows" if cpu in X86 and x.shape[0] > FEW_ROWS[cpu] else None


def product_kernel(name: str) -> Callable:
    """Return the CPU's product of this name."""
    if name == "few_rows":
        from dovetail.ops.kernels.cpu.few_rows import few_rows_matmul as kernel
    else:
        from dovetail.ops.kernels.cpu.many_rows import many_rows_matmul as kernel
    return kernel


def quantized_kernel(
    form: Format, x: Any, platform: str | None, placement: Placement | None
) -> Callable[[jax.Array, Any, Any], jax.Array] | None:
    """Return the product of x [..., in] with a quantised matrix [out, in] in this format; None for the reference.

    A kernel is called with x, the matrix (ops.quant.weight.Quantized) and the dtype of the result.
    """
    if form.name == "w8a8":
        from dovetail.ops.quant.rounded import int8_matmul

        return int8_matmul
    if form.name == "fp8" and not form.group and (platform or jax.default_backend()) in NVIDIA and _has_fp8():
        from dovetail.ops.quant.rounded import fp8_matmul

        return fp8_matmul
    if why_not_packed(form, x, platform, placement):
        return None
    from dovetail.ops.kernels.cpu.packed_rows import packed_rows_matmul

    exact = not form.activations
    return lambda x, weight, out_dtype: packed_rows_matmul(x, weight, out_dtype, exact)


def why_not_packed(form: Format, x: Any, platform: str | None, placement: Placement | None) -> str | None:
    """Return why no kernel multiplies x by packed weights, or None."""
    if (platform or jax.default_backend()) != "cpu":
        return "only on CPUs"
    if placement is not None and placement.mesh.size > 1:
        return "several devices"
    if machine().lower() not in FEW_ROWS or not _has_numba():
        return "numba is not installed, or the CPU is not known"
    if x.dtype != jnp.float32 or x.ndim != 2:
        return "x is not a matrix of f32"
    from dovetail.ops.kernels.cpu.packed_rows import why_not_packed as why

    return why(form, x.shape[-1])


def reads_blocks(dtype: Any, placement: Placement | None) -> bool:
    """Return whether products in this dtype read the blocks of a .gguf file as they are."""
    x = jax.ShapeDtypeStruct((1, 256), dtype)
    return why_not_packed(Format("q4_1"), x, placement.platform if placement else None, placement) is None


def quantized_grouped_kernel(
    form: Format, rows: Any, platform: str | None, placement: Placement | None
) -> Callable[[jax.Array, Any, jax.Array], jax.Array] | None:
    """Return the grouped product with quantised experts [E, out, in] in this format; None for the reference.

    A kernel is called with the rows [M, in], the experts (ops.quant.weight.Quantized) and the sizes of the groups; on a
    mesh with the arrays of one device.
    """
    if why_not_packed(form, rows, platform, placement):
        return None
    from dovetail.ops.kernels.cpu.packed_rows import packed_grouped_matmul

    return functools.partial(packed_grouped_matmul, exact=not form.activations)


def choose_loss(placement: Placement | None, logits: Any) -> str:
    """Return the implementation of cross entropy and its gradient for logits [.., V], by its name.

    It is 'mosaic', 'triton' or 'reference'.
    """
    if not is_one_gpu(placement.platform if placement else None, placement):
        return "reference"
    if _is_hopper() and why_not_row(logits) is None:
        return "mosaic"
    return "triton" if has_triton() else "reference"


def loss_kernel(name: str) -> Callable:
    """Return the kernel of this name: cross entropy and its gradient in one."""
    if name == "mosaic":
        from dovetail.ops.kernels.gpu.mosaic.cross_entropy import cross_entropy_rows as kernel
    else:
        from dovetail.ops.kernels.gpu.cross_entropy import cross_entropy_rows as kernel
    return kernel


def sample_kernel(platform: str | None, placement: Placement | None) -> Callable | None:
    """Return the kernel from logits to tokens and their log-probabilities; None for the reference."""
    if not is_one_gpu(platform, placement) or not has_triton():
        return None
    from dovetail.ops.kernels.gpu.sample import sample

    return sample


def import_kernels(platform: str | None, quantized: bool = False) -> None:
    """Register the kernels of engine steps with XLA: a step loaded from disk names them without tracing.

    On Hopper, the import sets the path of the library that a Mosaic kernel is compiled with when its step is loaded.
    The CPU's kernels of quantised weights are compiled for seconds at their first import.
    """
    if (platform or jax.default_backend()) in NVIDIA and _is_hopper():
        from dovetail.ops.kernels.gpu import prompt  # noqa: F401
    if (platform or jax.default_backend()) == "cpu" and _has_numba():
        from dovetail.ops.kernels.cpu import few_rows, paged  # noqa: F401

        if quantized:
            from dovetail.ops.kernels.cpu import packed_rows  # noqa: F401

        if machine() in ARM:
            from dovetail.ops.kernels.cpu import many_rows  # noqa: F401
    if (platform or jax.default_backend()) in NVIDIA:
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401


# --- what is there ----------------------------------------------------------------------------------------------------


def compile_options(platform: str | None, tokens: int) -> dict[str, Any] | None:
    """Return XLA's options for a step of this many tokens.

    XLA's own matrix products are best for a few rows. For more its choice is wrong and takes half the compile time (64
    rows of an 8B model: 10% of a step), and cuBLAS's, which remain, also add the residual stream if it is large (see
    ops.norm).
    """
    on_gpu = (platform or jax.default_backend()) in NVIDIA
    return {"xla_gpu_enable_triton_gemm": False} if on_gpu and tokens > 8 else None


def unmeasured() -> bool:
    """Return whether kernels that have not been measured on a card may be chosen (`DOVETAIL_UNMEASURED_KERNELS=1`)."""
    return os.environ.get("DOVETAIL_UNMEASURED_KERNELS") == "1"


def is_one_gpu(platform: str | None, placement: Placement | None) -> bool:
    """Return whether a call runs on a single NVIDIA GPU: our kernels there support one device."""
    return (platform or jax.default_backend()) in NVIDIA and (placement is None or placement.mesh.size == 1)


@functools.cache
def _has_cudnn() -> bool:
    """Return whether cuDNN is loaded: its call is built against the library and cannot be lowered without it."""
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache
def _is_hopper() -> bool:
    """Return whether the devices are of compute capability 9.0: kernels with its instructions run on no other."""
    return all(getattr(device, "compute_capability", "") == "9.0" for device in jax.devices())


@functools.cache
def _has_fp8() -> bool:
    """Return whether the devices multiply fp8 numbers: compute capability 8.9 and later."""
    found = [getattr(device, "compute_capability", "0.0") for device in jax.devices()]
    return all(tuple(map(int, each.split("."))) >= (8, 9) for each in found)


@functools.cache
def has_triton() -> bool:
    """Return whether Pallas has its Triton dialect, which JAX deprecates since 0.11 and will remove."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def has_tokamax() -> bool:
    """Return whether tokamax, the `kernels` extra with further kernels for TPUs, is installed."""
    return importlib.util.find_spec("tokamax") is not None


@functools.cache
def log_once(operation: str, name: str) -> None:
    """Log the implementation of an operation, once."""
    log.info("%s: %s", operation, name)


def describe() -> list[tuple[str, str, str]]:
    """Return (operation, platform, implementation) for a usual shape and one device."""
    q = jax.ShapeDtypeStruct((1, 1024, 32, 128), jnp.bfloat16)
    whole = jax.ShapeDtypeStruct(q.shape, jnp.float32)  # what a CPU computes in
    few, many = (jax.ShapeDtypeStruct((rows, 128), jnp.float32) for rows in (1, 1024))
    rows = []
    for platform in ("cpu", "cuda", "tpu"):
        heads = whole if platform == "cpu" else q
        rows += [
            ("packed attention", platform, choose_packed(platform, heads, heads)),
            ("paged attention", platform, _paged(platform, heads)),
            ("attention with a block mask", platform, _block_mask(platform, heads)),
            ("bidirectional attention", platform, _bidirectional(platform, heads)),
            ("latent attention, paged", platform, "flat" if platform == "tpu" else "reference"),
            ("products", platform, _products(few, many) if platform == "cpu" else "xla"),
            ("quantised products", platform, _quantized_products(platform, few)),
            ("experts", platform, _experts(platform)),
            *((operation, platform, name) for operation, name in _small_kernels(platform).items()),
        ]
    return sorted(rows, key=lambda row: row[0])


def _experts(platform: str) -> str:
    """Return the grouped product of experts with usual dims."""
    rows, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 2048), (64, 1024, 2048)))
    name = choose_grouped(platform, rows, w)
    return {"xla": "ragged_dot", "mosaic": "mosaic; triton for f32 and dims that are not multiples of 64"}.get(
        name, name
    )


def _paged(platform: str, q: Any) -> str:
    """Return the paged attention of decode steps, and that of prompts where it is another one."""
    found = [choose_paged(platform, q, 8)]
    if platform in NVIDIA and _is_hopper():
        found += ["mosaic for few tokens per sequence"] if unmeasured() else []
        found += [] if has_triton() else ["mosaic for prompts"]
    return "; ".join(found)


def _small_kernels(platform: str) -> dict[str, str]:
    """Return the implementations of norms, rotation and store, loss and sampling, and why they are not Mosaic's."""
    names, rest = ("norm", "rotation and store", "loss", "layer norm", "sampling"), "reference"
    if not is_one_gpu(platform, None):
        return dict.fromkeys(names, rest)
    rest = "triton" if has_triton() else rest
    if why := _why_not_hopper():
        return dict.fromkeys(names, f"{rest} ({why})")
    x, qkv = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 4096), (1, 48, 128)))
    found = {"norm": f"mosaic; {rest} for {why_not_norm(x)}", "loss": "mosaic", "sampling": f"{rest} (no other kernel)"}
    if not has_triton():
        return found | {"rotation and store": rest, "layer norm": "mosaic"}
    stored = f"mosaic; triton for {why_not_store(qkv, 8)}"
    return found | {"rotation and store": stored, "layer norm": "triton (faster than mosaic)"}


def _why_not_hopper() -> str | None:
    """Return why kernels for Hopper cannot run here, or None."""
    found = {getattr(device, "compute_capability", None) for device in jax.devices()}
    if _is_hopper():
        return None
    return "no NVIDIA GPU here" if found == {None} else f"compute capability {', '.join(sorted(map(str, found)))}"


def _bidirectional(platform: str, q: Any) -> str:
    """Return the attention of towers, and that of heads of 72 dims where it is another one."""
    usual = choose_bidirectional(platform, q)
    return f"{usual}; mosaic for heads of 65 to 80 dims" if platform in NVIDIA and _is_hopper() else usual


def _block_mask(platform: str, q: Any) -> str:
    """Return the packed and the paged attention of image tokens that see each other."""
    packed = choose_packed(platform, q, q, block_mask=True)
    paged = choose_paged(platform, q, 8, block_mask=True)
    return f"{packed} (packed), {paged} (paged)"


def _products(few: Any, many: Any) -> str:
    """Return the products of few rows and many rows on this CPU, and why not our kernels."""
    if why := why_not_ours(few, few):
        return f"xla ({why})"
    return f"numba; xla for {why}" if (why := why_not_ours(many, few)) else "numba"


def _quantized_products(platform: str, x: Any) -> str:
    """Return the products of this platform with quantised weights."""
    if why_not_packed(Format("q4_1"), x, platform, None) is None:
        return "numba for int8, int4 and GGUF blocks; xla for w8a8"
    fp8 = quantized_kernel(Format("fp8"), x, platform, None) is not None
    return f"xla for {'w8a8 and fp8' if fp8 else 'w8a8'}; reference for others"


# what: (query heads, key heads of a device, head dim, its option)
TPU_CASES: dict[str, tuple[int, int, int, str]] = {
    "heads of 64 (Llama 3.2 1B)": (32, 8, 64, ""),
    "heads of 64, 3 key heads (SmolLM2)": (9, 3, 64, ""),
    "heads of 80": (32, 32, 80, ""),
    "heads of 96 (Phi-3)": (32, 32, 96, ""),
    "heads of 128 (Llama, Qwen, Mistral)": (32, 8, 128, ""),
    "heads of 128, 1 key head": (4, 1, 128, ""),
    "heads of 128, 10 key heads (Phi-4)": (40, 10, 128, ""),
    "heads of 256 (Gemma)": (16, 8, 256, ""),
    "sinks (GPT-OSS)": (64, 8, 64, "sinks"),
    "images whose tokens see each other (Gemma 3 27B)": (32, 16, 128, "images"),
    "latents (DeepSeek)": (16, 1, 576, "latent"),
    "f16": (32, 8, 128, "f16"),
}


def describe_tpu() -> list[tuple[str, str, str, str, str]]:
    """Return (what, generation, packed kernel, paged kernel, why no better one), for steps of 256 sequences."""
    rows = []
    for name, chip in CHIPS.items():
        if room_of(chip.kinds[0]) is None:  # a GPU, or a TPU of which too little is known
            continue
        device = AbstractDevice(chip.kinds[0], num_cores=1, platform="tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            rows += [(what, name, *_on_tpu(*case)) for what, case in TPU_CASES.items()]
    return sorted(rows, key=lambda row: row[0])


def _on_tpu(N: int, K: int, H: int, option: str) -> tuple[str, str, str]:
    """Return (packed, paged, why) on the TPU of the context."""
    dtype, rank = jnp.dtype("float16" if option == "f16" else "bfloat16"), 512 if option == "latent" else None
    sinks = jax.ShapeDtypeStruct((N,), dtype) if option == "sinks" else None
    q, long, tables = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((256, N, H), (1, 1024, N, H), (256, 512)))
    masked = option == "images"
    row = latent_row("tpu", H) if rank else page_row("tpu", K, H, dtype, sinks is not None, block_mask=masked)
    flat = why_not_flat(q, K, None, tables, jax.ShapeDtypeStruct((1, 128, *row), dtype), rank)
    ragged = "it does not support latents" if rank else why_not_ragged(q, K, sinks, None, tables, masked)
    packed = choose_packed("tpu", long, long, None, sinks, masked)
    paged = "ragged" if ragged is None else "flat" if flat is None else "reference"
    whys = {"packed": why_not_splash(long, sinks), "paged": flat if paged == "reference" else ragged}
    return packed, paged, "; ".join(f"{context}: {why}" for context, why in whys.items() if why)
