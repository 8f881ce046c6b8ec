"""The program of a product of bf16 weights with up to 8 tokens, for ops/kernels/gpu/dense_few.py.

A warp multiplies blocks of 8 rows with 8 tokens: two blocks at once are the 16 rows of its product (mma), or one and
zeros. The warps of a program take turns along the input, 64 bytes of each row at a time: a thread copies 16 bytes of a
row, and the same ones of a token, to its own places in shared memory; they are the operands of two products. Copies
of several steps are under way at once, those of a small matrix all are: as loads into registers they would wait for
products, in the order that ptxas prefers. At the end the warps' sums are added.

The rows of a matrix are divided into units: one or two neighbouring blocks, or a block of gate and that of up.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from dovetail.ops.glu import CUBE, SLOPE, Glu
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS

ROWS, COLUMNS, QUAD = 8, 8, 4  # of a block; tokens of a product; threads that share a row
PAD = 4  # floats after the rows of a token: a warp's sums are stored in different banks
LOADED = 16  # bytes by a thread at once
STEP = WARPS * QUAD * LOADED  # bytes of a row by a program at once
WORDS = LOADED // 4
CHAINS = 4  # sums of a warp that do not wait for each other


class DensePlan(NamedTuple):
    """Describe a product of few tokens."""

    tokens: int
    size: int  # values of a row
    out: int  # rows of the weight, or of gate alone
    blocks: int  # of a unit
    slots: int  # steps that there is room for: all of a unit, or one more than are under way
    programs: int  # each computes one unit, or several in turn
    glu: Glu | None = None  # of gate and up, the halves of the weight
    eps: float | None = None  # of the tokens' RMS norm, if the product includes it
    offset: float = 0.0  # of the norm's weight

    @property
    def width(self) -> int:
        """Return the bytes of a row."""
        return 2 * self.size

    @property
    def steps(self) -> int:
        """Return the steps of a unit; in the last one there may be nothing left for some threads."""
        return math.ceil(self.width / STEP)

    @property
    def rows(self) -> int:
        """Return the rows of the output that a unit has."""
        return ROWS if self.glu else ROWS * self.blocks

    @property
    def units(self) -> int:
        """Return the units."""
        return self.out // self.rows

    @property
    def turns(self) -> int:
        """Return the units of a program, at most."""
        return math.ceil(self.units / self.programs)

    @property
    def ahead(self) -> int:
        """Return the steps that are under way: those before a step are done when its place is needed again."""
        return self.steps if self.slots == self.steps and self.turns == 1 else self.slots - 1

    @property
    def parts(self) -> int:
        """Return the parts of a step: of each block, of the tokens, and of the norm's weight."""
        return self.blocks + 1 + (self.eps is not None)

    @property
    def ring(self) -> int:
        """Return the words of 32 bits of the steps in shared memory: [slot, part, thread, 4]."""
        return self.slots * self.parts * THREADS * WORDS

    @property
    def stride(self) -> int:
        """Return the floats from a token to the next one in shared memory: of a unit's rows, squares, and a gap."""
        return ROWS * self.blocks + PAD

    @property
    def held(self) -> int:
        """Return the floats of a unit's sums in shared memory: [warp, token, stride]."""
        return WARPS * COLUMNS * self.stride

    @property
    def memory(self) -> tuple[int, int]:
        """Return the words of steps and of sums; those of a unit may still be read when the next ones are stored."""
        return self.ring, self.held * min(2, self.turns)


class Output(NamedTuple):
    """Describe what a thread stores of a unit, and hold what is added to it: a word each, or nothing."""

    row: Any  # of the unit, and the next one
    token: Any
    column: Any  # of the output
    is_there: Any
    bias: list
    up_bias: list
    residual: list


Refs = dict[str, Any]  # x, w, out, ring, held; bias, residual and norm, if the product has them


