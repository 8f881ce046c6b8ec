"""Sample tokens from logits: penalties, bias, masks, temperature, truncation, the draw, and log-probabilities.

Pure, exact functions of arrays without host state. The order is vLLM's: bias, penalties, mask (`adjust`); then
temperature, min-p, top-k, and top-p over what those leave (`choose`). A row draws from its own (seed, position) alone,
so that its tokens do not depend on its row, its batch or its neighbours.

One program serves every kind of request: expensive parts are under a branch on whether any row needs them. On an NVIDIA
GPU, where a branch waits for the host, kernels replace all of it (ops.kernels.gpu.sample, and
ops.kernels.gpu.mosaic.sample for Hopper).

S rows, V vocabulary, W = ceil(V / 32) words of mask, B biased tokens per row, N slots of the history table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from dovetail.core.mesh import Placement, constrain
from dovetail.ops.dispatch import sample_kernel

BLOCK = 128  # tokens that are looked at as one
FOREVER = 2**31 - 1  # a mask_until that never comes
COLDEST = 1e-5  # a temperature above 0 counts as at least this: less would be rounded to 0 on the way


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """Hold the sampling parameters of each of S rows."""

    temperature: jax.Array  # [S] f32; 0: the most probable token
    seed_hi: jax.Array  # [S] uint32
    seed_lo: jax.Array  # [S] uint32
    position: jax.Array  # [S] int32: where in its sequence the token that is sampled will stand
    top_k: jax.Array  # [S] int32; 0: off
    top_p: jax.Array  # [S] f32; 1: off
    min_p: jax.Array  # [S] f32; 0: off
    slot: jax.Array  # [S] int32: the row's place in the history table; N: it keeps none
    presence: jax.Array  # [S] f32; 0: off
    frequency: jax.Array  # [S] f32; 0: off
    repetition: jax.Array  # [S] f32; 1: off
    bias_ids: jax.Array  # [S, B] int32, each once, in front; -1: padding
    bias: jax.Array  # [S, B] f32
    mask: jax.Array  # [S, W] uint32; a set bit allows its token
    mask_until: jax.Array  # [S] int32: the mask holds at positions below this; 0: no mask
    top_logprobs: jax.Array  # [S] int32: how many of the most probable tokens get log-probabilities; -1: none at all


def advance(inputs: SampleInputs, steps: jax.Array | int = 1) -> SampleInputs:
    """Return the inputs of a later step of a loop on the device: the seed stays, the position advances."""
    return replace(inputs, position=inputs.position + steps)


# --- what a row asks of its logits ------------------------------------------------------------------------------------


def penalize(
    logits: jax.Array,  # [S, V]
    counts: jax.Array,  # [S, V] int32: how often each token is in the output
    in_prompt: jax.Array,  # [S, V] bool
    presence: jax.Array,  # [S]
    frequency: jax.Array,  # [S]
    repetition: jax.Array,  # [S]
) -> jax.Array:
    """Apply OpenAI's presence and frequency penalties (output), and the repetition penalty (prompt and output)."""
    seen = (counts > 0) | in_prompt
    factor = jnp.where(seen, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Add values [S, B] to the tokens ids [S, B]; an id of -1 is padding."""
    S, V = logits.shape
    ids = jnp.where(ids < 0, V, ids)  # past the end, where it is dropped: a negative index would count from behind
    return logits.at[jnp.arange(S)[:, None], ids].add(values, mode="drop")


def apply_mask(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Set tokens whose bit in [S, W] is not set to -inf.

    Token v is bit v % 32 of word v // 32 (llguidance's layout).
    """
    return jnp.where(unpack(bits, logits.shape[1]), logits, -jnp.inf)


def unpack(bits: jax.Array, V: int) -> jax.Array:
    """Map [..., W] uint32 to [..., V] bool."""
    spread = bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)  # [..., W, 32]
    return (spread & 1).reshape(*bits.shape[:-1], -1)[..., :V] == 1


def adjust(logits: jax.Array, inputs: SampleInputs, history: jax.Array) -> jax.Array:
    """Return logits [S, V] in f32 with bias, penalties from the history table [N, V], and mask.

    `choose` and `score` both take these, so that the greedy token is always the most probable one.
    """
    logits = logits.astype(jnp.float32)
    asks = (inputs.bias_ids[:, 0] >= 0) | (inputs.slot < history.shape[0]) | (inputs.position < inputs.mask_until)
    return lax.cond(jnp.any(asks), lambda logits: _adjust(logits, inputs, history), lambda logits: logits, logits)


def _adjust(logits: jax.Array, inputs: SampleInputs, history: jax.Array) -> jax.Array:
    logits = add_bias(logits, inputs.bias_ids, inputs.bias)
    rows = history.at[inputs.slot].get(mode="fill", fill_value=0)  # [S, V]
    logits = penalize(logits, rows >> 1, rows & 1 == 1, inputs.presence, inputs.frequency, inputs.repetition)
    masked = apply_mask(logits, inputs.mask)
    return jnp.where((inputs.position < inputs.mask_until)[:, None], masked, logits)


