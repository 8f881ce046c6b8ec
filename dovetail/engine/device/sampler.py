"""The sampler's host side: from sequences' SamplingParams to the arrays that dovetail.ops.sample reads.

What lives where, and why:
- On the device, in a loop of any number of steps: temperature, truncation, seed (fixed), position (one more per step),
  bias, a mask that stays (allowed_token_ids, bad words of one token), min_tokens alone (a mask with an end), and
  penalties. Their counts are a table [slots, V] on the device: a row is written from the host when a sequence takes
  its slot, and each sampled token is added where it lies. Sent from the host, they would be S * V * 5 bytes per step
  (200 MB for 256 rows of 152k tokens), and the next step could not be prepared while this one runs.
- On the host, one step at a time with every earlier token known (`needs_host`): grammars, bad words of several tokens,
  and min_tokens beside another mask.

S rows of a batch, V vocabulary, W = ceil(V / 32) words of mask, B biased tokens per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UserError
from dovetail.engine.device.batch import NUMBERS
from dovetail.engine.grammar import Matcher
from dovetail.engine.grammar import compile as compile_grammar
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import FIXED, SamplingPlan, SamplingState, Sequence
from dovetail.engine.schedule.plan import Row, StepPlan
from dovetail.ops.sample import FOREVER, SampleInputs

MAX_BIAS = 512  # OpenAI takes 300
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: sets the n samples' seeds far apart


def seed_of(seed: int, index: int) -> int:
    """Of one of a request's n answers: asked for alone with this seed, it is the same answer."""
    return (seed + index * _GOLDEN) % 2**64


class _Row(NamedTuple):
    """One row of a batch that asks for more than numbers."""

    state: SamplingState
    slot: int  # in the history
    mask: np.ndarray | None
    until: int


