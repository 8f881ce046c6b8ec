"""Cross entropy of a batch whose logits are never all in memory at once.

The logits of 32k tokens over 128k words are 16 GiB in f32. They are made one chunk of tokens at a time, and where a
gradient is asked for, each chunk's part of it is taken in the same pass, while its logits are there: the backward
pass only scales what the forward pass kept, and no logit is computed twice.

Products run in the dtype of `hidden` and are summed in f32; `head` may be an f32 master, and its gradient then stays
f32. On a mesh each device chunks its own tokens and sums its own part of the head's gradient, so the loop holds no
collective but those of a split vocabulary; the parts are added up once, at the end.

B rows, T tokens, D model dim, V vocabulary; G groups of tokens (one per device that holds different ones), n chunks of
C tokens each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.chips import LOGITS_BYTES
from dovetail.core.mesh import Placement, Rules, constrain
from dovetail.ops.dispatch import has_loss_kernel

# The logits of one chunk on one device, LOGITS_BYTES of an accelerator. Each chunk reads the head twice and reads and
# writes its whole f32 gradient, so small chunks are slow: for C tokens that traffic is about 2 (FLOP/s / bandwidth) / C
# of the products' time, a fifth on an H200 with 2048 tokens (1 GiB of 128k words), and more than their whole with 256.
CPU_BYTES = 64 << 20


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    z: float = 0.0,
    dtype: Any = jnp.float32,
    chunk: int | None = None,
    placement: Placement | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics) of hidden [B, T, D] under head [V, D]: sums over tokens in f32, each weighted by mask [B, T].

    The loss is the sum of -log p(target) + z * logsumexp(logits)^2; a caller divides by the number of targets of the
    whole step, so that microbatches add up to exactly the large batch. The metrics carry no gradient: `nll` and `z`,
    the two parts of the loss, and `correct`, the weight of the tokens whose target no other word outdoes.
    A target may be anything where the mask is 0. Logits are multiplied by `scale`, then capped. `chunk` is the tokens
    whose logits a device holds at a time, and `dtype` what they are held in: bf16 halves what is read and written (all
    else is computed in f32).
    """
    _check(hidden, head, targets, mask, chunk)
    plan = _plan(hidden, head, softcap, z, chunk, placement, jnp.dtype(dtype))
    loss, metrics = _cross_entropy(plan, _scaled(hidden, scale), head, targets, mask.astype(jnp.float32))
    return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    placement: Placement | None = None,
) -> jax.Array:
    """log p(target) of each token, [B, T] in f32, differentiable in hidden and head.

    How much each token counts is known only when the gradient comes back, so the backward pass makes the logits of
    each chunk once more: one product more than cross_entropy.
    """
    _check(hidden, head, targets, targets, chunk)
    plan = _plan(hidden, head, softcap, 0.0, chunk, placement)
    return _token_logprobs(plan, _scaled(hidden, scale), head, targets)


def _scaled(hidden: jax.Array, scale: float) -> jax.Array:
    """Scaled logits are those of scaled hidden states, which are fewer."""
    return hidden if scale == 1.0 else (hidden.astype(jnp.float32) * scale).astype(hidden.dtype)


def _check(hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, chunk: int | None) -> None:
    if hidden.ndim != 3 or head.ndim != 2 or hidden.shape[-1] != head.shape[-1]:
        raise ValueError(f"hidden must be [B, T, D] and head [V, D]; got {hidden.shape} and {head.shape}")
    if targets.shape != hidden.shape[:2] or mask.shape != hidden.shape[:2]:
        raise ValueError(f"targets and mask must be {hidden.shape[:2]}; got {targets.shape} and {mask.shape}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token; got {chunk}")


