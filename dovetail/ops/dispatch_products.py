"""Choose the implementation of products with weights: matrices and experts, as arrays and quantised."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from platform import machine
from typing import Any, cast

import jax
import jax.numpy as jnp

from dovetail.core.formats import Format
from dovetail.core.mesh import Placement
from dovetail.ops.capabilities import (
    ARM,
    NVIDIA,
    X86,
    has_fp8,
    has_numba,
    has_triton,
    is_hopper,
    is_one_gpu,
)
from dovetail.ops.dispatch import log_once
from dovetail.ops.kernels.cpu.needs import why_not_packed as why_not_packed_rows

# Most rows of a product that `few_rows` takes, by CPU. On Arm `many_rows` is faster from 8 rows on. On x86 XLA's own is
# faster from about 24 rows on, and `many_rows`, whose vectors hold four numbers, never is.
FEW_ROWS = {**dict.fromkeys(ARM, 7), **dict.fromkeys(X86, 16)}
FEW_FP8 = 8  # tokens, at most, whose activations are not rounded with fp8 weights: that takes longer than it saves


# --- arrays -----------------------------------------------------------------------------------------------------------


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
    if not has_numba():
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


def few_kernel(x: Any, w: Any, glu: Any = None, out_dtype: Any = None) -> Callable | None:
    """Return the kernel of x [T, in] times w [out, in] for few tokens on one Hopper GPU; None for XLA's product.

    It is called with x, w and a bias [out] or None; with `glu` (ops.glu.Glu), w is gate and then up. Neither x nor w
    says on which devices it is: the kernel is chosen where there is one.
    """
    if len(jax.devices()) > 1 or not is_hopper():
        return None
    from dovetail.ops.kernels.gpu.dense_few import few_product, why_not_few

    if why_not_few(x, w, glu) or out_dtype not in (None, x.dtype):
        return None
    log_once("products of few tokens", "mosaic")
    return functools.partial(few_product, glu=glu)


def choose_grouped(platform: str | None, rows: Any, w: Any) -> str:
    """Return the product of rows [M, in], in groups, with w [E, out, in]: 'mosaic' (Hopper), 'triton' or 'xla'.

    XLA's would run every expert on every row on a GPU.
    """
    if (platform or jax.default_backend()) not in NVIDIA:
        return "xla"
    if is_hopper() and rows.dtype == w.dtype:
        from dovetail.ops.kernels.gpu.grouped_hopper import why_not_hopper

        if why_not_hopper(len(rows), w.shape[1], w.shape[2], w.dtype) is None:
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


def grouped_each_kernel(platform: str | None, rows: Any, ws: Sequence[Any]) -> Callable | None:
    """Return the grouped matmul with several weights whose gradient to the rows is one kernel; None for one each."""
    alike = len(ws) > 1 and all(isinstance(w, jax.Array) and w.shape == ws[0].shape for w in ws)
    if not alike or choose_grouped(platform, rows, ws[0]) != "mosaic":
        return None
    from dovetail.ops.kernels.gpu.grouped_hopper import grouped_matmuls

    log_once("experts", "mosaic, one gradient to the rows")
    return grouped_matmuls


def experts_kernel(x: Any, params: Any, glu: Any, platform: str | None, placement: Placement | None) -> Callable | None:
    """Return the kernel from the routed tokens of a step, x [T, D], to their outputs; None for grouped products."""
    if not is_one_gpu(platform, placement) or not is_hopper():
        return None
    from dovetail.ops.kernels.gpu.experts import few_token_experts, why_not_few_tokens

    if why_not_few_tokens(x, params, glu) is None:
        log_once("experts of few tokens", "mosaic")
        return few_token_experts
    from dovetail.ops.kernels.gpu.packed_weights import few_token_packed_experts, why_not_packed_experts

    if why_not_packed_experts(x, params, glu):
        return None
    log_once("packed experts of few tokens", "mosaic")
    return few_token_packed_experts


def router_kernel(
    router: Any, logits: Any, bias: Any, platform: str | None, placement: Placement | None
) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]] | None:
    """Return the kernel from a router (ops.moe.Router) and logits [T, E] to weights and experts; None for `route`.

    It has no gradient.
    """
    if not is_one_gpu(platform, placement) or not is_hopper():
        return None
    from dovetail.ops.kernels.gpu.mosaic.routing import route_top_k, why_not_top_k

    if why_not_top_k(router, logits, bias):
        return None
    log_once("router", "mosaic")
    return route_top_k


def sort_kernel(group: Any, num_experts: int, platform: str | None) -> Callable[[Any, int], tuple] | None:
    """Return the kernel that sorts pairs of token and expert by `group` [M], the pairs' experts; None for XLA."""
    if not is_one_gpu(platform, None) or not is_hopper():
        return None
    from dovetail.ops.kernels.gpu.mosaic.sorting import sort_pairs, why_not_sort

    if why_not_sort(group, num_experts):
        return None
    log_once("pairs of token and expert", "mosaic")
    return sort_pairs