def count_tokens(history: jax.Array, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the history table [N, V] with tokens [S] sampled for slots [S] counted; a slot of N is left out.

    An entry is 2 * (times in the output) + (1 if in the prompt): one table, updated in place.
    """
    return history.at[slots, tokens].add(2, mode="drop")


# --- truncation -------------------------------------------------------------------------------------------------------


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set the tokens that each row's min_p, top_k and then top_p [S] exclude to -inf; logits [S, V] after temperature.

    min_p: at least min_p times as probable as the most probable. top_k: the k greatest logits. top_p: the smallest set
    of most probable tokens whose share of what the first two left reaches p, and at least one. Each is exact, and ties
    with the last included token are included: only its index tells it apart.

    The vocabulary is not sorted: a threshold is found bit by bit, with one count or sum over the row per bit.
    """
    V = logits.shape[1]
    logits = lax.cond(jnp.any(min_p > 0), _keep_min_p, lambda logits, _: logits, logits, min_p)
    logits = lax.cond(jnp.any((top_k > 0) & (top_k < V)), _keep_top_k, lambda logits, _: logits, logits, top_k)
    return lax.cond(jnp.any(top_p < 1), _keep_top_p, lambda logits, _: logits, logits, top_p)


def _keep_min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    return jnp.where(logits >= _top(logits) + jnp.log(min_p)[:, None], logits, -jnp.inf)


def _keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    V, order = logits.shape[1], _ordered(logits)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
    least = _greatest(lambda t: jnp.sum(order >= t[:, None], axis=1, dtype=jnp.int32) >= k, len(order), bits=32)
    return jnp.where(order >= least[:, None], logits, -jnp.inf)


def _keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    weight = jnp.exp(logits - _top(logits))  # [S, V] in [0, 1]: there the bits of a float, below 2^30, are in its order
    target = top_p * jnp.sum(weight, axis=1)

    def at_least(t: jax.Array) -> jax.Array:
        return weight >= lax.bitcast_convert_type(t, jnp.float32)[:, None]

    # Rounding cannot mislead the search: a sum of the same terms in the same order never falls when one of them rises.
    least = _greatest(lambda t: jnp.sum(jnp.where(at_least(t), weight, 0), axis=1) >= target, len(logits), bits=30)
    return jnp.where(at_least(least) | (top_p >= 1)[:, None], logits, -jnp.inf)


def _greatest(holds: Callable[[jax.Array], jax.Array], S: int, bits: int) -> jax.Array:
    """Return per row the greatest t [S] uint32 for which `holds`, which is monotonic; 0 if there is none."""

    def decide_bit(i: jax.Array, t: jax.Array) -> jax.Array:
        trial = t | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(trial), trial, t)

    return lax.fori_loop(0, bits, decide_bit, jnp.zeros(S, jnp.uint32))


def _ordered(x: jax.Array) -> jax.Array:
    """Return uint32 in the order of the floats: negative ones have all bits inverted, the others only the sign."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0.0 equals 0.0 and must tie with it
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _top(logits: jax.Array) -> jax.Array:
    """Return the greatest of each row [S, 1]; 0 if every token is masked, so that nothing becomes NaN."""
    top = jnp.max(logits, axis=1, keepdims=True)
    return jnp.where(jnp.isneginf(top), 0.0, top)


# --- the draw ---------------------------------------------------------------------------------------------------------


def argmax(logits: jax.Array, placement: Placement | None = None) -> jax.Array:
    """Return the greatest of each row [S, V], the lowest id among equals.

    It works in blocks: on a CPU XLA's maximum takes a tenth of its argmax's time or less (64 x 49k: 0.6 ms against 20
    ms), and the argmax then has one block to search.
    """
    blocks = _blocks(logits, placement)
    return _within(blocks, jnp.argmax(jnp.max(blocks, axis=2), axis=1), 0.0)


def gumbel_argmax(logits: jax.Array, inputs: SampleInputs, placement: Placement | None = None) -> jax.Array:
    """Draw one token per row from softmax(logits [S, V]); the noise is a function of (seed, position) [S] alone.

    The maximum of a block's logits with Gumbel noise is itself Gumbel, about the block's logsumexp. So a block is drawn
    first, then a token of it: the same distribution with V / BLOCK + BLOCK random numbers instead of V.
    """
    blocks = _blocks(logits, placement)
    count = -(-logits.shape[1] // BLOCK)  # over several devices there are empty blocks behind these

    def draw(hi: jax.Array, lo: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([hi, lo]), impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), (count + BLOCK,), jnp.uint32)

    bits = jax.vmap(draw)(inputs.seed_hi, inputs.seed_lo, inputs.position)
    noise = _gumbel(constrain(bits, placement, None, None))  # [S, V / BLOCK + BLOCK], all of it on each device
    mass = jnp.log(jnp.sum(jnp.exp(blocks - _top(logits)[:, :, None]), axis=2))
    of_blocks = jnp.pad(noise[:, :count], ((0, 0), (0, mass.shape[1] - count)))
    return _within(blocks, jnp.argmax(mass + of_blocks, axis=1), noise[:, count:])


def _gumbel(bits: jax.Array) -> jax.Array:
    """Return Gumbel noise from uint32.

    The winner has u near 0, where 32 bits are as fine as 2^-32; in jax.random.gumbel it is near 1, in steps of 2^-24.
    """
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def _blocks(logits: jax.Array, placement: Placement | None) -> jax.Array:
    """Map [S, V] to [S, V / BLOCK, BLOCK].

    V is padded with impossible tokens so that each device has whole blocks: only the edges of the devices' shares move.
    """
    S, V = logits.shape
    each = BLOCK * (placement.size("vocab") if placement else 1)
    padded = jnp.pad(logits, ((0, 0), (0, -V % each)), constant_values=-jnp.inf)
    return constrain(padded.reshape(S, -1, BLOCK), placement, None, "vocab", None)


def _within(blocks: jax.Array, block: jax.Array, noise: jax.Array | float) -> jax.Array:
    """Return the token of the greatest logit with noise [S, BLOCK] in each row's block [S]."""
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [S, BLOCK]
    return (block * BLOCK + jnp.argmax(chosen + noise, axis=1)).astype(jnp.int32)


