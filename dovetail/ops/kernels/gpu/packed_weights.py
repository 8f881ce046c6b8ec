"""Matrices and experts in packed formats times few tokens on Hopper: the callers of packed_product and others.

Up to packed_few.FEW tokens of a tile are for packed_few. Those of experts in mxfp4 and fp8 are otherwise for
packed_pipeline, which takes 53 to 100% of packed_product's time on an H200 (64 to 512 tokens), and the rest for
packed_product.

From more than FEW tokens on, products unpack the weight and leave the rest to cuBLAS. That writes and reads 4 bytes
per value beside the codes, about 1.1 ns per 1,000 values on an H200, the time of some 380 tokens at 700 TFLOP/s: most
of a product with 512 tokens, a tenth of one with 4,096. packed_product unpacks again for every 64 tokens, and its left
operand comes from registers.

T tokens, E experts, k experts per token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from dovetail.core.formats import Format
from dovetail.ops.kernels.gpu import packed_few, packed_fp8, packed_pipeline, packed_product
from dovetail.ops.kernels.gpu.experts import CHUNK, Tiles, all_tokens, sorted_tokens
from dovetail.ops.kernels.gpu.packed_product import MOST_TOKENS, plan, product, why_not_rows

FEW = 256  # tokens of a product with a matrix, at most
SLACK = 1.25  # of a tile, as in ops/kernels/gpu/experts.py: products take longer than reading packed weights
FEW_ROUTED = 1024  # tokens of experts, at most: each multiplies a part of them


def why_not_matrix(form: Format, x: Any, shape: tuple[int, ...]) -> str | None:
    """Return why the kernel cannot multiply x [T, in] by a matrix of this format and shape, or None."""
    return _why_not_tokens(x) or why_not_rows(form, shape)


def _why_not_tokens(x: Any, most: int = FEW) -> str | None:
    if x.ndim != 2:  # in training, and the kernel has no gradient
        return "x is not a matrix"
    if x.dtype != jnp.bfloat16:
        return f"{x.dtype}, not bf16"
    return f"more than {most} tokens" if len(x) > most else None


@functools.partial(jax.jit, static_argnames="out_dtype")  # equal layers share one lowered function
def packed_matmul(x: jax.Array, weight: Any, out_dtype: Any = None) -> jax.Array:
    """Multiply x [T, in] by a matrix [out, in] (ops.quant.weight.Quantized), with sums in f32."""
    form, tiles, out_dtype = weight.format, tiles_of(x, weight.format), out_dtype or x.dtype
    arrays = {name: a[None] for name, a in weight.arrays.items()}
    if len(x) <= packed_few.FEW:
        return packed_few.product(x, [arrays], [], tiles, packed_few.plan(form, tiles, weight.shape), dtype=out_dtype)
    p = plan(form, tiles, weight.shape, split=True)
    in_parts = p.splits > 1 or out_dtype != x.dtype
    padding = -len(x) % CHUNK  # tiles of memory are whole
    y = product(jnp.pad(x, ((0, padding), (0, 0))), [arrays], [], tiles, p, in_parts=in_parts)
    if in_parts:
        y = jnp.swapaxes(y.sum(axis=0), 1, 2).reshape(-1, weight.shape[0])
    return y[: len(x)].astype(out_dtype)


def why_not_gated(form: Format, x: Any, shape: tuple[int, ...], glu: Any) -> str | None:
    """Return why the kernel cannot compute a gated unit of x [T, in] with gate and up in one matrix [2 out, in]."""
    if len(x) > packed_few.FEW:
        return f"more than {packed_few.FEW} tokens"
    if glu.limit is None and glu.kind == "gelu":
        return "exact GELU"
    return why_not_matrix(form, x, (shape[0] // 2, shape[1]))


@functools.partial(jax.jit, static_argnames="glu")  # equal layers share one lowered function
def packed_gated(x: jax.Array, weight: Any, glu: Any) -> jax.Array:
    """Return glu(gate, up) [T, out], the products of x [T, in] with the halves of a matrix [2 out, in]."""
    tiles, arrays = tiles_of(x, weight.format), {name: a[None] for name, a in weight.arrays.items()}
    p = packed_few.plan(weight.format, tiles, weight.shape, 2, is_joined=True)
    return packed_few.product(x, [arrays], [], tiles, p, epilogue=lambda sums: [glu.in_kernel(*sums)])


def tiles_of(x: jax.Array, form: Format) -> Tiles:
    """Return tiles of all tokens for a matrix, as of one expert."""
    T = len(x)
    N = min(max(CHUNK, pl.next_power_of_2(T)), most_tokens(form))
    first = np.arange(0, T, N)
    table = np.stack([0 * first, first, first, np.minimum(T - first, N)]).astype(np.int32)
    R = T if T < CHUNK else pl.cdiv(T, CHUNK) * CHUNK  # copies end at the last row
    return Tiles(x, jnp.asarray(table), jnp.arange(T, dtype=jnp.int32), N, R)


def most_tokens(form: Format) -> int:
    """Return the most tokens of a tile."""
    return MOST_TOKENS[0 if form.name == "mxfp4" else form.group]


# --- experts ----------------------------------------------------------------------------------------------------------


def why_not_packed_experts(x: Any, params: dict, glu: Any) -> str | None:
    """Return why the kernel cannot run packed experts, or None."""
    weights = [params[name] for name in ("gate", "up", "down")]
    forms = [form for w in weights if isinstance(form := getattr(w, "format", None), Format)]  # an array's is another
    if len(forms) < len(weights) or forms[0] != forms[1]:
        return "experts that are not packed alike"
    if any(params[name].dtype != jnp.bfloat16 for name in params if name.endswith("_bias")):
        return "biases that are not bf16"
    if glu.limit is None and glu.kind == "gelu":
        return "exact GELU"
    whys = (why_not_rows(form, w.shape) for form, w in zip(forms, weights, strict=True))
    return _why_not_tokens(x, FEW_ROUTED) or next(filter(None, whys), None)


@functools.partial(jax.jit, static_argnames="glu")  # the layers of a model share one lowered function
def few_token_packed_experts(x: jax.Array, weights: jax.Array, chosen: jax.Array, params: dict, glu: Any) -> jax.Array:
    """Return [T, D] as experts.few_token_experts does, with packed experts (ops.quant.weight.Quantized)."""
    products = [("gate", "up"), ("down",)]
    firsts = [(params[names[0]].format, params[names[0]].shape, len(names)) for names in products]
    in_fp8 = all(packed_pipeline.fits(*a) for a in firsts)
    many = packed_pipeline if in_fp8 else packed_product
    most = packed_fp8.MOST_TOKENS if in_fp8 else min(most_tokens(form) for form, *_ in firsts)
    arrange = all_tokens if len(x) <= CHUNK else functools.partial(sorted_tokens, most=most, slack=SLACK)
    tiles = arrange(x, chosen, params["gate"].shape[0])

    def times(x: jax.Array, names: tuple[str, ...], **options: Any) -> jax.Array:
        form, shape = params[names[0]].format, params[names[0]].shape
        biases = [params[f"{name}_bias"] for name in names if f"{name}_bias" in params]
        arrays = [params[name].arrays for name in names]
        of: Any = packed_few if tiles.N <= packed_few.FEW else many  # each takes its own plan
        return of.product(x, arrays, biases, tiles, of.plan(form, tiles, shape, len(names)), **options)

    hidden = times(tiles.x, products[0], epilogue=lambda sums: [glu.in_kernel(*sums)])
    out = times(hidden, products[1], reads=2)  # where the first product wrote
    return jnp.einsum("tkd,tk->td", out[tiles.row].astype(jnp.float32), weights).astype(x.dtype)
