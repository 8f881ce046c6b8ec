"""Adjust logits in place by bias, penalties and masks, for Hopper (Pallas, Mosaic GPU).

Rows that ask for nothing are neither read nor written. A word of a mask is for 32 tokens: a warpgroup takes as many
words [n, 32] tokens at a time.

S rows, V vocabulary, W = V / 32 words, B biased tokens per row, N slots of the history table.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.rows import BY_LANE, iota, load_as, tiled

WORD = 32  # tokens of a word
WORDS, END = 32, 4  # of a part, and of one at the end of a row
PARTS = 4  # of a program
TILE = 16  # words that all threads read at once, 16 bytes each


def adjust(logits: jax.Array, inputs: Any, history: jax.Array, interpret: Any = None) -> jax.Array:
    """Adjust f32 logits [S, V] as ops.sample.adjust does."""
    S, V = logits.shape
    parts, rest = divmod(V // WORD, WORDS)

    def body(
        ids_ref: Any, bias_ref: Any, slot_ref: Any, presence_ref: Any, frequency_ref: Any, repetition_ref: Any,
        mask_ref: Any, until_ref: Any, position_ref: Any, history_ref: Any, logits_ref: Any,
    ) -> None:  # fmt: skip
        row, first = lax.axis_index("row"), lax.axis_index("program") * PARTS
        slot, is_biased = slot_ref[row], ids_ref[row, 0] >= 0  # a row's bias is first
        is_penalized, is_masked = slot < history_ref.shape[0], position_ref[row] < until_ref[row]

        def change(start: Any, words: int) -> None:
            layout, part = tiled(min(words, TILE), WORD), pl.ds(start, words)
            x = load_as(logits_ref, (row, part), layout, optimized=False)

            def add_bias(x: jax.Array) -> jax.Array:
                shape = words, WORD
                at = (iota(shape, 0, layout) + start) * WORD + iota(shape, 1, layout)

                def add(i: Any, x: jax.Array) -> jax.Array:
                    return jnp.where(at == ids_ref[row, i], x + bias_ref[row, i], x)

                return lax.fori_loop(0, _count(ids_ref, row), add, x)

            def penalize(x: jax.Array) -> jax.Array:
                seen = load_as(history_ref, (slot, part), layout, optimized=False, dtype=jnp.int32)
                counts = (seen >> 1).astype(jnp.float32)
                factor = jnp.where(seen > 0, repetition_ref[row], 1.0)
                x = jnp.where(x > 0, x / factor, x * factor)
                return x - frequency_ref[row] * counts - jnp.where(counts > 0, presence_ref[row], 0.0)

            def apply_mask(x: jax.Array) -> jax.Array:
                bits = load_as(mask_ref, (row, part), layout.reduce(1), optimized=False, dtype=jnp.uint32)
                bits = plgpu.layout_cast(lax.broadcast_in_dim(bits, x.shape, (0,)), layout)
                shift = iota(x.shape, 1, layout).astype(jnp.uint32)
                return jnp.where((bits >> shift) & 1 == 1, x, -jnp.inf)

            for asks, step in ((is_biased, add_bias), (is_penalized, penalize), (is_masked, apply_mask)):
                x = lax.cond(asks, step, lambda x: x, x)
            logits_ref[row, part] = x

        @pl.when(is_biased | is_penalized | is_masked)
        def _() -> None:
            @pl.loop(0, jnp.minimum(PARTS, parts - first))
            def _(i: Any) -> None:
                change((first + i) * WORDS, WORDS)

            @pl.when(first + PARTS >= parts)
            def _() -> None:
                for end in range(0, rest, END):
                    change(parts * WORDS + end, END)

    held = jax.new_ref(logits.reshape(S, -1, WORD), memory_space=plgpu.GMEM)  # changed in place
    run: Any = pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(grid=(S, pl.cdiv(parts, PARTS)), grid_names=("row", "program")),
        compiler_params=BY_LANE,
        interpret=interpret,
        name="adjust_logits",
    )
    run(
        inputs.bias_ids, inputs.bias, inputs.slot, inputs.presence, inputs.frequency, inputs.repetition, inputs.mask,
        inputs.mask_until, inputs.position, history.reshape(-1, V // WORD, WORD), held,
    )  # fmt: skip
    return jax.freeze(held).reshape(S, V)


def _count(ids_ref: Any, row: Any) -> jax.Array:
    """Return how many ids there are: -1 is padding behind them."""
    most = ids_ref.shape[1]

    def is_id(i: jax.Array) -> jax.Array:
        return (i < most) & (ids_ref[row, jnp.minimum(i, most - 1)] >= 0)

    return lax.while_loop(is_id, lambda i: i + 1, jnp.int32(0))
