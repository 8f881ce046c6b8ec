"""Cross entropy of a batch whose logits are never all in memory at once.

The logits of 32k tokens over a vocabulary of 128k are 16 GiB in f32. They are computed one chunk of tokens at a time,
and if a gradient is needed, each chunk's part is computed in the same pass, while its logits exist: the backward pass
only scales what the forward pass kept, and no logit is computed twice.

Products run in the dtype of `hidden` and are summed in f32; `head` may be an f32 master, and its gradient then stays
f32. On a mesh each device chunks its own tokens and sums its own part of the head's gradient, so that the loop has no
collective but those of a split vocabulary; the parts are added once, at the end.

B rows, T tokens, D model dim, V vocabulary; G groups of tokens (one per device that holds different ones), n chunks of
C tokens each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, constrain
from dovetail.ops.chunks import Chunks, capped, chunks_of, is_target, scaled
from dovetail.ops.dispatch import choose_loss, loss_kernel
from dovetail.ops.linear import ARRAYS, matmul, matmul_transposed


def cross_entropy(
    hidden: jax.Array,
    head: Any,
    targets: jax.Array,
    mask: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    z: float = 0.0,
    dtype: Any = jnp.float32,
    chunk: int | None = None,
    placement: Placement | None = None,
    trains_head: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (loss, metrics) of hidden [B, T, D] under head [V, D]: sums over tokens in f32, weighted by mask [B, T].

    The loss is the sum of -log p(target) + z * logsumexp(logits)^2. A caller divides by the number of targets of the
    whole step, so that microbatches add up to exactly the large batch. The metrics have no gradient: `nll` and `z`, the
    two parts of the loss, and `correct`, the weight of the tokens whose target is the most probable.

    Args:
        hidden: [B, T, D].
        head: [V, D], an array or an ops.linear.Table, whose gradient is 0.
        targets: [B, T]; anything where the mask is 0.
        mask: [B, T] weights.
        scale: The factor of the logits, before the cap.
        softcap: The soft cap of the logits; None for none.
        z: The weight of the squared logsumexp.
        chunk: The tokens whose logits a device holds at a time; None for a default.
        dtype: The type of the logits; bf16 halves what is read and written (all else is computed in f32).
        placement: The mesh and its rules.
        trains_head: False sets the head's gradient to 0 at no cost.
    """
    _check(hidden, head, targets, mask)
    dtype = jnp.dtype(dtype)
    cut = chunks_of(hidden.shape, head.shape[0], itemsize=dtype.itemsize, chunk=chunk, placement=placement)
    trains_head = trains_head and isinstance(head, ARRAYS)
    kernel = choose_loss(placement, jax.ShapeDtypeStruct((1, head.shape[0]), dtype))
    plan = _Plan(softcap, z, dtype, cut, kernel, trains_head)
    loss, metrics = _cross_entropy(plan, scaled(hidden, scale), head, targets, mask.astype(jnp.float32))
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def _check(hidden: jax.Array, head: Any, targets: jax.Array, mask: jax.Array) -> None:
    if hidden.ndim != 3 or len(head.shape) != 2 or hidden.shape[-1] != head.shape[-1]:
        raise UserError(f"hidden must be [B, T, D] and head [V, D]; got {hidden.shape} and {head.shape}")
    if targets.shape != hidden.shape[:2] or mask.shape != hidden.shape[:2]:
        raise UserError(f"targets and mask must be {hidden.shape[:2]}; got {targets.shape} and {mask.shape}")


# --- how it is computed -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """Define the loss and the chunks; static, so that it is one argument of the functions below."""

    softcap: float | None
    z: float
    dtype: Any  # of the logits
    cut: Chunks
    kernel: str  # of cross entropy and its gradient (see `choose_loss`)
    trains_head: bool

    @property
    def placement(self) -> Placement | None:
        return self.cut.placement

    def gathered(self, head: Any, dtype: Any) -> Any:
        """Cast the head where it is, then gather all but its vocabulary: one collective, before the loop."""
        cast = head.astype(dtype)
        return constrain(cast, self.placement, "vocab", None) if isinstance(head, ARRAYS) else cast

    def no_gradient(self, head: jax.Array) -> jax.Array:
        if not self.trains_head:
            return jnp.zeros((0,), jnp.float32)
        zeros = jnp.zeros((self.cut.groups, *head.shape), jnp.float32)
        return constrain(zeros, self.placement, "tokens", "vocab", None)

    def reduced(self, dhead_GVD: jax.Array) -> jax.Array:
        return (
            dhead_GVD
            if not self.trains_head
            else constrain(jnp.sum(dhead_GVD, axis=0), self.placement, "vocab", "embed")
        )


# --- a chunk ----------------------------------------------------------------------------------------------------------


def _raw_logits(plan: _Plan, h_GCD: jax.Array, head_VD: Any) -> jax.Array:
    """Return the logits before the soft cap."""
    logits = matmul(h_GCD, head_VD, out_dtype=plan.dtype)
    return constrain(logits, plan.placement, "tokens", None, "vocab")