class Sampler:
    """vocab: the model's, which may be larger than the tokenizer's. max_rows: slots, as many as sequences may run.
    eos_ids: what ends a sequence. device: a Device or Sharding for what is kept there; None: jax's default.
    history_sharding: the layout of `history` [max_rows, V] (see `Programs.history_sharding`)."""

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
        self._write_row = jax.jit(
            lambda table, slot, row: table.at[slot].set(row), donate_argnums=0, out_shardings=history_sharding
        )
        self._holder: list[SamplingState | None] = [None] * max_rows  # of each slot: whose numbers are there
        self._numbers = np.tile(SamplingState().numbers, (max_rows + 1, 1))  # [slots + 1, FIXED]; the last is padding
        self._resting: dict[int, tuple[jax.Array, ...]] = {}
        self._last_mask: tuple[list[np.ndarray | None], Any] = ([], None)

    # --- one sequence -------------------------------------------------------------------------------------------------

    def prepare(self, params: SamplingParams) -> SamplingPlan:
        """Return what the n sequences of a request share; ValueError for what this model cannot do. Tokenizing words
        and compiling a grammar may take seconds: call it on another thread than the engine's."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if token >= self.vocab:
                    raise UserError(f"{name} holds {token}; this model's token ids end at {self.vocab - 1}")
        if len(params.logit_bias) > MAX_BIAS:
            raise UserError(f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_BIAS} are taken")
        for name in ("bad_words", "structured_outputs"):
            if getattr(params, name) and self.tokenizer is None:
                raise UserError(f"{name} needs the model's tokenizer, and this engine was started without one")
        words = self._bad_words(params)
        return SamplingPlan(
            mask=self._fixed_mask(params, words),
            early=self._bits(without=(*self.eos_ids, *params.stop_token_ids)) if params.min_tokens else None,
            bad=tuple(word for word in words if len(word) > 1),
            grammar=compile_grammar(params.structured_outputs, self.tokenizer) if params.structured_outputs else None,
        )

    def start(self, seq: Sequence) -> SamplingState:
        """The sequence's state, made on the first call. Sets `seq.single_step` where the host must see each token: such
        a sequence may neither run several steps per dispatch nor be scheduled while it has pending tokens."""
        state = seq.sampling
        if state is None:
            state = seq.sampling = self._new_state(seq)
            seq.single_step = state.needs_host
        return state

    def needs_host(self, seq: Sequence) -> bool:
        return self.start(seq).needs_host

    def is_done(self, seq: Sequence) -> bool:
        """Whether the sequence's grammar has nothing more to come, or `seq.error` says that it cannot go
        on: the engine ends it then, with ignore_eos too."""
        state = self.start(seq)
        self._feed(seq, state)
        return state.matcher is not None and (state.matcher.is_done or seq.error is not None)

    def _new_state(self, seq: Sequence) -> SamplingState:
        params = seq.request.params
        seed = seed_of(seq.request.seed, seq.index)
        # what truncates has no meaning at temperature 0, and off it costs nothing
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
        """Each word's tokens, at the start of a text and after a space: they differ in most vocabularies."""
        spelled = (prefix + word.lstrip() for word in params.bad_words for prefix in ("", " "))
        return {tuple(self.tokenizer.encode(text, add_special=False)) for text in spelled} - {()}

    def _fixed_mask(self, params: SamplingParams, words: set[tuple[int, ...]]) -> np.ndarray | None:
        """allowed_token_ids and bad words of one token."""
        allowed, bad = params.allowed_token_ids, {word[0] for word in words if len(word) == 1}
        if allowed is not None and bad.issuperset(allowed):
            raise UserError("bad_words forbid every one of allowed_token_ids: no token could be sampled")
        if params.min_tokens and {*(allowed or (-1,))} - bad <= {*self.eos_ids, *params.stop_token_ids}:
            raise UserError("allowed_token_ids holds only tokens that end the output, but min_tokens forbids them")
        return None if allowed is None and not bad else self._bits(only=allowed, without=bad)

    def _bits(self, only: Iterable[int] | None = None, without: Iterable[int] = ()) -> np.ndarray:
        """[W] uint32, bit v % 32 of word v // 32 for token v."""
        allowed = np.full(self.words * 32, only is None)
        allowed[list(only or ())] = True
        allowed[list(without)] = False
        return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def inputs(self, plan: StepPlan, size: int) -> SampleInputs:
        """The arrays of a batch of `size` rows: the plan's, in their order, then padding. Rows that do not sample are
        as padding: greedy, masked by nothing, and kept out of `history`, which the step takes beside these.

        What was sampled since the last call is read from the sequences, so no one need tell the sampler.
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
        positions[: len(plan.rows)] = [row.start + row.count if row.samples else 0 for row in plan.rows]
        columns = np.ascontiguousarray(self._numbers[numbers].T)
        fixed = {name: column.view(NUMBERS[name]) for name, column in zip(FIXED, columns, strict=True)}
        return SampleInputs(**fixed, position=positions, **self._asked(asking, size))

    def _asked(self, asking: list[tuple[int, _Row]], size: int) -> dict[str, Any]:
        """What rows ask beyond numbers that stay, in numpy's arrays, which jax takes as they are."""
        slots, until = np.full(size, self.max_rows, np.int32), np.zeros(size, np.int32)
        masks: list[np.ndarray | None] = [None] * size
        for i, row in asking:
            slots[i], until[i], masks[i] = row.slot, row.until, row.mask
        bias_ids, bias = self._bias([(i, row.state) for i, row in asking], size)
        return dict(slot=slots, mask_until=until, mask=self._mask(masks), bias_ids=bias_ids, bias=bias)

    def _row(self, row: Row, state: SamplingState, steps: int) -> _Row:
        seq, position = row.seq, row.start + row.count
        known = len(seq.tokens) == position
        assert not state.needs_host or (steps == 1 and known), f"{seq.id}: the host must see each token"
        slot = self._history_slot(seq, state, known) if state.penalized else self.max_rows
        return _Row(state, slot, *self._row_mask(seq, state, position))

    @property
    def history(self) -> jax.Array:
        """[max_rows, V] int32, for `ops.sample`. Who donates it to a step puts here what comes out."""
        if self._history is None:
            self.history = jnp.zeros((self.max_rows, self.vocab), jnp.int32, device=self._history_sharding)
        assert self._history is not None
        return self._history

    @history.setter
    def history(self, table: jax.Array) -> None:
        self._history = table

    def release(self) -> None:
        """Forget what lies on the device. No sequence that was given a row of the history may sample before it has been
        preempted: it is written again then."""
        self._history, self._last_mask = None, ([], None)
        self._resting.clear()

    def _history_slot(self, seq: Sequence, state: SamplingState, known: bool) -> int:
        """The sequence's slot. Its row is written when it first samples from there, also after a preemption."""
        assert seq.slot is not None
        if state.history_of != (seq.slot, seq.preemptions):
            assert known, f"{seq.id}: its tokens must be known when it takes a slot"
            row = 2 * np.bincount(seq.output, minlength=self.vocab)
            row[list(seq.request.prompt)] += 1  # once, however often it is there
            self.history = self._write_row(self.history, np.int32(seq.slot), row.astype(np.int32))
            state.history_of = (seq.slot, seq.preemptions)
        return seq.slot

    def _bias(self, states: list[tuple[int, SamplingState]], size: int) -> tuple[Any, Any]:
        """ids [S, B] and values [S, B]; B is always MAX_BIAS, so that no request brings a compilation."""
        if not any(state.bias for _, state in states):
            ids, values, _ = self._rest(size)
            return ids, values
        ids, values = np.full((size, MAX_BIAS), -1, np.int32), np.zeros((size, MAX_BIAS), np.float32)
        for row, state in states:
            ids[row, : len(state.bias)], values[row, : len(state.bias)] = [*state.bias], [*state.bias.values()]
        return ids, values

    def _rest(self, size: int) -> tuple[jax.Array, ...]:
        """No bias and no mask, on the device already: nothing is sent that no request asked for."""
        if size not in self._resting:
            ids, values = jnp.full((size, MAX_BIAS), -1, jnp.int32), jnp.zeros((size, MAX_BIAS), jnp.float32)
            bits = jnp.full((size, self.words), 0xFFFFFFFF, jnp.uint32)
            self._resting[size] = tuple(jax.device_put(x, self._device) for x in (ids, values, bits))
        return self._resting[size]

    # --- masks --------------------------------------------------------------------------------------------------------

    def _mask(self, rows: list[np.ndarray | None]) -> Any:
        """Bits [S, W]."""
        if all(bits is None for bits in rows):
            return self._rest(len(rows))[2]
        # masks that stay are the same objects step after step: what is on the device is used again
        same, on_device = self._last_mask
        if len(same) != len(rows) or any(a is not b for a, b in zip(same, rows, strict=True)):
            full = np.full(self.words, 0xFFFFFFFF, np.uint32)
            on_device = jax.device_put(np.stack([full if bits is None else bits for bits in rows]), self._device)
            self._last_mask = rows, on_device
        return on_device

    def _row_mask(self, seq: Sequence, state: SamplingState, position: int) -> tuple[np.ndarray | None, int]:
        """A row's bits [W], and the position until which they hold."""
        early = state.early if position < state.early_until else None
        if state.matcher is not None or state.bad or (early is not None and state.mask is not None):
            return self._fresh_mask(seq, state, early), FOREVER
        if early is not None:
            return early, state.early_until
        return state.mask, 0 if state.mask is None else FOREVER

    def _fresh_mask(self, seq: Sequence, state: SamplingState, early: np.ndarray | None) -> np.ndarray:
        """What depends on the tokens so far. Where nothing is left, the sequence may end, and only end."""
        bits = np.full(self.words, 0xFFFFFFFF, np.uint32) if state.mask is None else state.mask.copy()
        for *start, last in state.bad:
            if seq.tokens[-len(start) :] == start:
                bits[last // 32] &= ~np.uint32(1 << last % 32)
        if state.matcher is not None:
            bits &= self._grammar_mask(seq, state, state.matcher)
        # a grammar that is complete allows the end alone, also before min_tokens
        if early is not None and (state.matcher is None or (bits & early).any()):
            bits &= early
        return bits if bits.any() else self._bits(only=self.eos_ids)

    def _grammar_mask(self, seq: Sequence, state: SamplingState, matcher: Matcher) -> np.ndarray:
        bits = np.zeros(self.words, np.uint32)
        self._feed(seq, state)
        try:
            matcher.fill(bits)
        except ValueError as error:  # too complex from here on, say
            seq.error = seq.error or str(error)
        return self._bits(only=self.eos_ids) if seq.error is not None else bits

    def _feed(self, seq: Sequence, state: SamplingState) -> None:
        """Tells the grammar of the output tokens it has not seen. What goes wrong ends this sequence, not its batch."""
        if state.matcher is None or seq.error is not None:
            return
        try:
            for token in seq.output[state.fed :]:
                state.fed += 1
                state.matcher.accept(token)
        except ValueError as error:
            seq.error = str(error)