def deal_kernel(x: Any, k: int, platform: str | None) -> Callable[[jax.Array, jax.Array, int], jax.Array] | None:
    """Return the kernel that writes each row of x [T, D] to k places; None for XLA's gather."""
    if not is_one_gpu(platform, None) or not is_hopper():
        return None
    from dovetail.ops.kernels.gpu.mosaic.dealing import deal_rows, why_not_deal

    if why_not_deal(x, k):
        return None
    log_once("rows of tokens", "mosaic")
    return deal_rows


# --- quantised --------------------------------------------------------------------------------------------------------


def quantized_kernel(
    form: Format, x: Any, platform: str | None, placement: Placement | None, out: int = 0
) -> Callable[[jax.Array, Any, Any], jax.Array] | None:
    """Return the product of x [..., in] with a quantised matrix [out, in] in this format; None for the reference.

    A kernel is called with x, the matrix (ops.quant.weight.Quantized) and the dtype of the result. Without `out` the
    kernels are those that multiply any number of rows.
    """
    if form.name == "w8a8":
        from dovetail.ops.quant.rounded import int8_matmul

        return int8_matmul
    rounds = form.name == "fp8" and not form.group and (platform or jax.default_backend()) in NVIDIA and has_fp8()
    packed = bool(out) and why_not_packed_gpu(form, x, platform, placement, out) is None
    if packed and (not rounds or len(x) <= FEW_FP8):
        from dovetail.ops.kernels.gpu.packed_weights import packed_matmul

        log_once("packed weights", "mosaic")
        return packed_matmul
    if out and why_not_packed_tpu(form, x, platform, placement) is None:
        from dovetail.ops.kernels.tpu.packed_product import packed_matmul as kernel

        log_once("packed weights", "pallas")
        return kernel
    if rounds:
        from dovetail.ops.quant.rounded import fp8_matmul

        return cast(Callable, fp8_matmul)  # custom_vjp has no type of its own
    if why_not_packed(form, x, platform, placement):
        return None
    from dovetail.ops.kernels.cpu.packed_rows import packed_rows_matmul

    return lambda x, weight, out_dtype: packed_rows_matmul(x, weight, out_dtype, not form.activations)


def gated_kernel(
    form: Format, x: Any, glu: Any, platform: str | None, placement: Placement | None, out: int
) -> Callable[[jax.Array, Any, Any], jax.Array] | None:
    """Return the gated unit of x [T, in] with a joined matrix [out, in] in this format; None for its parts.

    The kernel is called with x, the matrix (ops.quant.weight.Quantized) and the unit (ops.glu.Glu).
    """
    if why_not_packed_gpu(form, x, platform, placement, out):
        return None
    from dovetail.ops.kernels.gpu.packed_weights import packed_gated, why_not_gated

    return None if why_not_gated(form, x, (out, x.shape[-1]), glu) else packed_gated


def why_not_packed(form: Format, x: Any, platform: str | None, placement: Placement | None) -> str | None:
    """Return why no kernel multiplies x by packed weights, or None."""
    if (platform or jax.default_backend()) != "cpu":
        return "only on CPUs"
    if placement is not None and placement.mesh.size > 1:
        return "several devices"
    if machine().lower() not in FEW_ROWS or not has_numba():
        return "numba is not installed, or the CPU is not known"
    if x.dtype != jnp.float32 or math.prod(x.shape[:-2]) != 1:
        return "x is not a matrix of f32"
    return why_not_packed_rows(form, x.shape[-1])


def why_not_packed_gpu(form: Format, x: Any, platform: str | None, placement: Placement | None, out: int) -> str | None:
    """Return why Mosaic's kernel does not multiply x by a packed matrix [out, in], or None."""
    if not is_one_gpu(platform, placement) or not is_hopper():
        return "not one Hopper GPU"
    from dovetail.ops.kernels.gpu.packed_weights import why_not_matrix

    return why_not_matrix(form, x, (out, x.shape[-1]))


def why_not_packed_tpu(form: Format, x: Any, platform: str | None, placement: Placement | None) -> str | None:
    """Return why Pallas' kernel does not multiply x [T, in] by packed weights, or None."""
    if (platform or jax.default_backend()) != "tpu":
        return "only on TPUs"
    if placement is not None and placement.mesh.size > 1:  # XLA cannot split a kernel over devices
        return "several devices"
    from dovetail.ops.kernels.tpu.packed_product import why_not_packed

    return why_not_packed(form, x)


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
    if why_not_packed_tpu(form, rows, platform, None) is None:
        from dovetail.ops.kernels.tpu.packed_product import packed_grouped_matmul as kernel

        log_once("packed experts", "pallas")
        return kernel
    if why_not_packed(form, rows, platform, placement):
        return None
    from dovetail.ops.kernels.cpu.packed_rows import packed_grouped_matmul

    return functools.partial(packed_grouped_matmul, exact=not form.activations)