# --- how a batch is cut -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """How the loss is defined, and how the tokens are cut: static, so that it is one argument of the functions below.

    [B, T, ...] becomes [n, G, C, ...]: groups of whole rows (and of whole parts of rows, where a mesh splits those), in
    each group chunks of tokens, the last one filled up with tokens of weight 0. `placement` knows G as "tokens".
    """

    softcap: float | None
    z: float
    dtype: Any  # of the logits
    rows: int  # B
    length: int  # T
    row_groups: int
    length_groups: int
    chunks: int  # n
    chunk: int  # C
    placement: Placement | None
    fused: bool  # cross entropy and its gradient in one kernel

    @property
    def groups(self) -> int:
        return self.row_groups * self.length_groups

    @property
    def tokens(self) -> int:
        """Tokens of one group."""
        return self.rows * self.length // self.groups

    def split(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [n, G, C, ...]; on a mesh, no token leaves its device."""
        b, s, rest = self.row_groups, self.length_groups, x.shape[2:]
        x = x.reshape(b, self.rows // b, s, self.length // s, *rest).swapaxes(1, 2)
        x = x.reshape(self.groups, self.tokens, *rest)
        fill = self.chunks * self.chunk - self.tokens
        x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * len(rest)) if fill else x
        x = x.reshape(self.groups, self.chunks, self.chunk, *rest).swapaxes(0, 1)
        return constrain(x, self.placement, None, "tokens", None, *(None for _ in rest))

    def join(self, x: jax.Array) -> jax.Array:
        """The way back."""
        b, s, rest = self.row_groups, self.length_groups, x.shape[3:]
        x = x.swapaxes(0, 1).reshape(self.groups, self.chunks * self.chunk, *rest)[:, : self.tokens]
        x = x.reshape(b, s, self.rows // b, self.length // s, *rest).swapaxes(1, 2)
        return x.reshape(self.rows, self.length, *rest)

    def gathered(self, head: jax.Array, dtype: Any) -> jax.Array:
        """Cast where it lies, then whole but for its words: one collective, before the loop."""
        return constrain(head.astype(dtype), self.placement, "vocab", None)

    def no_gradient(self, head: jax.Array) -> jax.Array:
        zeros = jnp.zeros((self.groups, *head.shape), jnp.float32)
        return constrain(zeros, self.placement, "tokens", "vocab", None)

    def reduced(self, dhead_GVD: jax.Array) -> jax.Array:
        return constrain(jnp.sum(dhead_GVD, axis=0), self.placement, "vocab", "embed")


def _plan(
    hidden: jax.Array,
    head: jax.Array,
    softcap: float | None,
    z: float,
    chunk: int | None,
    placement: Placement | None,
    dtype: Any = jnp.dtype(jnp.float32),
) -> _Plan:
    (rows, length, _), words = hidden.shape, head.shape[0]
    row_axes, row_groups = _groups(placement, "batch", rows)
    length_axes, length_groups = _groups(placement, "length", length)
    if placement is not None:
        table = (*placement.rules.table, ("tokens", row_axes + length_axes))
        placement = Placement(placement.mesh, Rules(table))
    tokens = rows * length // (row_groups * length_groups)
    held = words // (placement.size("vocab") if placement else 1)
    chunks, chunk = _cut(tokens, chunk or max(1, _chunk_bytes(placement) // (dtype.itemsize * held)))
    fused = has_loss_kernel(placement)
    return _Plan(softcap, z, dtype, rows, length, row_groups, length_groups, chunks, chunk, placement, fused)


def _groups(placement: Placement | None, logical: str, dim: int) -> tuple[tuple[str, ...], int]:
    """(mesh axes, their size) a dim is split over: none where they do not divide it, as Placement.partition has it."""
    size = placement.size(logical) if placement else 1
    return (placement.rules.axes_of(logical), size) if placement and dim % size == 0 else ((), 1)


def _chunk_bytes(placement: Placement | None) -> int:
    platform = placement.platform if placement else jax.default_backend()
    return CPU_BYTES if platform == "cpu" else LOGITS_BYTES


def _cut(tokens: int, most: int) -> tuple[int, int]:
    """(chunks, tokens of each): no more than `most`, and equal ones if at most twice as many chunks make them so."""
    fewest = -(-tokens // most)
    chunks = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return chunks, -(-tokens // chunks)


# --- a chunk ----------------------------------------------------------------------------------------------------------


def _raw_logits(plan: _Plan, h_GCD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Before the soft cap."""
    logits = jnp.einsum("gcd,vd->gcv", h_GCD, head_VD, preferred_element_type=plan.dtype)
    return constrain(logits, plan.placement, "tokens", None, "vocab")


def _capped(plan: _Plan, raw: jax.Array) -> jax.Array:
    logits = raw.astype(jnp.float32)
    return jnp.tanh(logits / plan.softcap) * plan.softcap if plan.softcap else logits


def _logits(plan: _Plan, h_GCD: jax.Array, head_VD: jax.Array) -> jax.Array:
    return _capped(plan, _raw_logits(plan, h_GCD, head_VD))


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """A comparison, not a gather: it fuses with what reads it, and needs nothing from a device with other words."""
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]


def _score(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log p of the target, logsumexp, whether the target is the likeliest), each [G, C]."""
    top = jnp.max(logits, axis=-1)
    lse = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    return chosen - lse, lse, chosen >= top


def _dlogits(plan: _Plan, logits: jax.Array, targets: jax.Array, lse: jax.Array, weight: jax.Array) -> jax.Array:
    """The gradient of weight * (-log p(target) + z lse^2) by the logits before the soft cap."""
    p = jnp.exp(logits - lse[..., None])
    grad = p * (1.0 + 2.0 * plan.z * lse)[..., None] - _is_target(logits, targets)
    if plan.softcap:
        grad = grad * (1.0 - jnp.square(logits / plan.softcap))
    return grad * weight[..., None]


def _score_and_dlogits(plan: _Plan, raw: jax.Array, targets: jax.Array, weight: jax.Array, dtype: Any):
    """Both of the above; on a GPU alone from one kernel."""
    if not plan.fused:
        logits = _capped(plan, raw)
        logp, lse, best = _score(logits, targets)
        return logp, lse, best, _dlogits(plan, logits, targets, lse, weight).astype(dtype)
    from dovetail.ops.kernels.gpu.cross_entropy import cross_entropy_rows

    run = functools.partial(cross_entropy_rows, z=plan.z, softcap=plan.softcap, dtype=dtype)
    return tuple(x[None] for x in run(raw[0], targets[0], weight[0]))


def _gradients(plan: _Plan, dlogits: jax.Array, h_GCD: jax.Array, head_VD: jax.Array, dhead_GVD: jax.Array):
    """(the chunk's gradient by hidden, the head's so far with the chunk's added)."""
    dh = jnp.einsum("gcv,vd->gcd", dlogits, head_VD, preferred_element_type=jnp.float32)
    dhead_GVD = dhead_GVD + jnp.einsum("gcv,gcd->gvd", dlogits, h_GCD, preferred_element_type=jnp.float32)
    return (
        constrain(dh.astype(h_GCD.dtype), plan.placement, "tokens", None, None),
        constrain(dhead_GVD, plan.placement, "tokens", "vocab", None),
    )


# --- cross entropy ----------------------------------------------------------------------------------------------------


def _cross_entropy_only(plan: _Plan, hidden, head, targets, mask):
    head_VD = plan.gathered(head, hidden.dtype)

    def step(sums, chunk):
        h, t, w = chunk
        return _add(sums, _parts(plan, w, *_score(_logits(plan, h, head_VD), t))), None

    sums, _ = jax.lax.scan(step, _no_sums(plan), (plan.split(hidden), plan.split(targets), plan.split(mask)))
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

    chunks = (plan.split(hidden), plan.split(targets), plan.split(mask))
    (sums, dhead), (dh, loss) = jax.lax.scan(step, (_no_sums(plan), plan.no_gradient(head)), chunks)
    return _totals(sums), (plan.join(dh), plan.reduced(dhead), plan.join(loss), jnp.zeros((0,), head.dtype))


def _cross_entropy_backward(plan: _Plan, saved, cotangent):
    dh, dhead, loss, like_head = saved  # like_head holds nothing but its dtype
    g = cotangent[0]
    scaled = (g * dh.astype(jnp.float32)).astype(dh.dtype)
    return scaled, (g * dhead).astype(like_head.dtype), None, g * loss


_cross_entropy = jax.custom_vjp(_cross_entropy_only, nondiff_argnums=(0,))
_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _parts(plan: _Plan, weight, logp, lse, best) -> tuple[jax.Array, ...]:
    """Sums of one chunk, a number a group: (nll, z, correct)."""
    terms = (-logp, plan.z * lse * lse, best.astype(jnp.float32))
    return tuple(jnp.sum(weight * term, axis=1) for term in terms)


def _add(sums: tuple, more: tuple) -> tuple:
    return tuple(a + b for a, b in zip(sums, more, strict=True))


def _no_sums(plan: _Plan) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((plan.groups,), jnp.float32) for _ in range(3))


def _totals(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    nll, z, correct = (jnp.sum(x) for x in sums)
    return nll + z, dict(nll=nll, z=z, correct=correct)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def _token_logprobs_forward(plan: _Plan, hidden, head, targets):
    head_VD = plan.gathered(head, hidden.dtype)
    chunks = (plan.split(hidden), plan.split(targets))
    _, (logp, lse) = jax.lax.scan(lambda _, c: (None, _score(_logits(plan, c[0], head_VD), c[1])[:2]), None, chunks)
    return plan.join(logp), (hidden, head, targets, plan.join(lse))


def _token_logprobs_backward(plan: _Plan, saved, cotangent):
    hidden, head, targets, lse = saved
    head_VD = plan.gathered(head, hidden.dtype)

    def step(dhead, chunk):
        h, t, lse, w = chunk
        dlogits = _dlogits(plan, _logits(plan, h, head_VD), t, lse, w).astype(h.dtype)
        dh, dhead = _gradients(plan, dlogits, h, head_VD, dhead)
        return dhead, dh

    chunks = tuple(plan.split(x) for x in (hidden, targets, lse, -cotangent))
    dhead, dh = jax.lax.scan(step, plan.no_gradient(head), chunks)
    return plan.join(dh), plan.reduced(dhead).astype(head.dtype), None


_token_logprobs = jax.custom_vjp(lambda *args: _token_logprobs_forward(*args)[0], nondiff_argnums=(0,))
_token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward)