def choose(logits: jax.Array, inputs: SampleInputs, placement: Placement | None = None) -> jax.Array:
    """Return tokens [S] from adjusted logits [S, V]: the most probable one at temperature 0, else one that is drawn."""
    greedy = argmax(logits, placement)

    def draw(logits: jax.Array) -> jax.Array:
        # From the top down: however low the temperature, nothing overflows and the most probable stays at 0.
        scaled = (logits - _top(logits)) / jnp.maximum(inputs.temperature, COLDEST)[:, None]
        scaled = truncate(scaled, inputs.top_k, inputs.top_p, inputs.min_p)
        drawn = gumbel_argmax(scaled, inputs, placement)
        return jnp.where(inputs.temperature > 0, drawn, greedy)

    return lax.cond(jnp.any(inputs.temperature > 0), draw, lambda _: greedy, logits)


# --- log-probabilities ------------------------------------------------------------------------------------------------

Scores = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def logprobs(logits: jax.Array, tokens: jax.Array, k: int) -> Scores:
    """Return the scores of tokens [S].

    They are the log-probability [S], the rank [S] (1 is the most probable), and the k most probable tokens'
    log-probabilities [S, k] and ids [S, k], most probable first, the lower id first among equals.
    """
    return score(logits.astype(jnp.float32), tokens, jnp.full(len(logits), k, jnp.int32), k)


def score(logits: jax.Array, tokens: jax.Array, wanted: jax.Array, top: int) -> Scores:
    """Return `logprobs` with as many most probable tokens as each row wants [S], up to `top`.

    -1 means not even the token's own. What is not wanted is 0.
    """
    S = len(logits)

    def own(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        rank = 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)
        asks = wanted >= 0
        return jnp.where(asks, (chosen - total)[:, 0], 0.0), jnp.where(asks, rank, 0), total

    def listed(logits: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, top)
        asks = jnp.arange(top) < wanted[:, None]
        return jnp.where(asks, values - total, 0.0), jnp.where(asks, ids, 0)

    no_own = jnp.zeros(S), jnp.zeros(S, jnp.int32), jnp.zeros((S, 1))
    none_listed = jnp.zeros((S, top)), jnp.zeros((S, top), jnp.int32)
    value, rank, total = lax.cond(jnp.any(wanted >= 0), own, lambda _: no_own, logits)
    if top == 0:
        return value, rank, *none_listed
    return value, rank, *lax.cond(jnp.any(wanted > 0), listed, lambda *_: none_listed, logits, total)


# --- all of it --------------------------------------------------------------------------------------------------------


def sample(
    logits: jax.Array,  # [S, V]
    inputs: SampleInputs,
    history: jax.Array,  # [N, V] int32: see count_tokens
    top: int,
    platform: str | None = None,
    placement: Placement | None = None,
) -> tuple[jax.Array, Scores]:
    """Return (tokens [S], their scores) from the model's logits.

    The scores are of the adjusted logits, as from `score` with `top_logprobs` and `top`.
    """
    if kernel := sample_kernel(platform, placement):
        return kernel(logits, inputs, history, top)
    logits = adjust(logits, inputs, history)
    tokens = choose(logits, inputs, placement)
    return tokens, score(logits, tokens, inputs.top_logprobs, top)
