"""Sample tokens and their log-probabilities from logits in two kernels for NVIDIA GPUs (Pallas, Triton).

There is no sort, and no branch that waits for the host. A row's program does only what the row asks for.

`_adjust_kernel` skips the rows without bias, penalty or mask. `_draw_kernel`, a program per row, starts from the maxima
of blocks of tokens. To truncate, it looks first at the FEW blocks with the greatest maxima: they hold every token above
the greatest maximum of the others (the edge), and most thresholds lie above that. If one does not, passes over the row
narrow it down (`_search`). Thresholds are exact either way.

A draw has the reference's noise and formulas. A sum in another order, or a logarithm or quotient that the two compilers
round differently, may change last bits: one draw in many thousand then gives another token. Likewise a sum that is a
share of p to within rounding may put one token more or less into the nucleus.

S rows, V vocabulary, M = ceil(V / BLOCK) blocks. A row that is drawn from is scaled, to at most 0; a threshold in it is
searched for as its key, an int32 in the order of floats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dovetail.ops.kernels.gpu.keys import LOWEST, NONE, TOP, greatest, halve, key_of, value_of
from dovetail.ops.kernels.gpu.noise import BLOCK, COLDEST, Noise

# Tokens that a program adjusts at a time, 8 for each thread, and how often: few programs find nothing to do.
CHUNK, CHUNKS = 2048, 8
FEW = 64  # blocks that are looked at first
ROOM = FEW * BLOCK  # tokens that a program holds at once
WARPS = 16  # of a program that draws
# Tokens of a pass that a thread reads at once, and how many such reads are under way: more than one took 2 s longer to
# compile, for each of an engine's programs, to save some microseconds.
PER_THREAD, UNROLL = 8, 1
THRESHOLDS = 4  # tried in one pass over a row
GATHER = True  # whether a search ends in tokens that are held at once, or goes on by passes to the last bit

Scores = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnames=("top", "interpret"))  # traced once for programs with as many rows
def sample(
    logits: jax.Array,  # [S, V]
    inputs: Any,  # ops.sample.SampleInputs
    history: jax.Array,  # [N, V] int32
    top: int,
    interpret: bool = False,
) -> tuple[jax.Array, Scores]:
    """Sample as ops.sample.sample does. The logits are changed in place if the caller has no further use for them."""
    logits = adjust(logits.astype(jnp.float32), inputs, history, interpret)
    return draw(logits, block_maxima(logits), inputs, top, interpret=interpret)


def block_maxima(logits: jax.Array) -> jax.Array:
    """Return the maximum of each block [S, M]."""
    S, V = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    return jnp.max(padded.reshape(S, -1, BLOCK), axis=2)


# --- what a row asks of its logits ------------------------------------------------------------------------------------


def adjust(logits: jax.Array, inputs: Any, history: jax.Array, interpret: bool = False) -> jax.Array:
    """Adjust as ops.sample.adjust does."""
    S, V = logits.shape
    given = [
        inputs.bias_ids, inputs.bias, inputs.slot, inputs.presence, inputs.frequency, inputs.repetition, inputs.mask,
        inputs.mask_until, inputs.position, history, logits,
    ]  # fmt: skip
    return pl.pallas_call(
        _adjust_kernel,
        grid=(S, pl.cdiv(V, CHUNK * CHUNKS)),
        in_specs=[_whole(x) if x is history else _row_of(x) for x in given],
        out_specs=_row_of(logits),
        out_shape=jax.ShapeDtypeStruct((S, V), jnp.float32),
        input_output_aliases={len(given) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="adjust_logits",
    )(*given)


def _row_of(x: Any) -> pl.BlockSpec:
    """Return the block spec of a program's own row."""
    return pl.BlockSpec((1, *x.shape[1:]), lambda i, *_: (i, *(0,) * (len(x.shape) - 1)))


