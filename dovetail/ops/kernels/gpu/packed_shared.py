"""Sizes of what programs of several blocks (packed_turns) have in shared memory, and how tiles share the programs."""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental import pallas as pl
from jax.extend.mlir.dialects import arith

from dovetail.ops.kernels.gpu.packed_warp import BLOCK, FewPlan
from dovetail.ops.kernels.gpu.warp_ops import ballot, byte_address, c, count_ones, load_words, thread, times, wide

PIECE = 8  # values of a token in 16 bytes
PAD = 64  # bytes after each token: two tokens are read from different banks


def suits(p: FewPlan) -> bool:
    """Return whether each step of a row begins with a group, and whole pieces of a token belong to a load."""
    return p.step % max(1, p.form.group // p.per_byte) == 0 and p.loaded * p.per_byte % PIECE == 0


def pieces(p: FewPlan) -> int:
    """Return the pieces of a token in shared memory, as many for each thread."""
    return pl.cdiv(p.steps * p.step * p.per_byte // PIECE, p.threads) * p.threads


def token_words(p: FewPlan) -> int:
    """Return the words of 32 bits from a token to the next one in shared memory."""
    return (16 * pieces(p) + PAD) // 4


def ring_words(p: FewPlan) -> int:
    """Return the words of 32 bits of the codes of `ahead` steps."""
    return p.ahead * p.names * 2 * p.threads * p.loaded // 4


def group_bytes(p: FewPlan) -> dict[str, int]:
    """Return the bytes of the scales and zero points of a row's groups."""
    lengths = p.form.lengths(p.size)
    kinds = [kind for kind in ("scale", "zero") if p.form.group and kind in lengths]
    return {kind: lengths[kind][0] * lengths[kind][1].itemsize for kind in kinds}


def scale_words(p: FewPlan) -> int:
    """Return the words of 32 bits of the scales and zero points of a block, twice."""
    return max(1, 2 * p.names * BLOCK * sum(group_bytes(p).values()) // 4)


def share(table: Any, tiles: int, programs: int, program: Any) -> tuple:
    """Return the tile of a program, which of the tile's programs this is, and how many programs a tile has.

    The tiles in use, whose tokens in the last row of the table are not 0, have as many programs each. A program that is
    left over is one behind its tile's last. Each lane looks at one tile of 32.
    """
    lane, zero = arith.remui(thread(), c(32)), c(0)
    masks = []
    for first in range(0, tiles, 32):
        at = arith.addi(lane, c(first))
        place = byte_address(table, wide(c(3)), 4 * tiles, times(arith.minsi(at, c(tiles - 1)), 4))
        is_used = arith.cmpi(arith.CmpIPredicate.slt, zero, load_words(place, 1)[0])
        masks.append(ballot(arith.andi(is_used, arith.cmpi(arith.CmpIPredicate.slt, at, c(tiles)))))
    used = functools.reduce(arith.addi, map(count_ones, masks))
    each = arith.divui(c(programs), arith.maxui(used, c(1)))
    rank, before, tile = arith.divui(program, each), zero, zero
    for i, mask in enumerate(masks):
        own = arith.addi(before, count_ones(arith.andi(mask, arith.subi(arith.shli(c(1), lane), c(1)))))
        bit = arith.andi(arith.shrui(mask, lane), c(1))
        is_it = arith.andi(arith.cmpi(arith.CmpIPredicate.eq, own, rank), arith.cmpi(arith.CmpIPredicate.eq, bit, c(1)))
        found = ballot(is_it)  # of one lane, or none
        exists = arith.cmpi(arith.CmpIPredicate.eq, count_ones(found), c(1))
        lower = count_ones(arith.subi(found, c(1)))
        tile = arith.select(exists, arith.addi(lower, c(32 * i)), tile)
        before = arith.addi(before, count_ones(mask))
    has_tile = arith.cmpi(arith.CmpIPredicate.slt, rank, used)
    return tile, arith.select(has_tile, arith.remui(program, each), each), each
