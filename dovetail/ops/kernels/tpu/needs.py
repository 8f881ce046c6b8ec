"""Check what each kernel for TPUs requires, say why it cannot take a call, and choose the flat kernel's tiles.

ops.dispatch chooses by these. Each `why_not` function returns its reason as the end of a sentence, or None if the
kernel takes the call. Shapes are of all devices. The sizes of SMEM and VMEM are jax's own (pltpu.get_tpu_info_for_chip;
a test compares them).

T tokens of S sequences, N query heads, K key heads, G = N / K, H head dim, W width of a row, M pages a sequence may
hold, I tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.chips import chip_of
from dovetail.core.mesh import Placement

DTYPES = (jnp.bfloat16, jnp.float32)
TOO_OLD = ("TPU v2", "TPU v3")


IMAGE_ROW = 1 << 16  # tokens of a row, at most, in which image tokens see each other (see packed.AHEAD_BITS)


def why_not_splash(q: Any, sinks: Any = None, block_mask: bool = False) -> str | None:
    """Return why upstream's packed kernel cannot take q [B, T, N, H]."""
    if block_mask and q.shape[1] > IMAGE_ROW:
        return f"with images it takes rows of at most {IMAGE_ROW} tokens, and these have {q.shape[1]}"
    return "it does not support sinks" if sinks is not None else why_not_rows(q)


def why_not_rows(q: Any) -> str | None:
    """Return why neither upstream's nor tokamax's packed kernel can take q."""
    if q.dtype not in DTYPES:
        return f"it takes bf16 and f32, and this is {q.dtype}"
    if (kind := tpu_kind(None)) in TOO_OLD:
        return f"it wants v4 or later, and this is {kind}"
    return f"it takes rows of multiples of 128 tokens, and these have {q.shape[1]}" if q.shape[1] % 128 else None


def why_not_ragged(
    q: Any,  # [T, N, H]
    kv_heads: int,
    sinks: Any = None,
    placement: Placement | None = None,
    tables: Any = None,  # [S, M]
    block_mask: bool = False,
) -> str | None:
    """Return why upstream's kernel over pages [P, page, 2K, H] cannot take a call."""
    reason = why_not_heads(q.shape[-1], q.dtype, kv_heads, sinks is not None, placement, block_mask)
    reason = reason or why_not_chip(placement)
    if reason is None and tables is not None and table_bytes(*tables.shape) > TABLE_BYTES:
        size, most = (bytes / MIB for bytes in (table_bytes(*tables.shape), TABLE_BYTES))
        reason = f"its table of pages would take {size:.1f} MiB of SMEM, and it has room for {most:.1f}: longer pages"
    return reason


