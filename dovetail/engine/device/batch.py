"""A plan as the one int32 vector that a compiled step takes: a step costs one copy to the device.

The pages of each slot lie on the device too, as a table [slots + 1, M]; a step brings only those that are new to it.

S rows (sequences), T tokens, M pages a slot may hold, U new pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.engine.request.sequence import Sequence
from dovetail.engine.schedule.plan import Row, StepPlan
from dovetail.ops.sample import SampleInputs

UNKNOWN = -1  # a token that only the device knows: the last one its slot sampled

# what a row asks of the sampler in one number each; see SampleInputs
NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence", "frequency", "repetition"), np.float32),
    **dict.fromkeys(("seed_hi", "seed_lo"), np.uint32),
    **dict.fromkeys(("top_k", "position", "slot", "mask_until", "top_logprobs"), np.int32),
}


@dataclass(frozen=True)
class Shape:
    """What a step is compiled for."""

    tokens: int  # T; equal to rows for a decode step; 0: the sampler alone, after a step of prompts
    rows: int  # S
    pages: int  # M
    steps: int = 1  # of a decode step, in one dispatch
    keeps_hidden: bool = False  # the final hidden states of every token are an output too

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows

    def holds(self, other: Shape) -> bool:
        """Whether a step of the other's fits into one of this: it is padded further."""
        same = (self.is_decode, self.steps, self.keeps_hidden) == (other.is_decode, other.steps, other.keeps_hidden)
        return same and self.tokens >= other.tokens and self.rows >= other.rows and self.pages >= other.pages

    def can_run(self, other: Shape) -> bool:
        """Whether a step of prompts of this shape can do what the other does, in one step: it computes rows of one
        token too, and hidden states that nobody asked for are dropped."""
        if self.is_decode or other.steps > 1 or self.keeps_hidden < other.keeps_hidden:
            return False
        return self.tokens >= other.tokens and self.rows >= other.rows and self.pages >= other.pages

    @property
    def sampler(self) -> Shape:
        """What follows a step of prompts."""
        return Shape(0, self.rows, 0)

    @property
    def new_pages(self) -> int:
        """U: two for each row that decodes, and those of a prompt in pages of the usual size."""
        return 2 * self.rows + self.tokens // 16

    @property
    def sizes(self) -> tuple[int, ...]:
        T, S, U = self.tokens, self.rows, self.new_pages
        return T, S, S, S, S, S + 1, 1, len(NUMBERS) * S, 3 * U

    @property
    def size(self) -> int:
        return sum(self.sizes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepArrays:
    tokens: jax.Array  # [T], UNKNOWN where the device knows
    kv_lens: jax.Array  # [S]
    slots: jax.Array  # [S]
    adapters: jax.Array  # [S]: their numbers (see ops.adapter.choose)
    samples: jax.Array  # [S] 1 where the row's last token is sampled from
    cu_q_lens: jax.Array  # [S + 1]
    num_seqs: jax.Array  # [1]
    numbers: jax.Array  # [NUMBERS, S]: their bits
    new_pages: jax.Array  # [3, U]: slot, place in its table, page; those past the last have a slot of the padding


def sample_inputs(numbers: jax.Array, arrays: dict[str, jax.Array]) -> SampleInputs:
    """From the bits of NUMBERS [NUMBERS, S], and what takes more than a number for each row."""
    named = zip(NUMBERS.items(), numbers, strict=True)
    return SampleInputs(**{name: jax.lax.bitcast_convert_type(bits, dtype) for (name, dtype), bits in named}, **arrays)


def unpack(flat: jax.Array, shape: Shape) -> StepArrays:
    parts: Any = jnp.split(flat, list(np.cumsum(shape.sizes)[:-1]))
    parts[-2:] = parts[-2].reshape(len(NUMBERS), shape.rows), parts[-1].reshape(3, shape.new_pages)
    return StepArrays(*parts)


class Packer:
    """Knows how many of each slot's pages the device has, so that a step brings only those that are new."""

    def __init__(self, max_num_seqs: int):
        self._trash = max_num_seqs  # the slot of padding
        self.forget()

    def forget(self) -> None:
        """The device's table is lost."""
        self._holder: list[Sequence | None] = [None] * self._trash
        self._preemptions = [0] * self._trash  # of the holder, when it took the slot
        self._sent = [0] * self._trash
        self._adapter = np.zeros(self._trash, np.int32)  # the number of the holder's

    def pack(self, plan: StepPlan, shape: Shape, inputs: SampleInputs) -> tuple[np.ndarray, list[tuple[int, list]]]:
        """(the vector, [(slot, its pages)] of those whose new pages it has no room for)."""
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
        too_many = self._bring(plan, new_pages.reshape(3, -1))
        adapters[:n] = self._adapter[slots[:n]]
        return flat, too_many

    def _bring(self, plan: StepPlan, new_pages: np.ndarray) -> list[tuple[int, list]]:
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


def _slot(row: Row) -> int:
    assert row.seq.slot is not None, "who runs has a slot"
    return row.seq.slot


def _tokens(row: Row) -> list[int]:
    """A row's, UNKNOWN where only the device knows."""
    tokens, start, count = row.seq.tokens, row.start, row.count
    if count == 1:
        return [tokens[start]] if start < len(tokens) else [UNKNOWN]
    found = tokens[start : start + count]
    return found + [UNKNOWN] * (count - len(found))
