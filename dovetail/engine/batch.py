"""A plan as the arrays that a compiled step takes: one int32 vector, so that a step costs one copy to the device.

S rows (sequences), T tokens, M pages a row may hold.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.engine.plan import StepPlan
from dovetail.engine.sequence import Sequence

# What a step does with its logits: argmax alone; a draw at a temperature, with the log-probability of what was drawn;
# or whatever a request may ask, with the log-probabilities of the most probable beside it.
Kind = Literal["greedy", "plain", "full"]

UNKNOWN = -1  # a token that only the device knows: the last one its slot sampled


@dataclass(frozen=True)
class Shape:
    """What a step is compiled for."""

    tokens: int  # T; equal to rows for a decode step
    rows: int  # S
    pages: int  # M
    kind: Kind = "greedy"
    steps: int = 1  # of a decode step, in one dispatch

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows

    def holds(self, other: Shape) -> bool:
        """Whether a step of the other's fits into one of this: it is padded further."""
        same = self.is_decode == other.is_decode and self.kind == other.kind and self.steps == other.steps
        return same and self.tokens >= other.tokens and self.rows >= other.rows and self.pages >= other.pages

    @property
    def size(self) -> int:
        return self.tokens + self.rows * (self.pages + 4) + 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepArrays:
    tokens: jax.Array  # [T], UNKNOWN where the device knows
    tables: jax.Array  # [S, M]
    kv_lens: jax.Array  # [S]
    slots: jax.Array  # [S]
    samples: jax.Array  # [S] 1 where the row's last token is sampled from
    cu_q_lens: jax.Array  # [S + 1]
    num_seqs: jax.Array  # [1]


def unpack(flat: jax.Array, shape: Shape) -> StepArrays:
    T, S, M = shape.tokens, shape.rows, shape.pages
    sizes = [T, S * M, S, S, S, S + 1, 1]
    parts = jnp.split(flat, list(np.cumsum(sizes)[:-1]))
    return StepArrays(parts[0], parts[1].reshape(S, M), *parts[2:])


class Packer:
    """Keeps each slot's page table on the host, so that a step writes only the pages that are new."""

    def __init__(self, max_num_seqs: int, max_pages: int):
        self.tables = np.zeros((max_num_seqs, max_pages), np.int32)
        self._holder: list[tuple[Sequence, int] | None] = [None] * max_num_seqs
        self._filled = [0] * max_num_seqs

    def pack(self, plan: StepPlan, shape: Shape, trash_slot: int) -> np.ndarray:
        T, S, M = shape.tokens, shape.rows, shape.pages
        n = len(plan.rows)
        flat = np.zeros(shape.size, np.int32)
        at = np.cumsum([0, T, S * M, S, S, S, S + 1, 1])
        tokens, tables, kv_lens, slots, samples, cu, num_seqs = (flat[a:b] for a, b in itertools.pairwise(at))
        end = 0
        for i, row in enumerate(plan.rows):
            seq = row.seq
            slot = self._fill(seq)
            if row.count == 1:
                tokens[end] = seq.tokens[row.start] if row.start < len(seq.tokens) else UNKNOWN
            else:
                known = seq.tokens[row.start : row.start + row.count]
                tokens[end : end + len(known)] = known
                tokens[end + len(known) : end + row.count] = UNKNOWN
            end += row.count
            kv_lens[i], slots[i], samples[i], cu[i + 1] = row.start + row.count, slot, row.samples, end
        slots[n:], cu[n + 1 :] = trash_slot, end
        tables.reshape(S, M)[:n] = self.tables[slots[:n], :M]
        num_seqs[0] = n
        return flat

    def _fill(self, seq: Sequence) -> int:
        """Bring the table of the sequence's slot up to its pages; the slot."""
        slot = seq.slot
        assert slot is not None
        if self._holder[slot] != (seq, seq.preemptions):
            self._holder[slot], self._filled[slot] = (seq, seq.preemptions), 0
        have, want = self._filled[slot], len(seq.pages)
        if want > have:
            self.tables[slot, have:want] = seq.pages[have:]
            self._filled[slot] = want
        return slot
