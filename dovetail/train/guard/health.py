"""Judge a step on the device before its update, so that a bad gradient never reaches the weights.

    ok, health = judge(state.health, loss, grad_norm, settings)
    params = jax.tree.map(lambda new, old: jnp.where(ok, new, old), updated, state.params)

A bad step sets `halted`; the steps already launched behind it then change nothing, until the host has decided
(train.guard.doctor) and cleared it.

`judge` cannot see a flipped bit that leaves loss and gradient norm ordinary. `checksums` can: devices that hold the
same values (data-parallel replicas after the all-reduce) must have the same sum of bits, and so must one device in two
runs of the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dovetail.core.training import Health
from dovetail.io.manifest import words

HORIZON = 50  # good steps over which the running means decay
LOSS_FLOOR = 0.02  # the least usual deviation, as a share of the mean loss, for very smooth curves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HealthState:
    """Scalars on the device, saved with the weights."""

    halted: jax.Array  # bool: a bad step occurred; nothing is applied until `cleared`
    count: jax.Array  # int32: good steps so far
    log_norm: jax.Array  # f32: running mean of the gradient norm's logarithm
    loss: jax.Array  # f32: running mean of the loss
    deviation: jax.Array  # f32: running mean of |loss - its mean|


def init() -> HealthState:
    """Return the initial state with one buffer per field: fields that share a buffer cannot be donated."""
    zeros = [jnp.zeros((), dtype) for dtype in (jnp.bool_, jnp.int32, jnp.float32, jnp.float32, jnp.float32)]
    return HealthState(*zeros)


def judge(state: HealthState, loss: jax.Array, grad_norm: jax.Array, settings: Health) -> tuple[jax.Array, HealthState]:
    """Return (whether to apply the step, the new state).

    A step is bad if loss or gradient norm are not finite or, after `settings.warmup` good steps,
      grad_norm > spike * its running geometric mean, or
      loss - its running mean > spike * max(its running mean deviation, LOSS_FLOOR * |mean|).
    A bad step does not change the running means, so one spike does not hide the next.
    """
    loss, norm = jnp.asarray(loss, jnp.float32), jnp.asarray(grad_norm, jnp.float32)
    usual = jnp.maximum(state.deviation, LOSS_FLOOR * jnp.abs(state.loss))
    spike = (norm > settings.spike * jnp.exp(state.log_norm)) | (loss - state.loss > settings.spike * usual)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    ok = ~state.halted & finite & ~(spike & (state.count >= settings.warmup))
    # A gradient of exactly zero (a batch without targets) is not bad, but is not part of the usual norm.
    counts = ok & (norm > 0)
    after = _after(state, loss, norm)
    chosen = jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, state)
    return ok, replace(chosen, halted=~ok)


def _after(state: HealthState, loss: jax.Array, norm: jax.Array) -> HealthState:
    """Return the means after one more good step: plain at first, exponential after HORIZON steps."""
    rate = jnp.maximum(1.0 / (state.count + 1).astype(jnp.float32), 1.0 / HORIZON)
    first = state.count == 0
    away = jnp.where(first, 0.0, jnp.abs(loss - state.loss))
    return HealthState(
        halted=state.halted,
        count=state.count + 1,
        log_norm=state.log_norm + rate * (jnp.log(norm) - state.log_norm),
        loss=state.loss + rate * (loss - state.loss),
        deviation=state.deviation + rate * (away - state.deviation),
    )


def cleared(state: HealthState) -> HealthState:
    """Return the state with `halted` cleared, after the host has handled the bad step."""
    return replace(state, halted=jnp.zeros_like(state.halted))


# --- checksums of a device's values -----------------------------------------------------------------------------------


def checksum(tree: Any) -> jax.Array:
    """Return a [] uint32 over the bits of a device's part of a tree, for use in shard_map.

    Any single flipped bit changes it.
    """
    sums = [jnp.sum(words(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree)]
    # Multiply by an odd number between leaves, so that equal changes in two of them do not cancel.
    return reduce(lambda total, one: total * jnp.uint32(0x9E3779B1) + one, sums, jnp.uint32(0))


def checksums(tree: Any, mesh: Mesh, specs: Any) -> jax.Array:
    """Return [devices] uint32, each device's checksum of its shards, in the order of mesh.devices.flat."""
    each = jax.shard_map(
        lambda local: checksum(local)[None],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,  # replicas are to be compared, not assumed equal
    )
    return each(tree)


def replicas(mesh: Mesh, specs: Any) -> list[list[int]]:
    """Return groups of device ids that hold the same shards of a tree with these `specs`.

    Their checksums must be equal (see `doctor.disagreement`). All leaves are taken together, so groups of one cannot be
    compared: with fsdp alone only replays can.
    """
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    parts = [part for spec in leaves for part in spec if part is not None]
    split = {name for part in parts for name in (part if isinstance(part, tuple) else (part,))}
    order = sorted(range(mesh.devices.ndim), key=lambda dim: mesh.axis_names[dim] not in split)
    rest = math.prod(size for name, size in mesh.shape.items() if name not in split)
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    return ids.transpose(order).reshape(-1, rest).tolist()