def multiply(on: Any, program: Any, *refs: Any, names: tuple[str, ...], p: DensePlan) -> None:
    """Compute the units of a program."""
    warp = DenseWarp(on, dict(zip(names, refs, strict=True)), p)
    for step in range(p.ahead):
        warp.copy(program, step)
    if p.turns == 1:
        return warp.unit(program, program * 0, None)

    def turn(unit: Any, carry: list) -> list:
        warp.unit(unit, (unit - program) // p.programs % 2 * p.held, unit + p.programs)
        return carry

    on.loop(program, program * 0 + p.units, p.programs, turn, [])
    return None


class DenseWarp:
    """Write the operations of a warp."""

    def __init__(self, on: Any, refs: Refs, p: DensePlan) -> None:
        self.on, self.refs, self.p = on, refs, p
        lane, self.warp = on.thread % WARP, on.thread // WARP
        self.row, self.quad = lane // QUAD, lane % QUAD
        self.token = on.at_most(self.row, p.tokens - 1)  # lanes without a token share the last one
        self.place = self.warp * (QUAD * LOADED) + self.quad * LOADED  # of a row, in the first step

    # --- copies -------------------------------------------------------------------------------------------------------

    def copy(self, unit: Any, step: int, when: Any = None) -> None:
        """Begin to copy a step of a unit, if `when`."""
        p = self.p
        rows = [unit * p.rows + self.row + i * (p.out if p.glu else ROWS) for i in range(p.blocks)]
        sources = [*[("w", row) for row in rows], ("x", self.token), ("norm", self.row * 0)]
        for part, (name, row) in enumerate(sources[: p.parts]):
            if self._is_whole(step):
                pointer, first = self.on.pointer(self.refs[name], row, p.width, self.place), step * STEP
            else:  # what is past a row's end is multiplied by zeros
                place = self.on.at_most(self.place + step * STEP, p.width - LOADED)
                pointer, first = self.on.pointer(self.refs[name], row, p.width, place), 0
            self.on.copy_words(self.refs["ring"], self._slot(step, part), pointer, first, name != "w", when)
        self.on.end_copies()

    def _slot(self, step: int, part: int) -> Any:
        return self.on.thread * WORDS + (step % self.p.slots * self.p.parts + part) * (THREADS * WORDS)

    def _read(self, step: int) -> list:
        """Return the words of a step's parts."""
        parts = [self.on.copied(self.refs["ring"], self._slot(step, part), WORDS) for part in range(self.p.parts)]
        if not self._is_whole(step):
            is_there = self.place + step * STEP < self.p.width
            token = parts[self.p.blocks]
            parts[self.p.blocks] = [self.on.select(is_there, word, 0) for word in token]
        return parts

    def _is_whole(self, step: int) -> bool:
        return (step + 1) * STEP <= self.p.width

    # --- products -----------------------------------------------------------------------------------------------------

    def unit(self, unit: Any, held: Any, next_unit: Any) -> None:
        """Compute a unit whose first steps are under way, and begin to copy the next one, if there may be one."""
        on, p = self.on, self.p
        output = self._output(unit)
        sums, squares = [[on.constant(0.0)] * 4 for _ in range(CHAINS)], on.constant(0.0)
        for step in range(p.steps):
            ahead = step + p.ahead
            begun = ahead if next_unit is not None else min(ahead, p.steps)
            on.await_copies(begun - step - 1)
            if ahead < p.steps:
                self.copy(unit, ahead)
            elif next_unit is not None:
                self.copy(next_unit, ahead - p.steps, next_unit < p.units)
            parts = self._read(step)
            token = parts[p.blocks]
            if p.eps is not None:
                squares, token = self._scaled(squares, token, parts[-1])
            for i in (0, 2):  # of two words of a row each
                at = (step * 2 + i // 2) % CHAINS
                sums[at] = self._add(sums[at], [row[i : i + 2] for row in parts[: p.blocks]], token[i : i + 2])
        self._hold(held, [functools.reduce(lambda x, y: x + y, each) for each in zip(*sums, strict=True)], squares)
        on.barrier()
        self._finish(held, output)

    def _scaled(self, squares: Any, token: list, scale: list) -> tuple[Any, list]:
        """Return the sum of a token's squares, and its values times the norm's weight."""
        on, found = self.on, []
        for word, weight in zip(token, scale, strict=True):
            values, weights = on.numbers(word), on.numbers(weight)
            squares = functools.reduce(lambda total, x: on.fma(x, x, total), values, squares)
            weights = [w + self.p.offset for w in weights] if self.p.offset else weights
            found.append(on.pair(*[x * w for x, w in zip(values, weights, strict=True)], "bf16"))
        return squares, found

    def _add(self, sums: list, rows: list, token: list) -> list:
        """Add a product with two words of each row."""
        zero = self.on.thread * 0
        low, high = rows[0], rows[1] if len(rows) > 1 else [zero, zero]
        return self.on.multiply(sums, [low[0], high[0], low[1], high[1]], token, "bf16")

    def _hold(self, held: Any, sums: list, squares: Any) -> None:
        """Store a warp's sums, and the squares of its part of a token after them."""
        on, p, memory = self.on, self.p, self.refs["held"]
        first = held + self.warp * (COLUMNS * p.stride)
        for i in range(2 * p.blocks):
            token = self.quad * 2 + i % 2
            on.store(memory, first + token * p.stride + self.row + i // 2 * ROWS, sums[i])
        if p.eps is not None:
            for bits in (1, 2):
                squares = squares + on.other_lane(squares, bits)
            on.store(memory, first + self.row * p.stride + ROWS * p.blocks, squares)

    # --- the output ---------------------------------------------------------------------------------------------------

    def _output(self, unit: Any) -> Output:
        """Return what a thread stores: two rows of a token. It loads early what is added to them."""
        on, p, pairs = self.on, self.p, self.p.rows // 2
        row, token = on.thread % pairs * 2, on.thread // pairs
        is_there, token, column = token < p.tokens, on.at_most(token, p.tokens - 1), unit * p.rows + row
        nothing = column * 0
        bias = self._added("bias", nothing, column)
        up_bias = self._added("bias", nothing, column + p.out) if p.glu else []
        return Output(row, token, column, is_there, bias, up_bias, self._added("residual", token, column))

    def _added(self, name: str, row: Any, column: Any) -> list:
        """Load two neighbours of a row in a word, if there is something to add."""
        if name not in self.refs:
            return []
        width = 2 * self.p.out * (2 if name == "bias" and self.p.glu else 1)
        return self.on.words_now(self.on.pointer(self.refs[name], row, width, column * 2))

    def _finish(self, held: Any, output: Output) -> None:
        """Add up the warps' sums and store the output."""
        on, p = self.on, self.p
        scale = self._scale(held, output.token) if p.eps is not None else None
        found = self._sums(held, output.token, output.row, scale, output.bias)
        if p.glu:
            up = self._sums(held, output.token, output.row + ROWS, scale, output.up_bias)
            found = [gated(on, p.glu, *pair) for pair in zip(found, up, strict=True)]
        found = self._plus(found, output.residual)
        place = output.token * p.out + output.column
        on.store_all(self.refs["out"], place, [on.pair(*found, "bf16")], output.is_there)

    def _scale(self, held: Any, token: Any) -> Any:
        """Return the inverse of a token's root mean square."""
        assert self.p.eps is not None
        squares, _ = self._totals(held, token, token * 0 + ROWS * self.p.blocks)
        return self.on.inverse_root(squares * (1 / self.p.size) + float(self.p.eps))

    def _sums(self, held: Any, token: Any, row: Any, scale: Any, bias: list) -> list:
        """Return two rows' sums, with the factor and what is added."""
        found = self._totals(held, token, row)
        return self._plus(found if scale is None else [y * scale for y in found], bias)

    def _totals(self, held: Any, token: Any, row: Any) -> list:
        """Return the totals over the warps of two neighbouring rows."""
        p, first = self.p, held + token * self.p.stride + row
        parts = [self.on.floats(self.refs["held"], first + warp * COLUMNS * p.stride, 2) for warp in range(WARPS)]
        return [functools.reduce(lambda x, y: x + y, each) for each in zip(*parts, strict=True)]

    def _plus(self, values: list, words: list) -> list:
        """Add the pair in a word, if there is one."""
        return [x + y for x, y in zip(values, self.on.numbers(words[0]), strict=True)] if words else values


def gated(on: Any, glu: Glu, gate: Any, up: Any) -> Any:
    """Return what Glu.in_kernel does."""
    if glu.limit is not None:
        limit, least = on.constant(glu.limit), on.constant(-glu.limit)
        gate, up = on.minimum(gate, limit), on.minimum(on.maximum(up, least), limit)
        return gate * sigmoid(on, gate * glu.alpha) * (up + 1.0)
    inner = (gate + gate * gate * gate * CUBE) * SLOPE if glu.kind == "gelu_tanh" else gate
    return gate * sigmoid(on, inner) * up


def sigmoid(on: Any, x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    return on.inverse(on.exp2(x * -math.log2(math.e)) + 1.0)