def _logits(plan: _Plan, h_GCD: jax.Array, head_VD: Any) -> jax.Array:
    return capped(_raw_logits(plan, h_GCD, head_VD), plan.softcap)


def _score(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (log p of the target, logsumexp, whether the target is the most probable), each [G, C]."""
    top = jnp.max(logits, axis=-1)
    lse = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    chosen = jnp.sum(jnp.where(is_target(logits, targets), logits, 0.0), axis=-1)
    return chosen - lse, lse, chosen >= top


def _dlogits(plan: _Plan, logits: jax.Array, targets: jax.Array, lse: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the gradient of weight * (-log p(target) + z lse^2) by the logits before the soft cap."""
    p = jnp.exp(logits - lse[..., None])
    grad = p * (1.0 + 2.0 * plan.z * lse)[..., None] - is_target(logits, targets)
    if plan.softcap:
        grad = grad * (1.0 - jnp.square(logits / plan.softcap))
    return grad * weight[..., None]


def _score_and_dlogits(plan: _Plan, raw: jax.Array, targets: jax.Array, weight: jax.Array, dtype: Any):
    """Return both of the above, from one kernel on a single GPU."""
    if plan.kernel == "reference":
        logits = capped(raw, plan.softcap)
        logp, lse, best = _score(logits, targets)
        return logp, lse, best, _dlogits(plan, logits, targets, lse, weight).astype(dtype)
    run = functools.partial(loss_kernel(plan.kernel), z=plan.z, softcap=plan.softcap, dtype=dtype)
    return tuple(x[None] for x in run(raw[0], targets[0], weight[0]))


def _gradients(plan: _Plan, dlogits: jax.Array, h_GCD: jax.Array, head_VD: Any, dhead_GVD: jax.Array):
    """Return the chunk's gradient by hidden, and the head's so far with the chunk's added."""
    dh = matmul_transposed(dlogits, head_VD, jnp.float32)
    dh = constrain(dh.astype(h_GCD.dtype), plan.placement, "tokens", None, None)
    if not plan.trains_head:
        return dh, dhead_GVD
    dhead_GVD = dhead_GVD + jnp.einsum("gcv,gcd->gvd", dlogits, h_GCD, preferred_element_type=jnp.float32)
    return dh, constrain(dhead_GVD, plan.placement, "tokens", "vocab", None)


# --- cross entropy ----------------------------------------------------------------------------------------------------


def _cross_entropy_only(plan: _Plan, hidden, head, targets, mask):
    head_VD = plan.gathered(head, hidden.dtype)

    def step(sums, chunk):
        h, t, w = chunk
        return _add(sums, _parts(plan, w, *_score(_logits(plan, h, head_VD), t))), None

    chunks = tuple(plan.cut.split(x) for x in (hidden, targets, mask))
    sums, _ = jax.lax.scan(step, _no_sums(plan), chunks)
    return _totals(sums)


def _cross_entropy_forward(plan: _Plan, hidden, head, targets, mask):
    head_VD = plan.gathered(head, hidden.dtype)

    def step(carry, chunk):
        sums, dhead = carry
        h, t, w = chunk
        raw = _raw_logits(plan, h, head_VD)
        logp, lse, best, dlogits = _score_and_dlogits(plan, raw, t, w, h.dtype)
        dh, dhead = _gradients(plan, dlogits, h, head_VD, dhead)
        return (_add(sums, _parts(plan, w, logp, lse, best)), dhead), (dh, plan.z * lse * lse - logp)

    chunks = tuple(plan.cut.split(x) for x in (hidden, targets, mask))
    (sums, dhead), (dh, loss) = jax.lax.scan(step, (_no_sums(plan), plan.no_gradient(head)), chunks)
    return _totals(sums), (plan.cut.join(dh), plan.reduced(dhead), plan.cut.join(loss), jnp.zeros((0,), head.dtype))


def _cross_entropy_backward(plan: _Plan, saved, cotangent):
    dh, dhead, loss, like_head = saved  # like_head holds nothing but its dtype
    g = cotangent[0]
    scaled = (g * dh.astype(jnp.float32)).astype(dh.dtype)
    return scaled, (g * dhead).astype(like_head.dtype) if plan.trains_head else None, None, g * loss


_cross_entropy = jax.custom_vjp(_cross_entropy_only, nondiff_argnums=(0,))
_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _parts(plan: _Plan, weight, logp, lse, best) -> tuple[jax.Array, ...]:
    """Return the sums of one chunk for each group: (nll, z, correct)."""
    terms = (-logp, plan.z * lse * lse, best.astype(jnp.float32))
    return tuple(jnp.sum(weight * term, axis=1) for term in terms)


def _add(sums: tuple, more: tuple) -> tuple:
    return tuple(a + b for a, b in zip(sums, more, strict=True))


def _no_sums(plan: _Plan) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((plan.cut.groups,), jnp.float32) for _ in range(3))


def _totals(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    nll, z, correct = (jnp.sum(x) for x in sums)
    return nll + z, dict(nll=nll, z=z, correct=correct)
