"""Adjust logits in place by bias, penalties and masks, for Hopper (Pallas, Mosaic GPU), written thread by thread.

Rows that ask for nothing are neither read nor written, and of a row with penalties alone no tokens but those that it
has seen.

S rows, V vocabulary, W = ceil(V / 32) words, B biased tokens per row, N slots of the history table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.row_ops import RowThreads
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, Number

EACH = 16  # tokens of a thread
PART = EACH * THREADS
PROGRAMS = 4 * 132  # that run at once: with more parts, a program takes several


class AdjustSizes(NamedTuple):
    """Describe the arrays: the logits of a row are `width` numbers, of which the first V are tokens."""

    V: int
    width: int
    words: int
    biased: int
    slots: int
    per: int  # parts of a program

    @property
    def programs(self) -> int:
        """Return the programs of a row."""
        return pl.cdiv(self.V, PART * self.per)


def adjust(logits: jax.Array, inputs: Any, history: jax.Array) -> jax.Array:
    """Adjust f32 logits [S, V], with anything behind the V tokens, as ops.sample.adjust does."""
    held = jax.new_ref(logits, memory_space=plgpu.GMEM)  # changed in place
    _change_rows(given_of(inputs, history), held, len(logits), sizes_of(logits, inputs, history))
    return jax.freeze(held)


def sizes_of(logits: jax.Array, inputs: Any, history: jax.Array) -> AdjustSizes:
    """Return the sizes of arrays."""
    (S, width), (slots, V) = logits.shape, history.shape
    per = pl.cdiv(S * pl.cdiv(V, PART), PROGRAMS)
    return AdjustSizes(V, width, inputs.mask.shape[1], inputs.bias_ids.shape[1], slots, per)


def given_of(inputs: Any, history: jax.Array) -> list:
    """Return what the kernel reads, as `change` takes it."""
    return [
        inputs.bias_ids, inputs.bias, inputs.slot, inputs.presence, inputs.frequency, inputs.repetition, inputs.mask,
        inputs.mask_until, inputs.position, history,
    ]  # fmt: skip


def _change_rows(given: list, held: Any, S: int, sizes: AdjustSizes) -> None:
    """Run the programs of S rows on the logits `held`."""

    def entry(*refs: Any) -> None:
        def body(bias_ref: Any) -> None:
            every = [*refs, bias_ref]

            @plgpu.inline_mgpu(arg_types=([plgpu.Layout.WG_SPLAT(())] * 2, [plgpu.RefType()] * len(every)))
            def run(_: Any, numbers: list, every: list) -> None:
                change(FourWarps(), *(Number(x.registers.flat[0]) for x in numbers), *every, sizes=sizes)

            run([lax.axis_index("row"), lax.axis_index("program")], every)  # pyright: ignore[reportCallIssue]

        pl.run_scoped(body, plgpu.SMEM((PART,), jnp.float32))

    kernel: Any = pl.kernel(
        entry,
        out_type=(),
        mesh=plgpu.Mesh(grid=(S, sizes.programs), grid_names=("row", "program")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="adjust_logits",
    )
    kernel(*given, held)


class FourWarps(RowThreads):
    """Write the operations of a thread of four warps."""

    def barrier(self) -> None:
        """Wait for the threads of the program, and for what they wrote to shared memory."""
        self._ask(f"bar.sync 1, {THREADS};", [])


def change(
    on: Any, row: Any, program: Any, ids: Any, bias: Any, slot: Any, presence: Any, frequency: Any, repetition: Any,
    mask: Any, until: Any, position: Any, history: Any, logits: Any, added: Any, *, sizes: AdjustSizes,
) -> None:  # fmt: skip
    """Change the logits of a program's parts of a row; `added` is shared memory for the bias of a part."""
    own_slot = on.load(slot, row)
    is_biased = on.load(ids, row * sizes.biased) > -1  # a row's bias is first
    is_penalized = own_slot < sizes.slots
    is_masked = on.load(position, row) < on.load(until, row)
    whole = on.select(is_biased, 1, on.select(is_masked, on.integer(1), 0))
    slot_row = on.select(is_penalized, own_slot, 0)

    def read(ref: Any, ref_row: Any, width: int, columns: list, where: list, otherwise: Any) -> list:
        return [on.load_where(ref, ref_row, width, *each, otherwise) for each in zip(columns, where, strict=True)]

    def change_part(i: Any, carry: Any) -> Any:
        first = (program * sizes.per + i) * PART
        tokens = [first + on.thread + i * THREADS for i in range(EACH)]
        inside = [token < sizes.V for token in tokens]
        seen = read(history, slot_row, sizes.V, tokens, [x & is_penalized for x in inside], on.integer(0))
        of_words = [token // 32 for token in tokens]
        words = read(mask, row, sizes.words, of_words, [x & is_masked for x in inside], on.integer(-1))
        changed = [x & (on.select(n > 0, on.integer(1), whole) > 0) for n, x in zip(seen, inside, strict=True)]
        found = read(logits, row, sizes.width, tokens, changed, on.constant(0.0))
        found = on.branch(is_biased, lambda xs: _biased(on, row, first, ids, bias, added, xs, sizes), found)
        factors = [on.load(ref, row) for ref in (presence, frequency, repetition)]
        for token, x, count, word, where in zip(tokens, found, seen, words, changed, strict=True):
            x = _penalized(on, x, count, *factors)
            x = on.select((word >> token % 32) & 1 > 0, x, float("-inf"))
            on.store_where(logits, row, sizes.width, token, x, where)
        return carry

    count = on.select(is_penalized, on.integer(1), whole) * sizes.per
    on.loop(on.integer(0), count, 1, change_part, on.integer(0))


def _biased(on: Any, row: Any, first: Any, ids: Any, bias: Any, added: Any, found: list, sizes: AdjustSizes) -> list:
    """Return the logits with the bias, which the threads spread over shared memory."""
    for i in range(EACH):
        on.store(added, on.thread + i * THREADS, on.constant(0.0))
    on.barrier()
    for i in range(-(-sizes.biased // THREADS)):
        number = on.at_most(on.thread + i * THREADS, sizes.biased - 1)
        place = on.load(ids, row * sizes.biased + number) - first
        value = on.load(bias, row * sizes.biased + number)
        is_here = (on.thread + i * THREADS < sizes.biased) & (place > -1) & (place < PART)
        on.store(added, on.select(is_here, place, 0), value, is_here)
    on.barrier()
    return [x + on.load(added, on.thread + i * THREADS) for i, x in enumerate(found)]


def _penalized(on: Any, x: Any, seen: Any, presence: Any, frequency: Any, repetition: Any) -> Any:
    """Return a logit with penalties by its entry of the history table."""
    counts = on.number(seen >> 1)
    factor = on.select(seen > 0, repetition, 1.0)
    x = on.select(on.as_integer(x) > 0, x / factor, x * factor)
    return x - frequency * counts - on.select(seen > 1, presence, 0.0)
