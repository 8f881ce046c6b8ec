"""Sampler: from the SamplingParams of sequences to the arrays that dovetail.ops.sample reads.

What is computed where:
- On the device, in a loop of any number of steps: temperature, truncation, seed (fixed), position (one more per step),
  bias, a constant mask (allowed_token_ids, one-token bad words), min_tokens alone (a mask with an end), and penalties.
  The penalties' counts are a table [slots, V] on the device: when a sequence takes its slot, the host sends its tokens
  and their counts, and each sampled token is added there. Sent from the host they would be S * V * 5 bytes per step
  (200 MB for 256 rows of 152k tokens), and the next step could not be prepared while this one runs.
- On the host, one step at a time with every earlier token known (`needs_host`): grammars, bad words of several tokens,
  and min_tokens beside another mask.

S rows of a batch, V vocabulary, W = ceil(V / 32) words of a mask, B biased tokens per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.device.arrays import zeros_of
from dovetail.engine.device.batch import NUMBERS
from dovetail.engine.grammar import Matcher
from dovetail.engine.grammar import compile as compile_grammar
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import FIXED, SamplingPlan, SamplingState, Sequence
from dovetail.engine.schedule.plan import UNKNOWN, PlanRow, StepPlan
from dovetail.ops.sample import FOREVER, SampleInputs

MAX_BIAS = 512  # OpenAI accepts 300
ROWS_AT_ONCE, COUNTS_AT_ONCE = 64, 8192  # of the history, that one call clears and sets
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: spreads the seeds of the n sequences


def seed_of(seed: int, index: int) -> int:
    """Return the seed of a request's sequence `index`; a request with that seed and n=1 gets the same tokens."""
    return (seed + index * _GOLDEN) % 2**64


class _Row(NamedTuple):
    """Hold one row of a batch that needs more than numbers."""

    state: SamplingState
    slot: int  # in the history
    masks: list[np.ndarray | None]  # of the position that is sampled; in a verify step, one for each or one for all
    until: int