def why_not_heads(
    head_dim: int,
    dtype: Any,
    kv_heads: int,
    has_sinks: bool,
    placement: Placement | None = None,
    block_mask: bool = False,
) -> str | None:
    """Return why upstream's kernel cannot read pages [P, page, 2K, H], or XLA does not lay them out row by row."""
    here = heads_here(kv_heads, placement)[0]
    rows, odd = divmod(2 * here, 4 // jnp.dtype(dtype).itemsize)  # of keys and values, in words of 32 bits
    reasons = {
        f"it takes heads of multiples of 128 dims, and these have {head_dim}": head_dim % 128 != 0,
        # Mosaic loads every second row and the like of 128 lanes alone
        f"it takes one key head of {head_dim} dims on a device, in bf16, and here are {here} in {jnp.dtype(dtype)}": (
            head_dim > 128 and (rows, odd) != (1, 0)
        ),
        "it does not support sinks": has_sinks,
        "it is causal, and image tokens see each other here": block_mask,
        f"it takes bf16 and f32, and this is {jnp.dtype(dtype)}": dtype not in DTYPES,
        f"it cannot tile {here} key heads on a device: in bf16 1, 2, 4 or a multiple of 8": (
            odd > 0 or not (rows in (1, 2, 4, 8) or rows % 8 == 0)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_not_flat(
    q: Any,  # [T, N, H], or of latents [T, N, C]
    kv_heads: int,
    placement: Placement | None = None,
    tables: Any = None,  # [S, M]
    pages: Any = None,  # [P, page, W]
    rank: int | None = None,  # of latents
) -> str | None:
    """Return why our kernel over flat pages cannot take a call."""
    if q.dtype not in DTYPES:
        return f"it takes bf16 and f32, and this is {q.dtype}"
    if (reason := why_not_chip(placement)) or pages is None or tables is None:
        return reason
    if pages.ndim != 3:
        return "its pages are flat ones, and these were made for another kernel"
    packed = SUBLANES * 4 // q.dtype.itemsize
    if pages.shape[1] % packed:
        return f"it takes pages of multiples of {packed} tokens, and these have {pages.shape[1]}"
    return _why_no_room(q, kv_heads, placement, tables, pages, rank)


def _why_no_room(q, kv_heads, placement, tables, pages, rank) -> str | None:
    here, parts = heads_here(q.shape[1] if rank else kv_heads, placement)
    T, N, H = q.shape[0], q.shape[1] // parts, q.shape[2]
    page = jax.ShapeDtypeStruct((1, pages.shape[1], pages.shape[2] if rank else pages.shape[2] // parts), pages.dtype)
    cut = tiling((T, N, H), tables.shape[0], 1 if rank else here, page, rank)
    wants = {
        "SMEM": flat_smem(num_tiles(T, tables.shape[0], cut.tokens), tables.shape[1]),
        "VMEM": flat_vmem(cut, page),
    }
    room = room_of(tpu_kind(placement))
    for name, has in (room._asdict() if room else {}).items():
        if wants[name.upper()] > has * 3 / 4:
            return f"it wants {wants[name.upper()] / MIB:.1f} MiB of {name.upper()}, and a core has {has / MIB:.1f}"
    return None


def why_not_chip(placement: Placement | None) -> str | None:
    """Return why the chip is not supported."""
    kind = tpu_kind(placement)
    if not kind:
        return "it is compiled for one kind of TPU, and none is known here"
    return f"it wants v4 or later, and this is {kind}" if kind in TOO_OLD else None


def heads_here(kv_heads: int, placement: Placement | None) -> tuple[int, int]:
    """Return the key heads of one device, and the devices that they are split over."""
    parts = placement.size("kv_heads") if placement else 1
    return (kv_heads // parts, parts) if kv_heads % parts == 0 else (kv_heads, 1)


def tpu_kind(placement: Placement | None) -> str:
    """Return the kind of TPU that a call is compiled for: that of the mesh, the context, or this machine.

    "" for none.
    """
    mesh: Any = placement.mesh if placement else jax.sharding.get_abstract_mesh()
    device = getattr(mesh, "abstract_device", None) or (mesh.devices.flat[0] if placement else None)
    if device is None and jax.default_backend() == "tpu":
        device = jax.devices()[0]
    kind = getattr(device, "device_kind", "")
    return kind if "TPU" in kind else ""


MIB = 2**20
TABLE_BYTES = MIB // 2  # of SMEM, for upstream's table: libtpu took one of 256 x 512 and refused one of 256 x 1,024


class Room(NamedTuple):
    """Hold the bytes of SMEM and VMEM of a core."""

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
    """Return the memory of a jax device_kind; None if it is not in the table."""
    chip = chip_of(kind)
    return ROOM.get(chip.name) if chip else None


def table_bytes(seqs: int, width: int) -> int:
    """Return the SMEM of upstream's kernel: every sequence's pages [S, M]."""
    return seqs * width * 4


def flat_smem(tiles: int, width: int) -> int:
    """Return the SMEM of our kernel.

    It holds the M pages of this tile's sequence and of the next's, each twice while the next pair arrives, and three
    numbers of each of I tiles.
    """
    return 4 * whole(width) * 4 + 3 * tiles * 4


def flat_vmem(cut: Tiling, pages: Any) -> int:
    """Return the VMEM of our kernel.

    It holds the buffers of two blocks, queries and outputs twice, the softmax's state with its start, and the scores,
    keys and values of the current head.
    """
    _, page, width = pages.shape
    keys, rows, sizes = cut.pages * page, cut.rows * len(cut.heads), whole(cut.key) + whole(cut.value)
    buffers = 2 * keys * whole(width) * pages.dtype.itemsize
    tiles = 2 * rows * sizes * pages.dtype.itemsize
    state = rows * (4 * LANES + whole(cut.value)) * 4
    return buffers + tiles + state + 3 * cut.rows * whole(keys) * 4 + keys * sizes * 4


LANES, SUBLANES = 128, 8
KEYS = 256  # of a block
BUFFER_BYTES = 2**22  # of VMEM, for this block's pages and the next's
TOKENS = 32  # of a tile, where sequences have many
ROWS = 1024  # of a tile over all heads, at most


class LaneSpan(NamedTuple):
    """Hold a range of lanes of a page's row."""

    first: int
    size: int


class Tiling(NamedTuple):
    """Describe the tiles of queries and blocks of keys."""

    tokens: int  # of a tile: R, a power of two
    rows: int  # of a tile for each key head: G R, in whole sublanes
    pages: int  # of a block
    heads: tuple[tuple[LaneSpan, LaneSpan], ...]  # where each key head's keys and values are

    @property
    def key(self) -> int:
        """Return the lanes of a key."""
        return self.heads[0][0].size

    @property
    def value(self) -> int:
        """Return the lanes of a value."""
        return self.heads[0][1].size


def tiling(shape: tuple[int, ...], seqs: int, kv_heads: int, pages: Any, rank: int | None = None) -> Tiling:
    """Return the tiling for queries of shape [T, N, H] and pages [P, page, W].

    `rank` is that of latents, whose row is one key of H numbers for all heads, the first `rank` of them its value. A
    decode step's tile is one token.
    """
    count, N, H = shape
    tokens = 1 if count <= seqs else SUBLANES if count <= SUBLANES * seqs else TOKENS
    while tokens > 1 and tokens * N > ROWS:
        tokens //= 2
    keys = min(KEYS, BUFFER_BYTES // (2 * pages.shape[2] * pages.dtype.itemsize))
    heads = ((LaneSpan(0, H), LaneSpan(0, rank)),) if rank else head_spans(kv_heads, H)
    return Tiling(tokens, whole(N // kv_heads * tokens, SUBLANES), max(1, keys // pages.shape[1]), heads)


def head_spans(K: int, H: int) -> tuple[tuple[LaneSpan, LaneSpan], ...]:
    """Return the lanes of each head's keys and values, which are side by side.

    Both in one tile of lanes are read as one: the query has zeros for the values, and the keys' part of the output is
    cut off.
    """
    if 2 * H <= LANES:
        return tuple((LaneSpan(2 * H * k, 2 * H), LaneSpan(2 * H * k, 2 * H)) for k in range(K))
    return tuple((LaneSpan(2 * H * k, H), LaneSpan(2 * H * k + H, H)) for k in range(K))


def num_tiles(T: int, seqs: int, tokens: int) -> int:
    """Return the maximum number of tiles (see ops.paged.tiles_of)."""
    return T if tokens == 1 else T // tokens + seqs


def whole(size: int, unit: int = LANES) -> int:
    """Round a size up to a multiple of `unit`."""
    return -(-size // unit) * unit
