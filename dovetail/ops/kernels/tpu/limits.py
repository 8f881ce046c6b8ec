"""What a TPU's core has room for, and what the paged kernels want of it: scalars in SMEM, tiles and buffers in VMEM.

The sizes are jax's own (pltpu.get_tpu_info_for_chip; a test compares them).

S sequences, M pages a sequence may hold, I tiles, K key heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dovetail.core.chips import chip_of
from dovetail.ops.kernels.tpu.tiling import LANES, Tiling, whole

MIB = 2**20
TABLE_BYTES = MIB // 2  # of SMEM, for upstream's table: libtpu took one of 256 x 512 and refused one of 256 x 1,024


class Room(NamedTuple):
    smem: int
    vmem: int


ROOM = {
    "v2": Room(16 * 2**10, 16 * MIB),
    "v3": Room(16 * 2**10, 16 * MIB),
    "v4": Room(MIB, 16 * MIB),
    "v5e": Room(MIB, 128 * MIB),
    "v5p": Room(MIB, 64 * MIB),
    "v6e": Room(MIB, 128 * MIB),
    "TPU7x": Room(MIB, 64 * MIB),
}


def room_of(kind: str) -> Room | None:
    """Of a jax device_kind; None for one that is not in the table."""
    chip = chip_of(kind)
    return ROOM.get(chip.name) if chip else None


def table_bytes(seqs: int, width: int) -> int:
    """SMEM of upstream's kernel: every sequence's pages [S, M]."""
    return seqs * width * 4


def flat_smem(tiles: int, width: int) -> int:
    """SMEM of ours: the M pages of this tile's sequence and of the next's, each twice over while the next pair comes
    in, and three numbers of each of I tiles."""
    return 4 * whole(width) * 4 + 3 * tiles * 4


def flat_vmem(cut: Tiling, pages: Any) -> int:
    """VMEM of ours: the buffers of two blocks, queries and outputs twice over, the softmax's state with its start, and
    the scores, keys and values of the head at work."""
    _, page, width = pages.shape
    keys, rows, sizes = cut.pages * page, cut.rows * len(cut.heads), whole(cut.key) + whole(cut.value)
    buffers = 2 * keys * whole(width) * pages.dtype.itemsize
    tiles = 2 * rows * sizes * pages.dtype.itemsize
    state = rows * (4 * LANES + whole(cut.value)) * 4
    return buffers + tiles + state + 3 * cut.rows * whole(keys) * 4 + keys * sizes * 4