def _whole(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def _adjust_kernel(
    bias_ids_ref, bias_ref, slot_ref, presence_ref, frequency_ref, repetition_ref, mask_ref, until_ref, position_ref,
    history_ref, _, logits_ref,
):  # fmt: skip
    row, part, slot = 0, pl.program_id(1), slot_ref[0]
    is_biased, is_penalized = bias_ids_ref[row, 0] >= 0, slot < history_ref.shape[0]  # a row's bias is first
    is_masked = position_ref[row] < until_ref[row]

    def add_bias(at, x):
        lanes, width = jnp.arange(1 << (bias_ref.shape[1] - 1).bit_length()), bias_ref.shape[1]
        ids = plgpu.load(bias_ids_ref.at[row, lanes], mask=lanes < width, other=-1)
        count = jnp.sum((ids >= 0).astype(jnp.int32))
        return lax.fori_loop(0, count, lambda i, x: jnp.where(at == bias_ids_ref[row, i], x + bias_ref[row, i], x), x)

    def penalize(seen, x):
        counts = seen >> 1
        factor = jnp.where(seen > 0, repetition_ref[row], 1.0)
        x = jnp.where(x > 0, x / factor, x * factor)
        return x - frequency_ref[row] * counts - presence_ref[row] * (counts > 0).astype(jnp.float32)

    def apply_mask(at, x):
        words = plgpu.load(mask_ref.at[row, at // 32], mask=at // 32 < mask_ref.shape[1], other=0)
        return jnp.where((words >> (at % 32).astype(jnp.uint32)) & 1 == 1, x, -jnp.inf)

    def places(i):
        at = (part * CHUNKS + i) * CHUNK + jnp.arange(CHUNK)
        return at, at < logits_ref.shape[1]

    def read_history(i):
        at, inside = places(i)
        return plgpu.load(history_ref.at[slot, at], mask=inside & is_penalized, other=0)

    def change(i, seen):
        (at, inside), following = places(i), read_history(i + 1)  # in flight while these logits are changed
        # penalties change few logits of a row: the others are neither read nor written
        changed = inside & (is_biased | is_masked | (seen > 0))
        x = plgpu.load(logits_ref.at[row, at], mask=changed, other=0.0)
        x = lax.cond(is_biased, functools.partial(add_bias, at), lambda x: x, x)
        x = penalize(seen, x)
        x = lax.cond(is_masked, functools.partial(apply_mask, at), lambda x: x, x)
        plgpu.store(logits_ref.at[row, at], x, mask=changed)
        return following

    @pl.when(is_biased | is_penalized | is_masked)
    def _():
        lax.fori_loop(0, CHUNKS, change, read_history(0))


# --- a program per row ------------------------------------------------------------------------------------------------


def draw(
    logits: jax.Array,  # [S, V] f32
    maxima: jax.Array,  # [S, M]
    inputs: Any,
    top: int,
    *,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Scores]:
    """Return (tokens, scores) of adjusted logits, as ops.sample.sample does."""
    S, num_warps = len(logits), num_warps or WARPS
    given = [
        inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed_hi, inputs.seed_lo, inputs.position,
        inputs.top_logprobs, maxima, logits,
    ]  # fmt: skip
    listed = (S, max(1, top))
    shapes = [((S,), jnp.int32), ((S,), jnp.float32), ((S,), jnp.int32), (listed, jnp.float32), (listed, jnp.int32)]
    notes = [((S, FEW), jnp.int32), ((S, max(ROOM, maxima.shape[1])), jnp.float32)]  # a program's own
    out_shape = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes + notes]
    tokens, value, rank, values, ids, *_ = pl.pallas_call(
        functools.partial(_draw_kernel, top=top, part=32 * PER_THREAD * num_warps, interpret=interpret),
        grid=(S,),
        in_specs=[_row_of(x) for x in given],
        out_specs=[_row_of(x) for x in out_shape],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="draw_tokens",
    )(*given)
    return tokens, (value, rank, values[:, :top], ids[:, :top])


def _draw_kernel(
    temperature_ref, k_ref, p_ref, min_p_ref, hi_ref, lo_ref, position_ref, wanted_ref, maxima_ref, logits_ref,
    token_ref, value_ref, rank_ref, values_ref, ids_ref, few_ref, room_ref,
    *, top: int, part: int, interpret: bool,
):  # fmt: skip
    row, count = 0, maxima_ref.shape[1]
    blocks = jnp.arange(1 << (count - 1).bit_length())
    maxima = plgpu.load(maxima_ref.at[row, blocks], mask=blocks < count, other=-jnp.inf)
    best = jnp.max(maxima)
    line = _Line(
        logits_ref, few_ref, room_ref, row, jnp.where(best > -jnp.inf, best, 0.0),
        jnp.maximum(temperature_ref[row], COLDEST), part, interpret,
    )  # fmt: skip

    def draw_one():
        keys = jnp.where(blocks < count, key_of(line.scale(maxima)), NONE)
        noise = Noise(hi_ref[row], lo_ref[row], position_ref[row])
        return _draw(line, keys, count, noise, k_ref[row], p_ref[row], min_p_ref[row])

    def likeliest():
        block = jnp.argmax(maxima)
        return block * BLOCK + jnp.argmax(line.read(block * BLOCK + jnp.arange(BLOCK)))

    # of a row with nothing left to draw, the reference too takes the first
    token = lax.cond((temperature_ref[row] > 0) & (best > -jnp.inf), draw_one, likeliest).astype(jnp.int32)
    token_ref[row] = token
    wanted = wanted_ref[row]

    def score():
        total, rank = _score(line, token)
        keys = jnp.where(blocks < count, key_of(maxima), NONE)
        _list(line, keys, jnp.minimum(wanted, top), total, values_ref, ids_ref)
        return logits_ref[row, token] - total, rank

    value_ref[row], rank_ref[row] = _if(wanted >= 0, score, (jnp.float32(0), jnp.int32(0)))
    lanes = jnp.arange(1 << (ids_ref.shape[1] - 1).bit_length())
    rest = (lanes >= wanted) & (lanes < ids_ref.shape[1])
    where = jnp.where(rest, lanes, ids_ref.shape[1])  # what is not stored has a place past the end
    plgpu.store(values_ref.at[row, where], jnp.zeros(lanes.shape, jnp.float32), mask=rest)
    plgpu.store(ids_ref.at[row, where], jnp.zeros(lanes.shape, jnp.int32), mask=rest)


@dataclass(frozen=True)
class _Line:
    """Access a program's row of the logits; scaled, it is at most 0."""

    ref: Any  # [S, V]
    few_ref: Any  # [S, FEW]
    room_ref: Any  # [S, ROOM or more]
    row: Any
    top: Any  # the greatest logit
    heat: Any
    part: int  # tokens at a time
    interpret: bool

    @property
    def size(self) -> int:
        return self.ref.shape[1]

    def read(self, at: jax.Array) -> jax.Array:
        return plgpu.load(self.ref.at[self.row, at], mask=at < self.size, other=-jnp.inf)

    def scale(self, logits: jax.Array) -> jax.Array:
        return (logits - self.top) / self.heat

    def fold(self, add: Callable, carry: Any, in_blocks: bool = False, unroll: int | None = None) -> Any:
        """Compute carry = add(first token, logits, carry) over the row by parts [part], or [part / BLOCK, BLOCK]."""
        within = _places(jnp.arange(self.part // BLOCK)) if in_blocks else jnp.arange(self.part)
        unroll = unroll or UNROLL

        def turn(i, carry):
            starts = [(i * unroll + u) * self.part for u in range(unroll)]
            read = [(start, self.read(start + within)) for start in starts]  # all before the first use
            for start, logits in read:
                carry = add(start, logits, carry)
            return carry

        return lax.fori_loop(0, pl.cdiv(self.size, self.part * unroll), turn, carry)

    def wait(self) -> None:
        """Wait until every thread of the program has stored what the others will load."""
        if not self.interpret:
            plgpu.debug_barrier()


def _if(asked: jax.Array, branch: Callable, otherwise: Any) -> Any:
    """Branch; a branch that returns a constant does not lower, so `otherwise` is disguised."""
    otherwise = jax.tree.map(lambda x: jnp.where(asked, x, x), otherwise)
    return lax.cond(asked, branch, lambda: otherwise)


def _places(blocks: jax.Array) -> jax.Array:
    """Return the tokens of blocks: [n] -> [n, BLOCK]."""
    return blocks[:, None] * BLOCK + jnp.arange(BLOCK)[None, :]


# --- truncation -------------------------------------------------------------------------------------------------------


def _truncate(line: _Line, block_keys: jax.Array, k: jax.Array, p: jax.Array, min_p: jax.Array):
    """Return (floor, least, edge, blocks).

    A token stays if its key is at least the floor and its exponential at least `least`; the first `blocks` of `few_ref`
    are the blocks with a token above the edge.
    """
    edge, number = _first_blocks(line, block_keys)
    place = jnp.arange(ROOM)
    filled = place // BLOCK < number
    block = plgpu.load(line.few_ref.at[line.row, place // BLOCK], mask=filled, other=0)
    scaled = line.scale(line.read(jnp.where(filled, block * BLOCK + place % BLOCK, line.size)))
    weights = jnp.exp(scaled)

    def find(target, floor, by_mass: bool):
        """Return the greatest key with at least this many tokens, or this much weight, at or above it."""

        def reach(key):
            return jnp.sum(jnp.where(scaled >= value_of(key), weights if by_mass else 1.0, 0.0))

        first = jnp.maximum(floor, edge + 1)  # of the tokens below it, some are in other blocks
        held, above = reach(first), jnp.sum((scaled >= value_of(first)).astype(jnp.int32))
        return lax.cond(
            held >= target,
            lambda: greatest(lambda key: reach(key) >= target, first, jnp.int32(TOP + 1)),
            lambda: _search(line, target, floor, first, held, above, by_mass),
        )

    def keep_p(floor):
        few = jnp.sum(jnp.where(scaled >= value_of(floor), weights, 0.0))
        total = _if(floor <= edge, lambda: _mass(line, floor), few)
        return jnp.exp(value_of(find(p * total, floor, True)))

    lowest = jnp.int32(LOWEST)
    by_k = _if((k > 0) & (k < line.size), lambda: find(k.astype(jnp.float32), lowest, False), lowest)
    floor = jnp.maximum(key_of(jnp.log(min_p)), by_k)
    return floor, _if(p < 1, lambda: keep_p(floor), jnp.float32(0)), edge, number


def _first_blocks(line: _Line, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the edge and the number of blocks: up to FEW with the greatest maxima, written to `few_ref` by id."""

    def too_many(key):
        return jnp.sum((keys >= key).astype(jnp.int32)) > FEW

    # a cutoff that is a little high leaves out a block or two: half the bits are enough
    all_fit = ~too_many(jnp.int32(LOWEST))
    cutoff = halve(too_many, jnp.int32(LOWEST), jnp.int32(TOP + 1), 18)[1]
    chosen = keys >= jnp.where(all_fit, LOWEST, cutoff)
    place = jnp.where(chosen, lax.cumsum(chosen.astype(jnp.int32)) - 1, FEW)
    plgpu.store(line.few_ref.at[line.row, place], jnp.arange(keys.shape[0]), mask=chosen)
    line.wait()
    return jnp.max(jnp.where(chosen, NONE, keys)), jnp.sum(chosen.astype(jnp.int32))


def _mass(line: _Line, floor: jax.Array) -> jax.Array:
    def add(_, logits, total):
        scaled = line.scale(logits)
        return total + jnp.where(scaled >= value_of(floor), jnp.exp(scaled), 0.0)

    return jnp.sum(line.fold(add, jnp.zeros(line.part, jnp.float32)))


def _search(line: _Line, target, low, high, held, above, by_mass: bool) -> jax.Array:
    """Return the greatest key in [low, high) with `target` tokens, or as much weight, at or above it.

    Low is assumed to have it.

    At or above high there is `held`, in `above` tokens, which is less. Each pass tries several keys between the two,
    until the tokens between fit in registers.
    """

    def goes_on(state):
        low, high, _, above, below = state
        return (high - low > 1) & ((below - above > ROOM) if GATHER else True)

    def narrow(state):
        low, high, held, above, below = state
        step = jnp.maximum((high - low) // (THRESHOLDS + 1), 1)
        keys = [jnp.minimum(low + i * step, high - 1) for i in range(1, THRESHOLDS + 1)]

        def add(_, logits, sums):
            scaled = line.scale(logits)
            over = [scaled >= value_of(key) for key in keys]
            counts = [count + x.astype(jnp.int32) for count, x in zip(sums[0], over, strict=True)]
            if not by_mass:
                return counts, []
            weight = jnp.exp(scaled)
            return counts, [mass + jnp.where(x, weight, 0.0) for mass, x in zip(sums[1], over, strict=True)]

        zeros = [[jnp.zeros(line.part, dtype)] * THRESHOLDS for dtype in (jnp.int32, jnp.float32)]
        counts, masses = line.fold(add, (zeros[0], zeros[1] if by_mass else []), unroll=2)
        counts = [jnp.sum(count) for count in counts]
        sums = [jnp.sum(mass) for mass in masses] if by_mass else [count.astype(jnp.float32) for count in counts]
        for key, count, total in zip(keys, counts, sums, strict=True):
            low, below = (jnp.where(total >= target, new, old) for new, old in ((key, low), (count, below)))
        for new in reversed(list(zip(keys, sums, counts, strict=True))):
            short = new[1] < target
            high, held, above = (jnp.where(short, x, old) for x, old in zip(new, (high, held, above), strict=True))
        return low, high, held, above, below

    # In a while loop the compiler would forget how the logits are aligned. So many passes would find any key.
    passes = math.ceil(31 / math.log2(THRESHOLDS + 1)) + 3
    state = low, high, held, above, jnp.int32(line.size)
    state = lax.fori_loop(0, passes, lambda _, state: _if(goes_on(state), lambda: narrow(state), state), state)
    low, high, held, *_ = state
    if not GATHER:
        return low
    return _if(high - low > 1, lambda: _search_held(line, target, low, high, held, by_mass), low)


def _search_held(line: _Line, target, low, high, held, by_mass: bool) -> jax.Array:
    """Search as `_search` does, if the tokens with keys in [low, high) are no more than ROOM."""

    def gather(start, logits, number):
        scaled = line.scale(logits)
        inside = start + jnp.arange(line.part) < line.size
        chosen = (scaled >= value_of(low)) & (scaled < value_of(high)) & inside
        place = jnp.where(chosen, number + lax.cumsum(chosen.astype(jnp.int32)) - 1, line.room_ref.shape[1])
        plgpu.store(line.room_ref.at[line.row, place], scaled, mask=chosen)
        return number + jnp.sum(chosen.astype(jnp.int32))

    line.wait()  # what an earlier search held has been read
    number = line.fold(gather, jnp.int32(0))
    line.wait()
    lanes = jnp.arange(ROOM)
    scaled = plgpu.load(line.room_ref.at[line.row, lanes], mask=lanes < number, other=-jnp.inf)
    weights = jnp.exp(scaled) if by_mass else 1.0
    return greatest(lambda key: held + jnp.sum(jnp.where(scaled >= value_of(key), weights, 0.0)) >= target, low, high)


# --- the draw ---------------------------------------------------------------------------------------------------------


def _draw(line: _Line, block_keys: jax.Array, count: int, noise: Noise, k, p, min_p) -> jax.Array:
    """Draw a token, as ops.sample.gumbel_argmax does after truncate: a block by its weight, then a token of it."""
    truncates = (min_p > 0) | ((k > 0) & (k < line.size)) | (p < 1)
    everything = jnp.int32(LOWEST), jnp.float32(0), jnp.int32(TOP), jnp.int32(0)
    floor, least, edge, number = _if(truncates, lambda: _truncate(line, block_keys, k, p, min_p), everything)

    def weigh(logits):
        scaled = line.scale(logits)
        weight = jnp.exp(scaled)
        kept = (scaled >= value_of(floor)) & (weight >= least)
        return jnp.where(kept, scaled, -jnp.inf), jnp.where(kept, weight, 0.0)

    def from_few():
        lanes = jnp.arange(FEW)
        blocks = plgpu.load(line.few_ref.at[line.row, lanes], mask=lanes < number, other=count)
        mass = jnp.sum(weigh(line.read(_places(blocks)))[1], axis=1)
        chosen = jnp.argmax(jnp.where(lanes < number, jnp.log(mass) + noise.at(blocks), -jnp.inf))
        return jnp.sum(jnp.where(lanes == chosen, blocks, 0))

    def from_all():
        def weigh_blocks(start, logits, carry):
            blocks = start // BLOCK + jnp.arange(line.part // BLOCK)
            place = jnp.where(blocks < count, blocks, line.room_ref.shape[1])
            plgpu.store(line.room_ref.at[line.row, place], jnp.sum(weigh(logits)[1], axis=1), mask=blocks < count)
            return carry

        line.wait()  # what a search held has been read
        line.fold(weigh_blocks, jnp.int32(0), in_blocks=True)
        line.wait()
        # the noise once a block, and not in each thread that has a part of one
        blocks = jnp.arange(block_keys.shape[0])
        mass = plgpu.load(line.room_ref.at[line.row, blocks], mask=blocks < count, other=0.0)
        return jnp.argmax(jnp.log(mass) + noise.at(blocks))

    few = (floor > edge) | (jnp.exp(value_of(edge)) < least)  # whether no other block has a token that stays
    block = lax.cond(few, from_few, from_all)
    lanes = jnp.arange(BLOCK)
    scaled, _ = weigh(line.read(block * BLOCK + lanes))
    return block * BLOCK + jnp.argmax(scaled + noise.at(count + lanes))


# --- log-probabilities ------------------------------------------------------------------------------------------------


def _score(line: _Line, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logsumexp of the row and the token's rank."""
    chosen = line.ref[line.row, token]

    def add(_, logits, carry):
        return carry[0] + jnp.exp(logits - line.top), carry[1] + (logits > chosen).astype(jnp.int32)

    zeros = jnp.zeros(line.part, jnp.float32), jnp.zeros(line.part, jnp.int32)
    weights, greater = line.fold(add, zeros)
    return jnp.log(jnp.sum(weights)) + line.top, 1 + jnp.sum(greater)


def _list(line: _Line, keys: jax.Array, number: jax.Array, total: jax.Array, values_ref, ids_ref) -> None:
    """Store the most probable tokens, the lower id first among equals.

    keys [M] are those of the greatest token in each block that has not been listed.
    """
    blocks, lanes = jnp.arange(keys.shape[0]), jnp.arange(BLOCK)

    def left(tokens, at, last, last_id):
        return jnp.where((tokens < last) | ((tokens == last) & (at > last_id)), tokens, NONE)

    def turn(i, carry):
        keys, last, last_id = carry
        key, block = jnp.max(keys), jnp.argmax(keys)
        at = block * BLOCK + lanes
        tokens = jnp.where(at < line.size, key_of(line.read(at)), NONE)
        token = jnp.min(jnp.where(left(tokens, at, last, last_id) == key, at, line.size - 1))
        values_ref[line.row, i], ids_ref[line.row, i] = value_of(key) - total, token
        return jnp.where(blocks == block, jnp.max(left(tokens, at, key, token)), keys), key, token

    lax.fori_loop(0, number, turn, (keys, jnp.int32(2**31 - 1), jnp.int32(-1)))
