"""The operations of a warp that multiplies several blocks of packed weights in turn (ops/kernels/gpu/packed_turns.py).

Beside packed_warp: codes come through shared memory. A thread copies its own ones some steps ahead (cp.async), also
those of the next block while it still multiplies the last one, so that loads are always under way without registers
for them; no thread waits for another one but at the end of a block. Left alone, the compiler moves loads to registers
next to the products that need them, whatever the order in which they are written.

The scales of a block, which lie side by side, are copied during the block before it. The tokens lie in shared memory
in the pairs that the planes of a word are multiplied with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.ops.kernels.gpu.packed_codes import planes_of
from dovetail.ops.kernels.gpu.packed_shared import PIECE, group_bytes, pieces, scale_words, token_words
from dovetail.ops.kernels.gpu.packed_warp import BLOCK, QUAD, FewPlan, LoadedStep, Warp
from dovetail.ops.kernels.gpu.warp_ops import (
    as_f32,
    byte_address,
    bytes_of,
    c,
    commit,
    copy_later,
    load_now,
    load_shared,
    load_shared_number,
    load_words,
    number,
    repeat,
    store_shared,
    thread,
    times,
    wait_for_copies,
    wide,
)

FILLED = 8  # pieces that a thread loads at once
COPY = 16  # bytes of a copy of scales


class FewMemory(NamedTuple):
    """Name a program's shared memory: words of 32 bits, and the sums of two blocks."""

    tokens: Any
    ring: Any  # codes
    scales: Any
    partial: Any


