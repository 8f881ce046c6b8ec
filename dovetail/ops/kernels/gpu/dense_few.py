"""Products of bf16 matrices with up to 8 tokens on Hopper, in one kernel each (Pallas, Mosaic GPU).

XLA has no good product for them: of a few MB it reads at two thirds of the bandwidth, and it adds up parts of the input
and multiplies gate and up in further kernels, each of which takes at least 2 us. See dense_warp.py for the program.

T tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu.dense_ops import DenseOps
from dovetail.ops.kernels.gpu.dense_warp import LOADED, ROWS, STEP, DensePlan, multiply
from dovetail.ops.kernels.gpu.mosaic.threads import launch

FEW = 8  # tokens
LEAST = 1 << 20  # values of a matrix: XLA fuses a smaller one with what is beside it
# Values from which on more than FEW_OF_LARGE tokens are left to XLA, which reads such a matrix at the memory's
# bandwidth: here each unit reads the tokens again, of 8 half as many bytes as of its rows.
LARGE, FEW_OF_LARGE = 1 << 26, 4
SMS = 132  # multiprocessors
SHARED, OTHER = 226, 2  # KiB of shared memory of a multiprocessor, and of a program beside the steps and sums
AT_ONCE = 5  # programs of a multiprocessor, at most
UNDER_WAY = 64 * 1024  # bytes that a multiprocessor waits for: 4.17 TB/s for 2 us
ALONE, IN_TURN = 0.97, 0.97  # quality of one program on a multiprocessor, and of programs that compute several units


def why_not_few(x: Any, w: Any, glu: Glu | None = None) -> str | None:
    """Return why the kernel cannot multiply x [T, in] by a matrix [out, in], or None."""
    if x.ndim != 2 or x.shape[0] > FEW:
        return f"x is not a matrix of at most {FEW} tokens"
    if not x.dtype == w.dtype == jnp.bfloat16:
        return "not bf16"
    out, size = w.shape
    if out % (2 * ROWS) or size % (LOADED // 2) or size < STEP // 2 or out * size < LEAST:
        return f"a matrix of {out} x {size}"
    if out * size > LARGE and x.shape[0] > FEW_OF_LARGE:
        return f"more than {FEW_OF_LARGE} tokens with a large matrix"
    return "exact GELU" if glu and glu.limit is None and glu.kind == "gelu" else None


@functools.partial(jax.jit, static_argnames=("glu", "eps", "offset"))  # equal layers share one lowered function
def few_product(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    norm: jax.Array | None = None,
    glu: Glu | None = None,
    eps: float | None = None,
    offset: float = 0.0,
) -> jax.Array:
    """Multiply x [T, in] by w [out, in], with sums in f32: -> [T, out].

    Args:
        x: The tokens.
        w: The weight; with `glu`, gate and then up.
        bias: [out], added to the products.
        residual: [T, out], added to the result.
        norm: [in], the weight of an RMS norm of x, with `eps` and `offset` as in ops.norm.rms_norm.
        glu: The gated unit to apply: -> [T, out / 2].
        eps: What the norm adds to the mean of squares.
        offset: What the norm adds to its weight.
    """
    p = plan(len(x), w.shape, glu, None if norm is None else eps, offset)
    added = {"bias": bias, "residual": residual, "norm": norm}
    given = {"x": x, "w": w} | {name: a for name, a in added.items() if a is not None}
    program = functools.partial(multiply, names=(*given, "out", "ring", "held"), p=p)
    out = [jax.ShapeDtypeStruct((len(x), p.out), x.dtype)]
    return launch("dense_few", program, [*given.values()], out, p.programs, p.memory, on=DenseOps())[0]


def plan(
    T: int, shape: tuple[int, ...], glu: Glu | None = None, eps: float | None = None, offset: float = 0.0
) -> DensePlan:
    """Return the best plan of a product with a matrix of this shape."""
    out, size = shape
    p = DensePlan(T, size, out // 2 if glu else out, 2, 1, 1, glu, eps, offset)
    return max(_candidates(p), key=lambda found: found[0])[1]


def _candidates(p: DensePlan) -> Iterator[tuple[float, DensePlan]]:
    """Yield plans, each with the share of the bandwidth that it might reach."""
    for blocks, at_once in itertools.product((2,) if p.glu else (2, 1), range(1, AT_ONCE + 1)):
        each = p._replace(blocks=blocks)
        turns = pl.cdiv(each.units, SMS * at_once)
        each = each._replace(programs=pl.cdiv(each.units, turns))
        if each.out % each.rows or pl.cdiv(each.programs, SMS) < at_once:
            continue
        room = SHARED // at_once - OTHER - pl.cdiv(4 * each.memory[1], 1024)
        slots = min(each.steps, 1024 * room // (4 * each.ring))  # the plan has one slot so far
        if turns > 1:  # each step has its place
            slots = next((n for n in range(slots, 1, -1) if each.steps % n == 0), 0)
        if slots < 2:
            continue
        each = each._replace(slots=slots)
        under_way = at_once * each.ahead * blocks * ROWS * STEP
        share = 1.0 if each.ahead == each.steps else min(1.0, under_way / UNDER_WAY)
        share *= (ALONE if at_once == 1 else 1) * (IN_TURN if turns > 1 else 1)
        yield each.units / (SMS * at_once * turns) * share, each