class Sampler:
    """Prepare the sampling inputs of an engine.

    Args:
        vocab: The model's vocabulary, which may be larger than the tokenizer's.
        max_rows: Slots: the most sequences that run at a time.
        tokenizer: For bad words and grammars.
        eos_ids: Tokens that end a sequence.
        device: A Device or Sharding for arrays kept there; None: jax's default.
        history_sharding: The sharding of `history` [max_rows, V] (see `Programs.history_sharding`).
    """

    def __init__(
        self,
        vocab: int,
        max_rows: int,
        tokenizer: Any = None,
        eos_ids: Iterable[int] = (),
        device: Any = None,
        history_sharding: Any = None,
    ):
        self.vocab, self.max_rows, self.tokenizer = vocab, max_rows, tokenizer
        self.eos_ids = tuple(eos_ids)
        self.words = -(-vocab // 32)
        self._device = device
        self._history: jax.Array | None = None
        self._history_sharding = history_sharding
        self._write_counts = jax.jit(_write_counts, donate_argnums=0, out_shardings=history_sharding)
        self._unwritten: dict[int, Sequence] = {}  # who has taken a slot in the history
        self._holder: list[SamplingState | None] = [None] * max_rows  # whose numbers are in each slot
        self._numbers = np.tile(
            SamplingState().numbers, (max_rows + 1, 1)
        )  # [slots + 1, FIXED]; the last one is padding's
        self._resting: dict[tuple[int, int], tuple[jax.Array, ...]] = {}
        self._last_mask: tuple[list[np.ndarray | None], Any] = ([], None)

    # --- one sequence -------------------------------------------------------------------------------------------------

    def prepare(self, params: SamplingParams) -> SamplingPlan:
        """Return what the n sequences of a request share.

        Tokenizing words and compiling a grammar may take seconds: call it on another thread than the engine's.

        Raises:
            RequestError: If this model cannot do what is requested; `param` names the field.
        """
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self.vocab:
                    raise RequestError(
                        f"`{name}` must have token ids from 0 to {self.vocab - 1}, got {token}", param=name
                    )
        if len(params.logit_bias) > MAX_BIAS:
            raise RequestError(
                f"`logit_bias` must have at most {MAX_BIAS} entries, got {len(params.logit_bias)}", param="logit_bias"
            )
        for name in ("bad_words", "structured_outputs"):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(f"`{name}` requires a tokenizer, and this engine has none", param=name)
        words = self._bad_words(params)
        wanted = params.structured_outputs
        return SamplingPlan(
            mask=self._fixed_mask(params, words),
            early=self._bits(without=(*self.eos_ids, *params.stop_token_ids)) if params.min_tokens else None,
            bad=tuple(word for word in words if len(word) > 1),
            grammar=compile_grammar(wanted, self.tokenizer) if wanted else None,
        )

    def start(self, seq: Sequence) -> SamplingState:
        """Return the sequence's state, made on the first call.

        Sets `seq.single_step` if the host must see each token: such a sequence may neither run several steps per
        dispatch nor be scheduled while it has pending tokens.
        """
        state = seq.sampling
        if state is None:
            state = seq.sampling = self._new_state(seq)
            seq.single_step = state.needs_host
        return state

    def is_done(self, seq: Sequence) -> bool:
        """Return whether the sequence's grammar is complete or has failed (`seq.error`): the engine then ends it."""
        state = self.start(seq)
        self._feed(seq, state)
        return state.matcher is not None and (state.matcher.is_done or seq.error is not None)

    def _new_state(self, seq: Sequence) -> SamplingState:
        params = seq.request.params
        seed = seed_of(seq.request.seed, seq.index)
        # truncation has no effect at temperature 0, and costs nothing when it is off
        top_k, top_p, min_p = (0, 1.0, 0.0) if params.greedy else (max(params.top_k, 0), params.top_p, params.min_p)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        plan = seq.request.sampling or self.prepare(params)
        return SamplingState(
            floats=(params.temperature, top_p, min_p, *penalties),
            ints=(min(top_k, self.vocab), seed >> 32, seed & 0xFFFFFFFF),
            bias=params.logit_bias,
            penalized=penalties != (0, 0, 1),
            mask=plan.mask,
            early=plan.early,
            early_until=seq.prompt_len + params.min_tokens if params.min_tokens else 0,
            bad=plan.bad,
            matcher=plan.grammar.start() if plan.grammar else None,
            top_logprobs=params.logprobs,
        )

    def _bad_words(self, params: SamplingParams) -> set[tuple[int, ...]]:
        """Return each word's tokens at the start of a text and after a space, which differ in most vocabularies.

        A word that ends with a token which is excluded everywhere adds nothing: a special token after a space.
        """
        spelled = (prefix + word.lstrip() for word in params.bad_words for prefix in ("", " "))
        found = {tuple(self.tokenizer.encode(text, add_special=False)) for text in spelled} - {()}
        return {word for word in found if len(word) == 1 or (word[-1],) not in found}

    def _fixed_mask(self, params: SamplingParams, words: set[tuple[int, ...]]) -> np.ndarray | None:
        """Return the mask of allowed_token_ids and one-token bad words."""
        allowed, bad = params.allowed_token_ids, {word[0] for word in words if len(word) == 1}
        if allowed is not None and bad.issuperset(allowed):
            raise RequestError("`bad_words` must leave one of allowed_token_ids, and exclude all", param="bad_words")
        if params.min_tokens and {*(allowed or (-1,))} - bad <= {*self.eos_ids, *params.stop_token_ids}:
            raise RequestError(
                "`allowed_token_ids` must have a token that does not end the output, because min_tokens excludes those",
                param="allowed_token_ids",
            )
        return None if allowed is None and not bad else self._bits(only=allowed, without=bad)

    def _bits(self, only: Iterable[int] | None = None, without: Iterable[int] = ()) -> np.ndarray:
        """Return a mask [W] uint32: bit v % 32 of word v // 32 is token v."""
        allowed = np.full(self.words * 32, only is None)
        allowed[list(only or ())] = True
        allowed[list(without)] = False
        return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def inputs(self, plan: StepPlan, size: int, drafts: int = 0) -> SampleInputs:
        """Return the arrays of a batch of `size` rows: the plan's in their order, then padding.

        Rows that do not sample are like padding: greedy, without a mask, and not counted in `history`, which the step
        takes beside these. Tokens sampled since the last call are read from the sequences. With `drafts`, the mask is
        [1 + drafts, S, W], one for each position of a verify step.
        """
        numbers, asking = [self.max_rows] * size, []
        positions: Any = np.zeros(size, np.int32)
        for i, row in enumerate(plan.rows):
            if row.samples:
                state, slot = row.seq.sampling or self.start(row.seq), row.seq.slot
                assert slot is not None
                if self._holder[slot] is not state:
                    self._holder[slot], self._numbers[slot] = state, state.numbers
                numbers[i] = slot
                if state.asks:
                    asking.append((i, self._row(row, state, plan.steps)))
        self._write_history()
        positions[: len(plan.rows)] = [_position(row) if row.samples else 0 for row in plan.rows]
        columns = np.ascontiguousarray(self._numbers[numbers].T)
        fixed = {name: column.view(NUMBERS[name]) for name, column in zip(FIXED, columns, strict=True)}
        return SampleInputs(**fixed, position=positions, **self._asked(asking, size, drafts))

    def _asked(self, asking: list[tuple[int, _Row]], size: int, drafts: int) -> dict[str, Any]:
        """Return what rows need beyond the FIXED numbers, as NumPy arrays."""
        slots, until = np.full(size, self.max_rows, np.int32), np.zeros(size, np.int32)
        masks: list[np.ndarray | None] = [None] * (size * (1 + drafts))
        for i, row in asking:
            slots[i], until[i] = row.slot, row.until
            for j in range(1 + drafts):
                masks[j * size + i] = row.masks[min(j, len(row.masks) - 1)]
        bias_ids, bias = self._bias([(i, row.state) for i, row in asking], size)
        return dict(slot=slots, mask_until=until, mask=self._mask(masks, drafts), bias_ids=bias_ids, bias=bias)

    def _row(self, row: PlanRow, state: SamplingState, steps: int) -> _Row:
        seq, position = row.seq, _position(row)
        known = len(seq.tokens) == position
        assert not state.needs_host or (steps == 1 and known), f"{seq.id}: the host must see each token"
        slot = self._history_slot(seq, state, known) if state.penalized else self.max_rows
        if state.needs_host and row.drafts[:1] not in ((), (UNKNOWN,)):
            return _Row(state, slot, self._draft_masks(seq, state, row.drafts), FOREVER)
        mask, until = self._row_mask(seq, state, position)
        if state.needs_host and row.drafts:  # a draft model proposes them: the first mask is the only one yet
            until = position + 1
        return _Row(state, slot, [mask], until)

    @property
    def history(self) -> jax.Array:
        """Return the counts [max_rows, V] int32 for `ops.sample`; set it to the step's output after donating it."""
        if self._history is None:
            shape = self.max_rows, self.vocab
            self.history = zeros_of(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._history_sharding))
        assert self._history is not None
        return self._history

    @history.setter
    def history(self, table: jax.Array) -> None:
        self._history = table

    def release(self) -> None:
        """Drop the arrays on the device.

        A sequence with a row in the history must be preempted before it samples again; its row is then written again.
        """
        self._history, self._last_mask = None, ([], None)
        self._resting.clear()

    def _history_slot(self, seq: Sequence, state: SamplingState, known: bool) -> int:
        """Return the sequence's slot; its row is written when it first samples there, also after a preemption."""
        assert seq.slot is not None
        if state.history_of != (seq.slot, seq.preemptions):
            assert known, f"{seq.id}: its tokens must be known when it takes a slot"
            self._unwritten[seq.slot] = seq  # and not one whose step failed before this was written
            state.history_of = (seq.slot, seq.preemptions)
        return seq.slot

    def _write_history(self) -> None:
        """Write the rows of sequences that have taken a slot: whole rows from the host would be 600 KB each."""
        unwritten, self._unwritten = [*self._unwritten.items()], {}
        for first in range(0, len(unwritten), ROWS_AT_ONCE):
            taken = unwritten[first : first + ROWS_AT_ONCE]
            counts = np.concatenate([_counts_of(slot, seq) for slot, seq in taken], axis=1)
            slots = np.full(ROWS_AT_ONCE, self.max_rows, np.int32)
            slots[: len(taken)] = [slot for slot, _ in taken]
            for start in range(0, max(1, counts.shape[1]), COUNTS_AT_ONCE):
                some = counts[:, start : start + COUNTS_AT_ONCE]
                padding = ((0, 0), (0, COUNTS_AT_ONCE - some.shape[1]))
                padded = np.pad(some, padding, constant_values=self.max_rows)  # a slot that is dropped
                self.history = self._write_counts(self.history, slots, padded)
                slots = np.full(ROWS_AT_ONCE, self.max_rows, np.int32)  # they are cleared once

    def _bias(self, states: list[tuple[int, SamplingState]], size: int) -> tuple[Any, Any]:
        """Return ids [S, B] and values [S, B]; B is always MAX_BIAS, so that no request causes a compilation."""
        if not any(state.bias for _, state in states):
            ids, values, _ = self._rest(size)
            return ids, values
        ids, values = np.full((size, MAX_BIAS), -1, np.int32), np.zeros((size, MAX_BIAS), np.float32)
        for row, state in states:
            ids[row, : len(state.bias)], values[row, : len(state.bias)] = [*state.bias], [*state.bias.values()]
        return ids, values

    def _rest(self, size: int, drafts: int = 0) -> tuple[jax.Array, ...]:
        """Return no bias and no mask, which stay on the device, so that nothing is sent for them."""
        if (size, drafts) not in self._resting:
            ids, values = jnp.full((size, MAX_BIAS), -1, jnp.int32), jnp.zeros((size, MAX_BIAS), jnp.float32)
            shape = (1 + drafts, size, self.words) if drafts else (size, self.words)
            bits = jnp.full(shape, 0xFFFFFFFF, jnp.uint32)
            self._resting[size, drafts] = tuple(jax.device_put(x, self._device) for x in (ids, values, bits))
        return self._resting[size, drafts]

    # --- masks --------------------------------------------------------------------------------------------------------

    def _mask(self, rows: list[np.ndarray | None], drafts: int = 0) -> Any:
        """Return the mask [S, W], or [1 + drafts, S, W]."""
        if all(bits is None for bits in rows):
            return self._rest(len(rows) // (1 + drafts), drafts)[2]
        # constant masks are the same objects at every step: the array on the device is used again
        same, on_device = self._last_mask
        if len(same) != len(rows) or any(a is not b for a, b in zip(same, rows, strict=True)):
            full = np.full(self.words, 0xFFFFFFFF, np.uint32)
            table = np.stack([full if bits is None else bits for bits in rows])
            table = table.reshape(1 + drafts, -1, self.words) if drafts else table
            on_device = jax.device_put(table, self._device)
            self._last_mask = rows, on_device
        return on_device

    def _row_mask(self, seq: Sequence, state: SamplingState, position: int) -> tuple[np.ndarray | None, int]:
        """Return a row's mask [W], and the position until which it applies."""
        early = state.early if position < state.early_until else None
        if state.matcher is not None or state.bad or (early is not None and state.mask is not None):
            self._feed(seq, state)
            return self._fresh_mask(seq, seq.tokens, state, early), FOREVER
        if early is not None:
            return early, state.early_until
        return state.mask, 0 if state.mask is None else FOREVER

    def _draft_masks(self, seq: Sequence, state: SamplingState, drafts: tuple[int, ...]) -> list[np.ndarray | None]:
        """Return the masks of the positions after the newest token and after each draft token.

        The grammar consumes the draft tokens up to the first that it refuses, or that completes it, and is then rolled
        back. Later draft tokens are not sampled, so that their masks do not matter.
        """
        self._feed(seq, state)
        masks: list[np.ndarray | None] = []
        fed, tokens, matcher = 0, list(seq.tokens), state.matcher
        for draft in (*drafts, None):
            early = state.early if len(tokens) < state.early_until else None
            masks.append(self._fresh_mask(seq, tokens, state, early))
            if draft is None or seq.error is not None or (matcher and not matcher.try_accept(draft)):
                break
            fed += 1
            tokens.append(draft)
            if matcher and matcher.is_done:
                break
        if matcher and fed:
            matcher.rollback(fed)
        return masks

    def _fresh_mask(
        self, seq: Sequence, tokens: list[int], state: SamplingState, early: np.ndarray | None
    ) -> np.ndarray:
        """Return a mask that depends on the tokens so far; if it excludes all, only the EOS tokens are allowed."""
        bits = np.full(self.words, 0xFFFFFFFF, np.uint32) if state.mask is None else state.mask.copy()
        for *start, last in state.bad:
            if tokens[-len(start) :] == start:
                bits[last // 32] &= ~np.uint32(1 << last % 32)
        if state.matcher is not None:
            bits &= self._grammar_mask(seq, state.matcher)
        # a complete grammar allows only the EOS tokens, also before min_tokens
        if early is not None and (state.matcher is None or (bits & early).any()):
            bits &= early
        return bits if bits.any() else self._bits(only=self.eos_ids)

    def _grammar_mask(self, seq: Sequence, matcher: Matcher) -> np.ndarray:
        bits = np.zeros(self.words, np.uint32)
        try:
            matcher.fill(bits)
        except UserError as error:  # such as a limit of the grammar
            seq.error = seq.error or str(error)
        return self._bits(only=self.eos_ids) if seq.error is not None else bits

    def _feed(self, seq: Sequence, state: SamplingState) -> None:
        """Feed new output tokens to the grammar; an error ends this sequence, not its batch."""
        if state.matcher is None or seq.error is not None:
            return
        try:
            for token in seq.output[state.fed :]:
                state.fed += 1
                state.matcher.accept(token)
        except UserError as error:
            seq.error = str(error)


def _counts_of(slot: int, seq: Sequence) -> np.ndarray:
    """Return [3, n]: the slot, the sequence's distinct tokens, and what the history has for each."""
    prompt, output = np.unique(np.asarray(seq.request.prompt, np.int32)), np.asarray(seq.output, np.int32)
    tokens, place = np.unique(np.concatenate([prompt, output]), return_inverse=True)
    counts = np.bincount(place, np.repeat([1, 2], [len(prompt), len(output)]), minlength=len(tokens))
    return np.stack([np.full(len(tokens), slot), tokens, counts]).astype(np.int32)


def _write_counts(table: jax.Array, slots: jax.Array, counts: jax.Array) -> jax.Array:
    """Clear the rows `slots` of the history, then set `counts` [3, n] as from `_counts_of`; slots past the end drop."""
    slot, token, count = counts
    return table.at[slots].set(0, mode="drop").at[slot, token].set(count, mode="drop")


def _position(row: PlanRow) -> int:
    """Return the position of the first token that a row samples; the least possible if only the device knows it."""
    if row.ahead:
        return len(row.seq.tokens) + row.seq.pending - 1
    return row.start + row.count - len(row.drafts)
