"""Pack a plan into the one int32 vector that a compiled step takes, so that a step costs one copy to the device.

The pages of each slot are on the device too, as a table [slots + 1, M]; a step sends only pages that are new to it.

S rows (sequences), T tokens, M pages that a slot may hold, U new pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.engine.request.sequence import Sequence
from dovetail.engine.schedule.plan import PlanRow, StepPlan
from dovetail.ops.sample import SampleInputs

UNKNOWN = -1  # a token that only the device knows: the last one its slot sampled

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
    def _kind(self) -> tuple[bool, int, bool, bool]:
        return self.is_decode, self.steps, self.keeps_hidden, self.drafts > 0

    def can_run(self, other: Shape) -> bool:
        """Return whether a step with prompts of this shape can compute what the other does, in one step.

        It also computes rows of one token, and hidden states that were not requested are dropped.
        """
        if not self.is_prompts or other.steps > 1 or other.drafts or self.keeps_hidden < other.keeps_hidden:
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
        return T, S, S, S, S, S + 1, 1, len(NUMBERS) * S, 3 * U

    @property
    def size(self) -> int:
        """Return the size of the vector."""
        return sum(self.sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepArrays:
    """Hold the parts of a step's vector."""

    tokens: jax.Array  # [T], UNKNOWN where only the device knows
    kv_lens: jax.Array  # [S]
    slots: jax.Array  # [S]
    adapters: jax.Array  # [S] numbers of adapters (see ops.adapter.choose)
    samples: jax.Array  # [S] 1 where the row's last token is sampled from
    cu_q_lens: jax.Array  # [S + 1]
    num_seqs: jax.Array  # [1]
    numbers: jax.Array  # [NUMBERS, S] as bits
    new_pages: jax.Array  # [3, U] slot, position in its table, page; unused entries have the padding's slot


def sample_inputs(numbers: jax.Array, arrays: dict[str, jax.Array]) -> SampleInputs:
    """Return SampleInputs from the bits [NUMBERS, S] and the arrays with more than a number per row."""
    named = zip(NUMBERS.items(), numbers, strict=True)
    return SampleInputs(**{name: jax.lax.bitcast_convert_type(bits, dtype) for (name, dtype), bits in named}, **arrays)


def unpack(flat: jax.Array, shape: Shape) -> StepArrays:
    """Split a step's vector into its parts, on the device."""
    parts: Any = jnp.split(flat, list(np.cumsum(shape.sizes)[:-1]))
    parts[-2:] = parts[-2].reshape(len(NUMBERS), shape.rows), parts[-1].reshape(3, shape.new_pages)
    return StepArrays(*parts)


class Packer:
    """Pack plans, sending only the pages that the device does not have yet."""

    def __init__(self, max_num_seqs: int):
        self._trash = max_num_seqs  # the slot of padding
        self.forget()

    def forget(self) -> None:
        """Send all pages again: the device's table was lost."""
        self._holder: list[Sequence | None] = [None] * self._trash
        self._preemptions = [0] * self._trash  # of the holder, when it took the slot
        self._sent = [0] * self._trash
        self._adapter = np.zeros(self._trash, np.int32)  # the number of the holder's adapter

    def pack(self, plan: StepPlan, shape: Shape, inputs: SampleInputs) -> tuple[np.ndarray, list[tuple[int, list]]]:
        """Return the vector, and (slot, pages) of the sequences whose new pages it has no room for."""
        n = len(plan.rows)
        flat = np.zeros(shape.size, np.int32)
        parts = np.split(flat, np.cumsum(shape.sizes)[:-1])
        tokens, kv_lens, slots, adapters, samples, cu, num_seqs, numbers, new_pages = parts
        known, ends, end = [], [], 0
        for row in plan.rows:
            known += _tokens(row)
            end += row.count
            ends.append(end)
        tokens[:end], cu[1 : n + 1], cu[n + 1 :], num_seqs[0] = known, ends, end, n
        kv_lens[:n] = [row.start + row.count for row in plan.rows]
        slots[:n], slots[n:] = [_slot(row) for row in plan.rows], self._trash
        samples[:n] = [row.samples for row in plan.rows]
        for part, name in zip(numbers.reshape(len(NUMBERS), -1), NUMBERS, strict=True):
            part[:] = np.asarray(getattr(inputs, name)).view(np.int32)
        too_many = self._add_pages(plan, new_pages.reshape(3, -1))
        adapters[:n] = self._adapter[slots[:n]]
        return flat, too_many

    def _add_pages(self, plan: StepPlan, new_pages: np.ndarray) -> list[tuple[int, list]]:
        slots, places, pages, too_many = [], [], [], []
        for row in plan.rows:
            seq = row.seq
            slot, want = _slot(row), len(seq.pages)
            if self._holder[slot] is not seq or self._preemptions[slot] != seq.preemptions:
                self._holder[slot], self._preemptions[slot], self._sent[slot] = seq, seq.preemptions, 0
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


def _slot(row: PlanRow) -> int:
    assert row.seq.slot is not None, "a running sequence has a slot"
    return row.seq.slot


def _tokens(row: PlanRow) -> list[int]:
    """Return a row's tokens, UNKNOWN where only the device knows."""
    tokens, start, count = row.seq.tokens, row.start, row.count
    if row.drafts:
        return [tokens[start], *row.drafts]
    if count == 1:
        return [tokens[start]] if start < len(tokens) else [UNKNOWN]
    found = tokens[start : start + count]
    return found + [UNKNOWN] * (count - len(found))