class PersistentWarp(Warp):
    """Write the operations of a warp."""

    def __init__(self, p: FewPlan, memory: FewMemory, x: Any, inputs: dict[str, list], expert, source, count) -> None:
        super().__init__(p, memory.partial, x, inputs, expert, c(0), source, count)
        self.memory, self.source, self.count = memory, source, count
        self.at = times(arith.addi(times(self.warp, QUAD), self.quad), p.loaded)
        self.each = p.loaded * p.per_byte // PIECE  # pieces of a load
        self.groups = group_bytes(p)
        token = arith.minui(self.row, arith.subi(count, c(1)))
        piece = arith.addi(times(self.warp, QUAD * self.each), self.quad)
        self.place = arith.addi(times(token, 4 * token_words(p)), times(piece, 16))
        self.expert_row = times(expert, p.out * (p.names if p.is_joined else 1))

    # --- the tokens ---------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Copy the tokens to shared memory, in pairs, with zeros after the end of a row."""
        p, each = self.p, pieces(self.p) // self.p.threads
        at_once, total = min(FILLED, p.tokens * each), times(self.count, each)

        def some(i: Any) -> None:
            numbers = [arith.addi(times(i, at_once), c(j)) for j in range(at_once)]
            numbers = [arith.minsi(n, arith.subi(total, c(1))) for n in numbers]
            found = [self.piece(arith.divui(n, c(each)), arith.remui(n, c(each))) for n in numbers]
            for place, words in found:
                store_shared(self.memory.tokens, place, words)

        repeat(arith.divui(arith.addi(total, c(at_once - 1)), c(at_once)), some)

    def piece(self, token: Any, number: Any) -> tuple[Any, list]:
        """Return the place of a thread's piece in shared memory, and its values in pairs."""
        p, each = self.p, self.each
        at = arith.addi(times(number, p.threads), thread())
        is_there = arith.cmpi(arith.CmpIPredicate.slt, at, c(p.size // PIECE))
        column = times(arith.minsi(at, c(p.size // PIECE - 1)), 2 * PIECE)
        values = load_words(byte_address(self.x, wide(arith.addi(self.source, token)), 2 * p.size, column), 4)
        pairs = [arith.select(is_there, x, c(0)) for of_word in super().pairs(values) for x in of_word]
        # the pieces that the threads of a quad read at once lie side by side
        of_quad, inner = times(arith.divui(at, c(QUAD * each)), QUAD * each), times(arith.remui(at, c(each)), QUAD)
        to = arith.addi(arith.addi(of_quad, inner), arith.remui(arith.divui(at, c(each)), c(QUAD)))
        return arith.addi(times(token, 4 * token_words(p)), times(to, 16)), pairs

    def ordered(self, step: Any) -> list:
        """Return the pairs of a token's values that belong to the codes of a step."""
        place = arith.addi(self.place, times(step, 2 * self.p.step * self.p.per_byte))
        ats = [16 * QUAD * i for i in range(self.each)]
        return [x for at in ats for x in load_shared(self.memory.tokens, place, at, 4)]

    def pairs(self, tokens: list) -> list[list]:
        """Return the pairs of each word: they are in this order."""
        planes = len(planes_of(self.p.form.name))
        return [tokens[i : i + planes] for i in range(0, len(tokens), planes)]

    # --- codes and scales ---------------------------------------------------------------------------------------------

    def first_row(self, i: int, row: Any) -> tuple[int, Any]:
        """Return the array of weight i, and the row in it at which a block begins."""
        p = self.p
        array, before = (0, i * p.out) if p.is_joined else (i, 0)
        return array, arith.addi(arith.addi(row, self.expert_row), c(before))

    def offset_of(self, step: Any) -> Any:
        """Return where a thread's bytes of a step begin in a row; behind its end they are the last ones."""
        offset = arith.addi(self.at, times(step, self.p.step))
        is_whole = self.p.width % self.p.step == 0
        return offset if is_whole else arith.minsi(offset, c(self.p.width - self.p.loaded))

    def group_of(self, step: Any) -> Any:
        """Return the group of a thread's codes of a step."""
        return arith.divui(self.offset_of(step), c(self.p.form.group // self.p.per_byte))

    def stage(self, number: Any) -> Any:
        """Return where a thread's codes of a step, one after another in all blocks, are in the ring."""
        p = self.p
        stage = times(arith.remui(number, c(p.ahead)), p.names * 2 * p.threads * p.loaded)
        return arith.addi(stage, times(thread(), p.loaded))

    def copy(self, row: Any, step: Any, number: Any, when: Any = None) -> None:
        """Copy the codes of a step of a block to the ring, as its step `number`; nothing if not `when`."""
        p = self.p
        to, offset = self.stage(number), self.offset_of(step)
        for i in range(p.names):
            array, first = self.first_row(i, row)
            pointer = byte_address(self.inputs["codes"][array], wide(arith.addi(first, self.row)), p.width, offset)
            for half in (0, 1):
                at = (2 * i + half) * p.threads * p.loaded
                copy_later(self.memory.ring, to, at, pointer, 8 * half * p.width, p.loaded, when)

    def copy_scales(self, row: Any, slot: Any, when: Any = None) -> None:
        """Copy the scales and zero points of a block; a thread copies several parts of 16 bytes."""
        p, at = self.p, 0
        for i in range(p.names):
            array, first = self.first_row(i, row)
            for kind, size in self.groups.items():
                for begin in range(0, size, p.threads):  # 16 rows are `size` parts
                    part = arith.addi(thread(), c(begin))
                    exists = arith.cmpi(arith.CmpIPredicate.slt, part, c(size))
                    exists = exists if when is None else arith.andi(exists, when)
                    pointer = byte_address(self.inputs[kind][array], wide(first), size, times(part, COPY))
                    to = arith.addi(times(slot, 2 * scale_words(p)), times(part, COPY))
                    copy_later(self.memory.scales, to, at, pointer, 0, COPY, exists)
                at += BLOCK * size

    def loaded_step(self, step: Any, number: Any, slot: Any) -> LoadedStep:
        """Return the codes and scales of a step."""
        p, at = self.p, 0
        place = self.stage(number)
        words, found = [], {"scale": [], "zero": []}
        for i in range(p.names):
            ats = [(2 * i + half) * p.threads * p.loaded for half in (0, 1)]
            words.append(tuple(load_shared(self.memory.ring, place, at, p.loaded // 4) for at in ats))
        for _ in range(p.names):
            for kind, size in self.groups.items():
                ref, item = self.inputs[kind][0], bytes_of(self.inputs[kind][0])
                own = arith.addi(times(self.row, size), times(self.group_of(step), item))
                own = arith.addi(own, times(slot, 2 * scale_words(p)))
                ats = [at + 8 * half * size for half in (0, 1)]
                found[kind].append(tuple(load_shared_number(self.memory.scales, own, at, ref) for at in ats))
                at += BLOCK * size
        return LoadedStep(words, found["scale"], found["zero"])

    def edges(self, row: Any) -> list[dict[str, list]]:
        """Load the scales and biases of rows."""
        kinds = [kind for kind in ("scale", "bias") if kind in self.inputs and kind not in self.groups]
        found = []
        for i in range(self.p.names):
            array, first = self.first_row(i, row)
            found.append({})
            for kind in kinds:
                ref = self.inputs[kind][array]
                item = bytes_of(ref)
                pointer = byte_address(ref, wide(arith.addi(first, self.row)), item, c(0))
                found[-1][kind] = [as_f32(number(load_now(pointer, 8 * half * item, item), ref)) for half in (0, 1)]
        return found

    def end(self, kind: str, at: int) -> list | None:
        """Return the scales or biases of a block's rows, in f32, if rows have them."""
        return self.ends[at].get(kind)

    # --- a block ------------------------------------------------------------------------------------------------------

    def begin(self, row: Any) -> None:
        """Begin to copy the first block, and fill the tokens' memory."""
        p = self.p
        self.copy_scales(row, c(0))
        for i in range(p.ahead - 1):
            self.copy(row, c(i), c(i))
            commit()
        self.fill()
        wait_for_copies(p.ahead - 2)

    def block(self, row: Any, after: Any, has_next: Any, turn: Any) -> None:
        """Add up and store the sums of a block, and begin to copy the one after it.

        Args:
            row: The first row of the block.
            after: The first row of the block after it.
            has_next: Whether there is one.
            turn: How many blocks the program has computed.
        """
        p, slot = self.p, arith.andi(turn, c(1))
        self.slot = (slot,)
        self.ends = self.edges(row)
        self.copy_scales(after, arith.subi(c(1), slot), has_next)
        before = times(turn, p.steps)

        def one(step: Any, totals: list) -> list:
            now = arith.addi(before, step)
            wait_for_copies(p.ahead - 2)
            self.copy_next(step, now, row, after, has_next)  # first: it stays behind what is read before it
            commit()
            return self.multiply(self.ordered(step), self.loaded_step(step, now, slot), totals)

        self.store(self.steps(one, [[utils.c(0.0, ir.F32Type.get())] * 4 for _ in self.rows]))

    def copy_next(self, step: Any, now: Any, row: Any, after: Any, has_next: Any) -> None:
        """Copy the codes of a later step, where those of the step before this one were."""
        p, ahead = self.p, self.p.ahead - 1
        later = arith.addi(step, c(ahead))
        is_own = arith.cmpi(arith.CmpIPredicate.slt, later, c(p.steps))
        of = arith.select(is_own, row, after)
        wrapped = arith.select(is_own, later, arith.subi(later, c(p.steps)))
        self.copy(of, wrapped, arith.addi(now, c(ahead)), arith.ori(is_own, has_next))

    def steps(self, one: Any, totals: list) -> list:
        """Return the totals after all steps: a loop with two in each round, so that they overlap."""
        each = 2 if self.p.steps % 2 == 0 else 1
        index = ir.IndexType.get()
        flat = [x for total in totals for x in total]
        loop = scf.ForOp(utils.c(0, index), utils.c(self.p.steps // each, index), utils.c(1, index), flat)
        with ir.InsertionPoint(loop.body):
            first = times(arith.index_cast(c(0).type, loop.induction_variable), each)
            values = list(loop.inner_iter_args)
            found = [values[i : i + 4] for i in range(0, len(values), 4)]
            for i in range(each):
                found = one(arith.addi(first, c(i)), found)
            scf.yield_([x for total in found for x in total])
        values = list(loop.results)
        return [values[i : i + 4] for i in range(0, len(values), 4)]
