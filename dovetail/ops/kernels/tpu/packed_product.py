"""Products with packed weights on TPUs: tiles of codes and scales are unpacked in VMEM and multiplied on the MXU.

XLA unpacks weights in groups as a whole and writes them to HBM in every call: 20 to 70 times the packed bytes.

A byte of 4-bit codes has two neighbouring columns of a row. They stay apart: the activations' even columns are
multiplied by the lower halves, the odd ones by the upper halves (planes). XLA stores an array of bytes along the side
that wastes less of its tiles of 32 x 128: rows of 2,880 inputs (GPT-OSS) lie across lanes, so the kernel takes both
orders. A group's scale has to reach all of its inputs: along sublanes that is a broadcast, along lanes a small product
with zeros and ones, in two bf16 parts.

M rows of activations sorted by expert, E experts (1: a matrix), K inputs, N outputs, G groups of a row, V visits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dovetail.core.formats import CODES, Format
from dovetail.ops.kernels.tpu.needs import LANES, MIB, tpu_kind, whole

FORMATS = ("int4", "uint4", "mxfp4", "fp8", "int8")
GROUPS = (32, 64, 128)
OLD = ("TPU v2", "TPU v3", "TPU v4")  # with 16 MiB of VMEM or less, and not compiled
CHUNK = 1024  # inputs: their scales are whole tiles of sublanes
COLS = 512  # outputs of a tile
ROWS = (128, 1024)  # of a tile of activations, if there are as many
ROW_BYTES = 8 * MIB  # of VMEM, for a tile of activations
BYTES = 32  # rows of a tile of bytes
PACKED_ROWS = 16  # of a tile of bf16
SIGNS = -0x7F7F7F80  # 0x80 in every byte of 32 bits
E2M1 = 14  # the exponent that `_values` of mxfp4 lacks
USUAL_VMEM = 16 * MIB  # that XLA lets a kernel have


def why_not_packed(form: Format, x: Any) -> str | None:
    """Return why the kernel cannot multiply rows x [M, K] by a weight in this format, or None."""
    kind = tpu_kind(None)
    reasons = {
        "x is not a matrix": x.ndim != 2,  # in training, and the kernel has no gradient
        f"{x.dtype}, not bf16": x.dtype != jnp.bfloat16,
        f"XLA reads {form.describe()} as it is, or no kernel does": form.name not in FORMATS or not form.group,
        f"groups of {form.group}": form.group not in GROUPS or (form.name == "mxfp4" and form.group != GROUPS[0]),
        "rows that are not whole groups": bool(form.group) and x.shape[-1] % form.group != 0,
        f"not compiled for {kind}": kind in OLD,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@functools.partial(jax.jit, static_argnames=("out_dtype", "interpret"))  # equal layers share one lowered function
def packed_matmul(x: jax.Array, weight: Any, out_dtype: Any = None, interpret: Any = False) -> jax.Array:
    """Multiply x [M, K] by a matrix [N, K] (ops.quant.weight.Quantized), with sums in f32."""
    arrays = {name: a[None] for name, a in weight.arrays.items()}
    sizes = jnp.full(1, len(x), jnp.int32)
    return _product(x, arrays, sizes, weight.format, out_dtype or x.dtype, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def packed_grouped_matmul(rows: jax.Array, weight: Any, sizes: jax.Array, interpret: Any = False) -> jax.Array:
    """Multiply rows [M, K] by experts [E, N, K] as ops.linear.grouped does.

    It has a gradient, for rows of training are a matrix too: that unpacks the experts.
    """
    return _grouped(interpret, rows, weight, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(interpret: Any, rows: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
    return _product(rows, weight.arrays, sizes, weight.format, rows.dtype, interpret)


def _grouped_forward(interpret: Any, rows: jax.Array, weight: Any, sizes: jax.Array):
    return _grouped(interpret, rows, weight, sizes), (weight, sizes)


def _grouped_backward(_interpret: Any, saved: tuple, g: jax.Array):
    weight, sizes = saved
    return lax.ragged_dot(g, weight.dense(), sizes), None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


class Blocking(NamedTuple):
    """Hold the static values of a call."""

    form: Format
    size: int  # K
    rows: int  # of a tile
    cols: int
    chunks: int
    across: bool  # inputs lie along sublanes, outputs along lanes
    rows_first: bool  # a tile of rows passes all outputs before the next tile: codes are read again, not activations

    @property
    def planes(self) -> int:
        """Return the codes of a byte."""
        return CODES[self.form.name][1]

    @property
    def bytes(self) -> int:
        """Return the bytes of a row of a chunk."""
        return CHUNK // self.planes

    @property
    def groups(self) -> int:
        """Return the groups of a chunk."""
        return CHUNK // self.form.group


def _plan(form: Format, rows: int, experts: int, out: int, size: int) -> Blocking:
    chunks, length = pl.cdiv(size, CHUNK), size // CODES[form.name][1]
    share = min(max(pl.next_power_of_2(pl.cdiv(rows, experts)), ROWS[0]), ROWS[1])
    fits = ROW_BYTES // (chunks * CHUNK * 2)
    tile = min(whole(rows, PACKED_ROWS), share, max(PACKED_ROWS, fits // PACKED_ROWS * PACKED_ROWS))
    return Blocking(form, size, tile, min(COLS, whole(out)), chunks, lies_across(out, length), experts == 1)


def lies_across(out: int, length: int) -> bool:
    """Return whether XLA stores bytes [out, length] with `out` along lanes, as it takes less memory."""
    return whole(length, BYTES) * whole(out) < whole(out, BYTES) * whole(length)


def _product(x: jax.Array, arrays: dict[str, jax.Array], sizes: jax.Array, form: Format, dtype: Any, interpret: Any):
    (M, K), (E, N, _) = x.shape, arrays["codes"].shape
    p = _plan(form, M, E, N, K)
    x = jnp.pad(x, ((0, -M % PACKED_ROWS), (0, p.chunks * CHUNK - K)))
    planes = _split(p, x, interpret) if p.planes > 1 else [x]
    codes = arrays["codes"].swapaxes(1, 2) if p.across else arrays["codes"]
    groups = [_groups(arrays[name], p) for name in ("scale", "zero") if name in arrays]
    visits = visits_of(sizes, len(x), p.rows)
    run = _call(p, len(x), codes, groups, N, len(visits[0]), dtype, interpret)
    return run(*visits, *planes, codes, *groups)[:M]


def _split(p: Blocking, x: jax.Array, interpret: Any) -> list[jax.Array]:
    """Return every second column of x [M, K], from the first and from the second on.

    It is a product with zeros and ones: XLA's strided slice takes ten times the instructions.
    """

    def kernel(x, *out):
        for at in range(0, CHUNK, p.planes * LANES):
            own = x[:, at : at + p.planes * LANES]
            column, place = (lax.broadcasted_iota(jnp.int32, (own.shape[1], LANES), dim) for dim in (0, 1))
            for plane, ref in enumerate(out):
                chosen = (column == place * p.planes + plane).astype(x.dtype)
                values = lax.dot(own, chosen, preferred_element_type=jnp.float32)
                ref[:, at // p.planes : at // p.planes + LANES] = values.astype(x.dtype)

    rows = min(len(x), ROWS[0])
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(len(x), rows), p.chunks),
        in_specs=[pl.BlockSpec((rows, CHUNK), lambda m, k: (m, k))],
        out_specs=[pl.BlockSpec((rows, p.bytes), lambda m, k: (m, k))] * p.planes,
        out_shape=[jax.ShapeDtypeStruct((len(x), p.chunks * p.bytes), x.dtype)] * p.planes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="split_columns",
    )(x)


def _groups(values: jax.Array, p: Blocking) -> jax.Array:
    """Return the scales or zero points [E, N, G] as [E, G, N]."""
    return (values if p.form.name == "mxfp4" else values.astype(jnp.float32)).swapaxes(1, 2)


def visits_of(sizes: jax.Array, num_rows: int, rows: int) -> tuple[jax.Array, ...]:
    """Return which tiles of rows are multiplied by which expert, in their order.

    A tile is visited by every expert that has rows in it. There are as many visits as there can be; those past the last
    have no rows, and go on to the tiles that follow, so that no tile is left and visited again.

    Returns:
        The expert, the tile, and the expert's first row and end, each [V].
    """
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    starts = ends - sizes.astype(jnp.int32)
    tiles = jnp.where(ends > starts, (ends + rows - 1) // rows - starts // rows, 0)
    last = jnp.cumsum(tiles)
    every = jnp.arange(pl.cdiv(num_rows, rows) + len(sizes) - 1, dtype=jnp.int32)
    visit = jnp.clip(every, 0, jnp.maximum(last[-1] - 1, 0))
    expert = jnp.searchsorted(last, visit, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, len(sizes) - 1)
    tile = starts[expert] // rows + every - (last - tiles)[expert]
    tile = jnp.clip(tile, 0, pl.cdiv(num_rows, rows) - 1)
    return expert, tile, starts[expert], jnp.where(every < last[-1], ends[expert], 0)


def _call(p: Blocking, num_rows: int, codes, groups, out: int, visits: int, dtype, interpret):
    length, num_groups, blocks = p.chunks * p.bytes, p.chunks * p.groups, pl.cdiv(out, p.cols)

    def spec(shape: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
        """`index` takes the block of outputs, the expert and the tile of rows."""

        def of(i, j, expert, tile, *_):
            n, v = (j, i) if p.rows_first else (i, j)
            return index(n, expert[v], tile[v])

        return pl.BlockSpec(shape, of)

    across, along = lambda n, e, _: (e, 0, n), lambda n, e, _: (e, n, 0)
    weight = spec((None, length, p.cols), across) if p.across else spec((None, p.cols, length), along)
    rows = spec((p.rows, length), lambda n, e, t: (t, 0))
    return pl.pallas_call(
        functools.partial(_kernel, p),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(visits, blocks) if p.rows_first else (blocks, visits),
            in_specs=[*[rows] * p.planes, weight, *[spec((None, num_groups, p.cols), across)] * len(groups)],
            out_specs=spec((p.rows, p.cols), lambda n, e, t: (t, n)),
            scratch_shapes=[pltpu.VMEM((p.rows, p.cols), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel" if p.rows_first else "arbitrary"),
            vmem_limit_bytes=max(USUAL_VMEM, _vmem(p, len(groups))),
        ),
        cost_estimate=_cost(p, num_rows, (codes, *groups), out, visits, dtype),
        interpret=interpret,
        name="packed_product",
    )


def _vmem(p: Blocking, groups: int) -> int:
    """Return the VMEM of a call: two tiles of every array, and some chunks of unpacked numbers."""
    length, cols = p.chunks * p.bytes, p.cols
    tiles = 2 * p.rows * length * p.planes + cols * (length + 4 * p.chunks * p.groups * groups)
    return 2 * tiles + (4 * p.rows + 6 * CHUNK) * cols * 4


def _cost(p: Blocking, num_rows: int, weight: tuple, out: int, visits: int, dtype: Any) -> pl.CostEstimate:
    """Return what a call reads and computes, if every expert has rows."""
    experts = len(weight[0])
    weights, rows = sum(a.nbytes for a in weight) // experts, num_rows * p.chunks * CHUNK * 2
    if p.rows_first:
        weights *= visits
    else:
        weights, rows = weights * min(experts, visits), rows * (1 if visits == 1 else pl.cdiv(out, p.cols))
    results = num_rows * out
    return pl.CostEstimate(2 * results * p.size, 0, weights + rows + results * jnp.dtype(dtype).itemsize)


# --- in the kernel ----------------------------------------------------------------------------------------------------


def _kernel(p: Blocking, _expert, tile, start, end, *refs):
    """Multiply one tile of rows by one expert's tile of outputs, and store the rows that are the expert's."""
    x, (codes, *groups, out, acc) = refs[: p.planes], refs[p.planes :]
    visit = pl.program_id(0 if p.rows_first else 1)
    first = tile[visit] * p.rows

    @pl.when(end[visit] > start[visit])
    def _():
        acc[...] = jnp.zeros_like(acc)

        def step(i, _):
            at = pl.multiple_of(i * p.bytes, p.bytes)
            dims = (((1,), (0 if p.across else 1,)), ((), ()))
            for plane, weight in zip(x, _unpacked(p, i, codes, groups), strict=True):
                own = plane[:, pl.ds(at, p.bytes)]
                acc[...] += lax.dot_general(own, weight, dims, preferred_element_type=jnp.float32)

        lax.fori_loop(0, p.chunks, step, None)
        row = first + lax.broadcasted_iota(jnp.int32, acc.shape, 0)
        own = (row >= start[visit]) & (row < end[visit])
        # not every TPU selects in bf16
        out[...] = jnp.where(own, acc[...], out[...].astype(jnp.float32)).astype(out.dtype)


def _unpacked(p: Blocking, i: jax.Array, codes: Any, groups: list[Any]) -> list[jax.Array]:
    """Return the numbers of chunk i in bf16, one array per plane, in the order of the codes."""
    part = pl.ds(pl.multiple_of(i * p.bytes, p.bytes), p.bytes)
    own = codes[part, :] if p.across else codes[:, part]
    spread = [_spread(p, i, ref[pl.ds(pl.multiple_of(i * p.groups, p.groups), p.groups), :]) for ref in groups]
    found = []
    for value in _values(p.form.name, own):
        value = value - spread[1] if len(spread) > 1 else value
        found.append((value * spread[0]).astype(jnp.bfloat16))
    if p.form.name == "fp8" and p.size % CHUNK:  # what follows the last input may be NaN
        place = i * CHUNK + lax.broadcasted_iota(jnp.int32, found[0].shape, 0 if p.across else 1)
        found = [jnp.where(place < p.size, each.astype(jnp.float32), 0).astype(each.dtype) for each in found]
    return found


def _values(name: str, codes: jax.Array) -> list[jax.Array]:
    """Return the numbers of codes without scale and zero point in f32, one array per plane."""
    if name in ("int8", "fp8"):
        return [codes.astype(jnp.float32)]
    words = pltpu.bitcast(codes, jnp.int32)  # of four bytes, for operations on all of them
    if name == "mxfp4":  # e5m2 has places for the bits of e2m1, and then is 2^-E2M1 of it, also below 1
        halves = [(each & SIGNS) | ((each >> 3) & 0x0E0E0E0E) for each in (words << 4, words)]
        return [_bytes(each, jnp.float8_e5m2) for each in halves]
    halves = [words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F]
    if name == "int4":  # q - 8 without a borrow from the next byte, then its sign
        halves = [((each | SIGNS) - 0x08080808) ^ SIGNS for each in halves]
    return [_bytes(each, jnp.int8) for each in halves]


def _bytes(words: jax.Array, dtype: Any) -> jax.Array:
    """Return the numbers that the bytes of words are in this dtype, in f32."""
    return pltpu.bitcast(words, dtype).astype(jnp.float32)


def _spread(p: Blocking, i: jax.Array, values: jax.Array) -> jax.Array:
    """Return the value of its group for each byte of chunk i in f32, in the order of the codes.

    `values` are [groups, outputs]; with inputs along lanes they are multiplied by zeros and ones, rounded to 16 bits.
    """
    if p.form.name == "mxfp4":
        exponent = jnp.minimum(values.astype(jnp.int32), 254 - E2M1)  # greater ones are in no weight
        values = lax.bitcast_convert_type((exponent + E2M1) << 23, jnp.float32)  # never subnormal, which would be 0
    if p.size % CHUNK:  # what follows the last group may be inf or NaN
        place = i * p.groups + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(place < p.size // p.form.group, values, 0)
    each = p.form.group // p.planes
    if p.across:
        shape = (len(values), each, values.shape[1])
        return jnp.broadcast_to(values[:, None], shape).reshape(-1, values.shape[1])
    if p.form.name != "mxfp4":  # whose scales are bf16 numbers
        upper = values.astype(jnp.bfloat16).astype(jnp.float32)
        values = jnp.concatenate([upper, values - upper])
    group, byte = (lax.broadcasted_iota(jnp.int32, (len(values), p.bytes), dim) for dim in (0, 1))
    ones = (lax.div(byte, each) == lax.rem(group, p.groups)).astype(jnp.bfloat16)
    dims = (((0,), (0,)), ((), ()))
    return lax.dot_general(values.astype(jnp.bfloat16), ones, dims, preferred_element_type=jnp.float32)
