"""Split the tokens of a batch into chunks, so that their logits are never all in memory at once.

The logits of 32k tokens over a vocabulary of 128k are 16 GiB in f32: they are processed chunk by chunk. On a mesh each
device chunks its own tokens, so that a loop over chunks has no collective but those of a split vocabulary.

B rows, T tokens, D model dim, V vocabulary; G groups of tokens (one per device that holds different ones), n chunks of
C tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dovetail.core.chips import LOGITS_BYTES, logit_chunks
from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, Rules, constrain

# The logits of one chunk on one device, LOGITS_BYTES of an accelerator. Each chunk reads the head twice and reads and
# writes its whole f32 gradient, so small chunks are slow: for C tokens that traffic is about 2 (FLOP/s / bandwidth) / C
# of the products' time, a fifth on an H200 with 2048 tokens (1 GiB of 128k words), and more than their whole with 256.
CPU_BYTES = 64 << 20


@dataclass(frozen=True)
class Chunks:
    """Describe the chunks of a batch; static, so that it can be one argument of traced functions.

    [B, T, ...] becomes [n, G, C, ...]: groups of whole rows (and of whole parts of rows, where a mesh splits those),
    with chunks of tokens in each group, the last one padded with zeros. `placement` knows G as "tokens".
    """

    rows: int  # B
    length: int  # T
    row_groups: int
    length_groups: int
    number: int  # n
    size: int  # C
    placement: Placement | None

    @property
    def groups(self) -> int:
        """Return G."""
        return self.row_groups * self.length_groups

    @property
    def tokens(self) -> int:
        """Return the tokens of one group."""
        return self.rows * self.length // self.groups

    def split(self, x: jax.Array) -> jax.Array:
        """Map [B, T, ...] to [n, G, C, ...]; on a mesh, no token leaves its device."""
        b, s, rest = self.row_groups, self.length_groups, x.shape[2:]
        x = x.reshape(b, self.rows // b, s, self.length // s, *rest).swapaxes(1, 2)
        x = x.reshape(self.groups, self.tokens, *rest)
        fill = self.number * self.size - self.tokens
        x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * len(rest)) if fill else x
        x = x.reshape(self.groups, self.number, self.size, *rest).swapaxes(0, 1)
        return constrain(x, self.placement, None, "tokens", None, *(None for _ in rest))

    def join(self, x: jax.Array) -> jax.Array:
        """Invert `split`."""
        b, s, rest = self.row_groups, self.length_groups, x.shape[3:]
        x = x.swapaxes(0, 1).reshape(self.groups, self.number * self.size, *rest)[:, : self.tokens]
        x = x.reshape(b, s, self.rows // b, self.length // s, *rest).swapaxes(1, 2)
        return x.reshape(self.rows, self.length, *rest)


def chunks_of(
    shape: tuple[int, ...], words: int, *, itemsize: int, chunk: int | None, placement: Placement | None
) -> Chunks:
    """Return the chunks of a batch [B, T, ...].

    They have `chunk` tokens, or as many as fit with `itemsize` bytes for each entry of the vocabulary on a device.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1 token; got {chunk}", param="chunk")
    rows, length = shape[:2]
    row_axes, row_groups = _groups(placement, "batch", rows)
    length_axes, length_groups = _groups(placement, "length", length)
    if placement is not None:
        table = (*placement.rules.table, ("tokens", row_axes + length_axes))
        placement = Placement(placement.mesh, Rules(table))
    tokens = rows * length // (row_groups * length_groups)
    held = words // (placement.size("vocab") if placement else 1)
    number, size = logit_chunks(tokens, chunk or max(1, _chunk_bytes(placement) // (itemsize * held)))
    return Chunks(rows, length, row_groups, length_groups, number, size, placement)


def scaled(hidden: jax.Array, scale: float) -> jax.Array:
    """Scale hidden states, which are fewer than the logits."""
    return hidden if scale == 1.0 else (hidden.astype(jnp.float32) * scale).astype(hidden.dtype)


def capped(raw: jax.Array, softcap: float | None) -> jax.Array:
    """Return logits in f32 from those before the soft cap."""
    logits = raw.astype(jnp.float32)
    return jnp.tanh(logits / softcap) * softcap if softcap else logits


def is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Compare instead of gathering.

    It fuses with its consumer, and needs nothing from a device with other vocabulary.
    """
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]


def _groups(placement: Placement | None, logical: str, dim: int) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that a dim is split over, and their size.

    None if they do not divide it, as in Placement.partition.
    """
    size = placement.size(logical) if placement else 1
    return (placement.rules.axes_of(logical), size) if placement and dim % size == 0 else ((), 1)


def _chunk_bytes(placement: Placement | None) -> int:
    platform = placement.platform if placement else jax.default_backend()
    return CPU_BYTES if platform == "cpu" else LOGITS_BYTES
