"""Which implementation of an operation runs: chosen here alone, by platform, mesh, shape and dtype.

An operation's own file has the reference, and asks here for a kernel in its place. A kernel that fails, fails loudly.
`describe` lists the choices, as `dovetail info` shows them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from platform import machine
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.packed import packed_attention
from dovetail.ops.paged import paged_attention, write_heads
from dovetail.ops.rope import Rope

log = logging.getLogger(__name__)
NVIDIA = ("cuda", "gpu")
FEW_ROWS = 64  # of a product on an Arm CPU: up to here ours was faster than XLA's

# --- attention --------------------------------------------------------------------------------------------------------


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
    platform: str | None,
    q: Any,  # [T, N, H], of all devices
    kv_heads: int,
    sinks: jax.Array | None = None,
    placement: Placement | None = None,
) -> str:
    """The paged implementation for these shapes: 'triton', 'ragged' (upstream's for TPUs), 'numba' or 'reference'."""
    platform, H = platform or jax.default_backend(), q.shape[-1]
    if platform == "cpu" and q.dtype == jnp.float32 and _has_numba():
        return "numba"
    if platform in ("cuda", "gpu") and H >= 16 and H & (H - 1) == 0:
        return "triton"
    if platform == "tpu" and why_not_ragged(q, kv_heads, sinks, placement) is None:
        return "ragged"
    return "reference"


def why_not_ragged(
    q: Any, kv_heads: int, sinks: jax.Array | None = None, placement: Placement | None = None
) -> str | None:
    """What upstream's kernel for TPUs cannot do of this; None: it can do it all."""
    parts = placement.mesh.shape.get("tensor", 1) if placement else 1
    here = kv_heads // parts if kv_heads % parts == 0 else kv_heads  # on each device
    rows, odd = divmod(2 * here, 4 // q.dtype.itemsize)  # of keys and values, in words of 32 bits
    reasons = {
        f"it takes heads of multiples of 128 dims, and these have {q.shape[-1]}": q.shape[-1] % 128 != 0,
        "it knows no sinks": sinks is not None,
        f"it takes bf16 and f32, and this is {q.dtype}": q.dtype not in (jnp.bfloat16, jnp.float32),
        f"it cannot tile {here} key heads on a device: in bf16 1, 2, 4 or a multiple of 8": (
            odd > 0 or not (rows in (1, 2, 4, 8) or rows % 8 == 0)
        ),
        "its memory is too much for this chip: it was argued for v4 and later": not _knows_tpu(placement),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def packed_kernel(name: str, gathered: bool = False) -> Callable:
    """`gathered`: for queries that are the last of their keys (ops.context)."""
    if name == "cudnn" and gathered:
        from dovetail.ops.kernels.gpu.context import packed_attention as kernel
    elif name == "cudnn":
        from dovetail.ops.kernels.gpu.packed import packed_attention as kernel
    elif name == "splash" and gathered:
        from dovetail.ops.kernels.tpu.context import packed_attention as kernel
    elif name == "splash":
        from dovetail.ops.kernels.tpu.packed import packed_attention as kernel
    else:
        kernel = packed_attention
    log_once("packed attention", f"{name}, gathered over context" if gathered else name)
    return kernel


def paged_kernel(name: str) -> Callable:
    if name == "triton":
        from dovetail.ops.kernels.gpu.paged import paged_attention as kernel
    elif name == "ragged":
        from dovetail.ops.kernels.tpu.paged import paged_attention as kernel
    elif name == "numba":
        from dovetail.ops.kernels.cpu.paged import paged_attention as kernel
    else:
        kernel = paged_attention
    log_once("paged attention", name)
    return kernel


def store_kernel(ctx: Paged, k: jax.Array) -> Callable:
    """What writes a layer's new keys and values into its pages."""
    if choose_paged(ctx.platform, k, k.shape[1]) == "triton":
        from dovetail.ops.kernels.gpu.store import write_heads as kernel

        return kernel
    return write_heads


def rotates_and_stores(ctx: Packed | Paged, rope: Rope | None, head_dim: int, norms: str | None, v_norm: bool) -> bool:
    """Whether one kernel norms q and k, rotates and stores them: on one NVIDIA GPU, for whole heads that turn by halves
    and are normed each by itself (`norms` is not "all") or not at all."""
    if isinstance(ctx, Packed) or not is_one_gpu(ctx.platform, ctx.placement):
        return False
    if rope is None or norms == "all" or v_norm:
        return False
    return rope.dim == head_dim and not rope.interleaved and head_dim >= 32 and head_dim & (head_dim - 1) == 0


# --- norm, experts, loss, sampling ------------------------------------------------------------------------------------


def norm_kernel(ctx: Packed | Paged) -> Callable | None:
    """Addition and norm in one; None: the reference."""
    if isinstance(ctx, Packed) or not is_one_gpu(ctx.platform, ctx.placement):
        return None
    from dovetail.ops.kernels.gpu.norm import add_rms_norm

    return add_rms_norm


def grouped_kernel(platform: str | None) -> Callable | None:
    """Rows in groups by each group's weights; None: XLA's, which on a GPU would run every expert on every row."""
    if (platform or jax.default_backend()) not in NVIDIA:
        return None
    from dovetail.ops.kernels.gpu.grouped import grouped_matmul

    return grouped_matmul


def few_rows(x: Any, w: Any) -> bool:
    """Whether, compiled for a CPU, a product is one of few_rows_kernel: x [rows, in] and w [out, in] in f32, on an Arm
    CPU, where XLA takes several times as long for two rows as for one."""
    if x.ndim != 2 or x.shape[0] > FEW_ROWS or not x.dtype == w.dtype == jnp.float32:
        return False
    return machine() in ("aarch64", "arm64") and _has_numba()


def few_rows_kernel(x: jax.Array, w: jax.Array) -> jax.Array:
    from dovetail.ops.kernels.cpu.few_rows import few_rows_matmul

    return few_rows_matmul(x, w)


def has_loss_kernel(placement: Placement | None) -> bool:
    """Whether cross entropy and its gradient are one kernel."""
    return is_one_gpu(placement.platform if placement else None, placement)


def sample_kernel(platform: str | None, placement: Placement | None) -> Callable | None:
    """From logits to tokens and their log-probabilities; None: the reference."""
    if not is_one_gpu(platform, placement):
        return None
    from dovetail.ops.kernels.gpu.sample import sample

    return sample


def import_kernels(platform: str | None) -> None:
    """Those that engine steps call, made known to XLA: a step that was kept compiled names them and traces nothing."""
    if (platform or jax.default_backend()) == "cpu" and _has_numba():
        from dovetail.ops.kernels.cpu import few_rows, paged  # noqa: F401


# --- what is there ----------------------------------------------------------------------------------------------------


def compile_options(platform: str | None, tokens: int) -> dict[str, Any] | None:
    """XLA's, for a step of so many tokens. Its own matrix products win for a few rows. For more its choice is wrong and
    half the compile time (64 rows of an 8B model: 10% of a step), and cuBLAS's, which are left, also add the
    residual stream where it is large (see ops.norm)."""
    on_gpu = (platform or jax.default_backend()) in NVIDIA
    return {"xla_gpu_enable_triton_gemm": False} if on_gpu and tokens > 8 else None


def is_one_gpu(platform: str | None, placement: Placement | None) -> bool:
    """Whether a call runs on a single NVIDIA GPU: our kernels there know one device."""
    return (platform or jax.default_backend()) in NVIDIA and (placement is None or placement.mesh.size == 1)


def _knows_tpu(placement: Placement | None) -> bool:
    """Upstream's kernel is lowered for one kind of TPU, v4 or later: that of the mesh, the context, or this machine."""
    if placement is not None:
        return placement.platform == "tpu" and _is_recent(placement.mesh.devices.flat[0].device_kind)
    context = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(context, "device_kind", "")
    if not kind and jax.default_backend() == "tpu":
        kind = jax.devices()[0].device_kind
    return "TPU" in kind and _is_recent(kind)


def _is_recent(kind: str) -> bool:
    return kind not in ("TPU v2", "TPU v3")


@functools.cache
def _has_cudnn() -> bool:
    """cuDNN's call is built against the library that is loaded: it cannot be lowered where there is none."""
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def log_once(operation: str, name: str) -> None:
    log.info("%s: %s", operation, name)


def describe() -> list[tuple[str, str, str]]:
    """(operation, platform, implementation) for a usual shape and one device."""
    q = jax.ShapeDtypeStruct((1, 1024, 32, 128), jnp.bfloat16)
    whole = jax.ShapeDtypeStruct(q.shape, jnp.float32)  # what a CPU computes in
    few = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    rows = []
    for platform in ("cpu", "cuda", "tpu"):
        heads = whole if platform == "cpu" else q
        one_gpu = is_one_gpu(platform, None)
        rows += [
            ("packed attention", platform, choose_packed(platform, heads, heads)),
            ("paged attention", platform, choose_paged(platform, heads, 8)),
            ("latent attention, paged", platform, "reference"),  # no kernel reads latents yet
            ("products of few rows", platform, "numba" if platform == "cpu" and few_rows(few, few) else "xla"),
            ("experts", platform, "triton" if platform in NVIDIA else "ragged_dot"),
            ("norm, rotation and store", platform, "triton" if one_gpu else "reference"),
            ("loss", platform, "triton" if one_gpu else "reference"),
            ("sampling", platform, "triton" if one_gpu else "reference"),
        ]
    return sorted(rows, key=lambda row: row[0])
