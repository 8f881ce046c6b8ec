"""Sample tokens and their log-probabilities from logits in four kernels for Hopper (Pallas, Mosaic GPU).

`adjust` changes the rows that have a bias, penalties or a mask; `block_sums` reads all logits once; `keep` finds what
truncation keeps of the rows that ask for it; `draw` is a program per row. There is no sort, and no branch that waits
for the host.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dovetail.ops.kernels.gpu.mosaic.adjust import adjust
from dovetail.ops.kernels.gpu.mosaic.blocks import PART, block_sums
from dovetail.ops.kernels.gpu.mosaic.draw import Scores, draw
from dovetail.ops.kernels.gpu.mosaic.truncate import keep
from dovetail.ops.kernels.gpu.noise import BLOCK

ALIGNED = 64  # numbers of 4 bytes
LEAST = PART * BLOCK  # tokens that a kernel reads at once


def sample(
    logits: jax.Array,  # [S, V]
    inputs: Any,  # ops.sample.SampleInputs
    history: jax.Array,  # [N, V] int32
    top: int,
    interpret: Any = None,
) -> tuple[jax.Array, Scores]:
    """Sample as ops.sample.sample does. The logits are changed in place if the caller has no further use for them."""
    inputs = jax.tree.map(_own_buffer, inputs)
    V = logits.shape[1]
    missing = max(-V % BLOCK, LEAST - V)
    logits = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, missing)), constant_values=-jnp.inf)
    blocks = adjust(logits, inputs, history).reshape(len(logits), -1, BLOCK)
    sums = block_sums(blocks, inputs, interpret)
    kept = keep(blocks, sums[0], sums[1], inputs)
    return draw(blocks, sums, kept, inputs, top, interpret)


def _own_buffer(x: jax.Array) -> jax.Array:
    """Return numbers of rows [S] with padding behind them.

    In a step they are slices of one array, and a kernel's buffers begin at multiples of 256 bytes.
    """
    return jnp.pad(x, (0, ALIGNED - len(x) % ALIGNED)) if x.ndim == 1 else x
