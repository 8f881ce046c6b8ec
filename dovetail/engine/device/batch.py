"""The shape of a step, and its plan packed into one int32 vector, so that a step costs one copy to the device.

Buckets holds the few shapes that steps are compiled for; a plan is padded to the nearest one.

The pages of each slot are on the device too, as a table [slots + 1, M]; a step sends only pages that are new to it.

S rows (sequences), T tokens, M pages that a slot may hold, U new pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.engine.schedule.plan import UNKNOWN, PlanRow, StepPlan
from dovetail.ops.sample import SampleInputs

# the fields of SampleInputs that are one number per row
NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence", "frequency", "repetition"), np.float32),
    **dict.fromkeys(("seed_hi", "seed_lo"), np.uint32),
    **dict.fromkeys(("top_k", "position", "slot", "mask_until", "top_logprobs"), np.int32),
}


@dataclass(frozen=True)
class Shape:
    """Describe the shape that a step is compiled for."""

    tokens: int  # T; equal to rows for a decode step; 0: the sampler alone, after a step with prompts
    rows: int  # S
    pages: int  # M
    steps: int = 1  # device steps of a decode dispatch
    keeps_hidden: bool = False  # whether the final hidden states of every token are an output too
    drafts: int = 0  # most draft tokens per row of a verify step, which then has rows * (1 + drafts) tokens
    images: bool = False  # whether features may replace the embeddings of its tokens
    mrope: bool = False  # whether images change the rotary positions of tokens (multimodal RoPE)
    proposes: bool = False  # whether it is the proposal alone, before a verify step of otherwise the same shape

    @property
    def is_decode(self) -> bool:
        """Return whether every row has one token."""
        return self.tokens == self.rows

    @property
    def is_prompts(self) -> bool:
        """Return whether it is a step with prompts, which is followed by its sampler."""
        return self.tokens > 0 and not self.is_decode and not self.drafts

    def holds(self, other: Shape) -> bool:
        """Return whether a step of the other shape can be padded to this one."""
        same = self._kind == other._kind and self.drafts >= other.drafts
        return same and self.tokens >= other.tokens and self.rows >= other.rows and self.pages >= other.pages

    @property
    def _kind(self) -> tuple[bool | int, ...]:
        images = self.images, self.mrope
        return self.is_decode, self.steps, self.keeps_hidden, self.drafts > 0, self.proposes, *images

    def can_run(self, other: Shape) -> bool:
        """Return whether a step with prompts of this shape can compute what the other does, in one step.

        It also computes rows of one token, and hidden states that were not requested are dropped.
        """
        if not self.is_prompts or other.steps > 1 or other.drafts:
            return False
        if self.keeps_hidden < other.keeps_hidden or self.images < other.images:
            return False
        return self.tokens >= other.tokens and self.rows >= other.rows and self.pages >= other.pages

    @property
    def sampler(self) -> Shape:
        """Return the shape of the sampler that follows a step with prompts."""
        return Shape(0, self.rows, 0)

    @property
    def new_pages(self) -> int:
        """Return U: two for each row that decodes, and those of a prompt in pages of the usual size."""
        return 2 * self.rows + self.tokens // 16

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of the vector's parts, in the order of StepArrays."""
        T, S, U = self.tokens, self.rows, self.new_pages
        images = (T, T) if self.images else ()
        offsets = (3 * T if self.images else S,) if self.mrope else ()
        return T, S, S, S, S, S + 1, 1, len(NUMBERS) * S, 3 * U, *images, *offsets

    @property
    def size(self) -> int:
        """Return the size of the vector."""
        return sum(self.sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepArrays:
    """Hold the parts of a step's vector."""

    tokens: jax.Array  # [T], UNKNOWN where only the device knows
    kv_lens: jax.Array  # [S]; negative: this many tokens more than the slot has computed
    slots: jax.Array  # [S]
    adapters: jax.Array  # [S] numbers of adapters (see ops.adapter.choose)
    samples: jax.Array  # [S] 1 where the row's last token is sampled from
    cu_q_lens: jax.Array  # [S + 1]
    num_seqs: jax.Array  # [1]
    numbers: jax.Array  # [NUMBERS, S] as bits
    new_pages: jax.Array  # [3, U] slot, position in its table, page; unused entries have the padding's slot
    # with images
    index: jax.Array | None = None  # [T] the row of the features that replaces a token's embedding; -1: none
    last_seen: jax.Array | None = None  # [T] the last position of an image token's item; 0 elsewhere
    # with multimodal RoPE: rotary positions minus positions in the sequence. [T, 3] in time, height and width in a step
    # with images; else [S], because the tokens of a row without image tokens are all moved by the images before them
    offsets: jax.Array | None = None


def sample_inputs(numbers: jax.Array, arrays: dict[str, jax.Array]) -> SampleInputs:
    """Return SampleInputs from the bits [NUMBERS, S] and the arrays with more than a number per row."""
    named = zip(NUMBERS.items(), numbers, strict=True)
    return SampleInputs(**{name: jax.lax.bitcast_convert_type(bits, dtype) for (name, dtype), bits in named}, **arrays)


def unpack(flat: jax.Array, shape: Shape) -> StepArrays:
    """Split a step's vector into its parts, on the device."""
    parts: Any = jnp.split(flat, list(np.cumsum(shape.sizes)[:-1]))
    parts[7:9] = parts[7].reshape(len(NUMBERS), shape.rows), parts[8].reshape(3, shape.new_pages)
    offsets = parts.pop() if shape.mrope else None
    if offsets is not None and shape.images:
        offsets = offsets.reshape(shape.tokens, 3)
    return StepArrays(*parts, offsets=offsets)


class Packer:
    """Pack plans, sending only the pages that the device does not have yet."""

    def __init__(self, max_num_seqs: int):
        self._trash = max_num_seqs  # the slot of padding
        self.forget()

    def forget(self) -> None:
        """Send all pages again: the device's table was lost."""
        self._holder = [0] * self._trash  # the number of the sequence that took the slot
        self._preemptions = [0] * self._trash  # of the holder, when it took the slot
        self._sent = [0] * self._trash
        self._adapter = np.zeros(self._trash, np.int32)  # the number of the holder's adapter

    def pack(self, plan: StepPlan, shape: Shape, inputs: SampleInputs) -> tuple[np.ndarray, list[tuple[int, list]]]:
        """Return the vector, and (slot, pages) of the sequences whose new pages it has no room for."""
        n = len(plan.rows)
        flat = np.zeros(shape.size, np.int32)
        parts = np.split(flat, np.cumsum(shape.sizes)[:-1])
        tokens, kv_lens, slots, adapters, samples, cu, num_seqs, numbers, new_pages, *more = parts
        known, ends, end = [], [], 0
        for row in plan.rows:
            known += row_tokens(row)
            end += row.count
            ends.append(end)
        tokens[:end], cu[1 : n + 1], cu[n + 1 :], num_seqs[0] = known, ends, end, n
        kv_lens[:n] = [-row.count if row.ahead else row.start + row.count for row in plan.rows]
        slots[:n], slots[n:] = [_slot(row) for row in plan.rows], self._trash
        samples[:n] = [row.samples for row in plan.rows]
        for part, name in zip(numbers.reshape(len(NUMBERS), -1), NUMBERS, strict=True):
            part[:] = np.asarray(getattr(inputs, name)).view(np.int32)
        too_many = self._add_pages(plan, new_pages.reshape(3, -1))
        adapters[:n] = self._adapter[slots[:n]]
        if shape.images:
            _add_images(plan, *more[:2])
        if shape.mrope:
            _add_offsets(plan, more[-1], shape.images)
        return flat, too_many

    def _add_pages(self, plan: StepPlan, new_pages: np.ndarray) -> list[tuple[int, list]]:
        slots, places, pages, too_many = [], [], [], []
        for row in plan.rows:
            seq = row.seq
            slot, want = _slot(row), len(seq.pages)
            if self._holder[slot] != seq.number or self._preemptions[slot] != seq.preemptions:
                self._holder[slot], self._preemptions[slot], self._sent[slot] = seq.number, seq.preemptions, 0
                adapter = seq.request.adapter
                self._adapter[slot] = adapter.number if adapter else 0
            have = self._sent[slot]
            if want > have:
                self._sent[slot] = want
                if len(slots) + want - have > new_pages.shape[1]:
                    too_many.append((slot, seq.pages))
                else:
                    slots += [slot] * (want - have)
                    places += range(have, want)
                    pages += seq.pages[have:]
        new_pages[0] = self._trash
        new_pages[:, : len(slots)] = slots, places, pages
        return too_many


def _add_images(plan: StepPlan, index: np.ndarray, last_seen: np.ndarray) -> None:
    """Fill the parts of a vector that only steps with images have (see StepArrays)."""
    index[:], offset = -1, 0
    for row in plan.rows:
        end = row.start + row.count
        for span in row.seq.request.spans if row.start < row.seq.images_end else ():
            first, last = max(span.start, row.start), min(span.end, end)
            if first < last:
                here = slice(offset + first - row.start, offset + last - row.start)
                index[here] = plan.images[span.item.key][first - span.start : last - span.start]
                last_seen[here] = span.end - 1
        offset += row.count


def _add_offsets(plan: StepPlan, offsets: np.ndarray, per_token: bool) -> None:
    """Fill the part of a vector that only steps of a model with multimodal RoPE have (see StepArrays)."""
    if not per_token:
        offsets[: len(plan.rows)] = [row.seq.offset_at(row.start) for row in plan.rows]
        return
    table, at = offsets.reshape(-1, 3), 0
    for row in plan.rows:
        if (given := row.seq.request.offsets) is not None:
            table[at : at + row.count] = given[np.minimum(row.start + np.arange(row.count), len(given) - 1)]
        at += row.count


def _slot(row: PlanRow) -> int:
    assert row.seq.slot is not None, "a running sequence has a slot"
    return row.seq.slot


def row_tokens(row: PlanRow) -> list[int]:
    """Return a row's tokens, UNKNOWN where only the device knows."""
    tokens, start, count = row.seq.tokens, row.start, row.count
    if row.drafts:
        return [tokens[start] if start < len(tokens) else UNKNOWN, *row.drafts]
    if count == 1:
        return [tokens[start]] if start < len(tokens) else [UNKNOWN]
    found = tokens[start : start + count]
    return found + [UNKNOWN] * (count - len(found))


# --- buckets ----------------------------------------------------------------------------------------------------------

# Decode steps that a dispatch may have: each number is compiled, because XLA runs a loop of known length without asking
# the host after every iteration.
STEPS = (1, 4, 16)
DISPATCH_SECONDS = 0.02  # most seconds of a dispatch of several decode steps: a new request waits for one of them
SHORT = 1024  # tokens below which a step is mostly one prompt's
FEW_ROWS, FEW_TOKENS = 8, 512  # of a first request or two
LEAST_TOKENS = 32  # of a step with prompts on a CPU
MOST_VERIFIED = 64  # rows of a verify step: with more, computing takes longer than reading the weights
LONG = 4096  # tokens from which a step takes so long that its padding matters


@dataclass(frozen=True)
class Buckets:
    """Hold the shapes of an engine's steps. The defaults are an accelerator's."""

    max_rows: int
    max_tokens: int
    max_pages: int
    max_decode_steps: int | None = None  # per dispatch; None: as many as `step_seconds` allows
    step_seconds: tuple[float, float] = (0.0, 0.0)  # least seconds of a decode step, and seconds per row
    few_rows: tuple[int, ...] = (1, 8, 32)  # of decode steps, doubled from the last one on
    least_rows: int = 64  # of a step with prompts: fewer save no time, except on a CPU
    least_tokens: int = 128  # of a step with prompts: fewer cost little more than reading the weights, except on a CPU
    halves: bool = True  # whether there are sizes between the doublings for the shortest and the longest steps
    few_hidden: bool = True  # two shapes for all steps that keep hidden states, or as many as for others (on a CPU)
    images: bool = False  # whether the model sees images; steps with images and hidden states have shapes of their own
    mrope: bool = False  # whether images change the rotary positions of tokens
    drafts: tuple[int, ...] = ()  # draft tokens per row of verify steps, in ascending order; empty: no speculation
    proposes: bool = False  # whether a draft model proposes them
    tokens_a_row: int = 16  # tokens per row of a step with prompts from which its rows cost little

    def shape_for(self, plan: StepPlan, keeps_hidden: bool = False) -> Shape:
        """Return the shape that a plan is padded to."""
        if plan.num_drafts:
            return self.verify(len(plan.rows), plan.num_drafts)
        if plan.is_decode and not keeps_hidden and not plan.images:
            return self.decode(len(plan.rows), plan.steps)
        return self.mixed(plan.num_tokens, len(plan.rows), keeps_hidden, bool(plan.images))

    def decode(self, rows: int, steps: int = 1) -> Shape:
        """Return the shape of a decode step."""
        rows = _up(rows, self._decode_rows())
        return self._shape(rows, rows, steps=steps)

    def verify(self, rows: int, drafts: int) -> Shape:
        """Return the shape of a verify step with up to `drafts` draft tokens per row."""
        rows, drafts = _up(rows, self._decode_rows()), _up(drafts, [*self.drafts])
        return self._shape(rows * (1 + drafts), rows, drafts=drafts)

    def proposal(self, rows: int, drafts: int) -> Shape:
        """Return the shape of the proposal before a verify step whose masks depend on the draft tokens."""
        return replace(self.verify(rows, drafts), proposes=True)

    def mixed(self, tokens: int, rows: int, keeps_hidden: bool = False, images: bool = False) -> Shape:
        """Return the shape of a step with prompts."""
        if keeps_hidden and self.few_hidden:
            tokens = _up(max(tokens, self.max_rows + 1), self._hidden_tokens())
            return self._shape(tokens, self.max_rows, keeps_hidden=True, images=self.images)
        rows = _up(rows, self._mixed_rows())
        if _up(tokens, self._tokens(rows)) > self._most_tokens(rows):
            rows = self.max_rows
        images = images or (keeps_hidden and self.images)
        return self._shape(_up(tokens, self._tokens(rows)), rows, keeps_hidden=keeps_hidden, images=images)

    def _shape(self, tokens: int, rows: int, **more: Any) -> Shape:
        return Shape(tokens, rows, self.max_pages, mrope=self.mrope, **more)

    def largest(self) -> Shape:
        """Return the shape of the largest step."""
        return self._shape(self._tokens(self.max_rows)[-1], self.max_rows)

    def usual(self) -> list[Shape]:
        """Return every shape that a plan can have, those that take longest to compile first."""
        shapes = [self.decode(rows, n) for rows in self._decode_rows() for n in self.steps_for(rows)]
        for make in (self.verify, *((self.proposal,) if self.proposes else ())):
            shapes += [make(rows, n) for rows in self._decode_rows() for n in self.drafts if rows <= MOST_VERIFIED]
        for rows in self._mixed_rows():
            own = [self._shape(n, rows) for n in self._tokens(rows) if n <= self._most_tokens(rows)]
            shapes += [*own, own[0].sampler]
            shapes += [replace(shape, images=True) for shape in own if self.images]
            shapes += [replace(shape, keeps_hidden=True, images=self.images) for shape in own if not self.few_hidden]
        if self.few_hidden:
            whole = self._shape(0, self.max_rows, keeps_hidden=True, images=self.images)
            shapes += [replace(whole, tokens=tokens) for tokens in self._hidden_tokens()]
        return sorted(shapes, key=lambda shape: -shape.tokens)

    def first(self) -> list[Shape]:
        """Return the shapes that a few requests need."""
        return [s for s in self.usual() if s.rows <= FEW_ROWS and s.tokens <= FEW_TOKENS and not s.keeps_hidden]

    def steps_for(self, rows: int) -> tuple[int, ...]:
        """Return how many decode steps a dispatch with this many rows may have."""
        least, each = self.step_seconds
        steps = steps_in_time(least + each * _up(rows, self._decode_rows()))
        return tuple(n for n in steps if n <= (self.max_decode_steps or n))

    def _decode_rows(self) -> list[int]:
        *few, last = self.few_rows
        return [n for n in few if n < self.max_rows] + _sizes(last, 2, self.max_rows)

    def _mixed_rows(self) -> list[int]:
        return _sizes(min(self.least_rows, self.max_rows), 8, self.max_rows)

    def _most_tokens(self, rows: int) -> int:
        """Return the most tokens of a step with this many rows; with more tokens, the most rows cost little."""
        return max(self.max_tokens, rows + 1) if rows == self.max_rows else self.tokens_a_row * rows

    def _tokens(self, rows: int) -> list[int]:
        """Return the token counts of steps with prompts, which have more tokens than rows.

        Half doublings are added where a step is long, for the rest of many prompts, and where it is short, for one
        prompt beside decoding rows: both would be padded by up to as much again.
        """
        most = max(self.max_tokens, rows + 1)
        sizes = _sizes(self.least_tokens, 2, most)
        sizes += [n * 3 // 2 for n in sizes if self.halves and (n >= LONG or n < SHORT)]
        return sorted({n for n in sizes if rows < n < most} | {most})

    def _hidden_tokens(self) -> list[int]:
        tokens = self._tokens(self.max_rows)
        return sorted({_up(1024, tokens), tokens[-1]})


def steps_in_time(seconds: float) -> tuple[int, ...]:
    """Return how many decode steps a dispatch may have if one takes at least `seconds`."""
    return tuple(steps for steps in STEPS if steps == 1 or steps * seconds < 1.2 * DISPATCH_SECONDS)


def _up(value: int, sizes: list[int]) -> int:
    return next((size for size in sizes if size >= value), sizes[-1])


def _sizes(least: int, growth: int, most: int) -> list[int]:
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return [*sizes, most]
