"""Values of each token whose logits are never all in memory at once: log-probabilities, entropy, divergences.

The weight of each token is known only when the gradient comes back, so the backward pass computes the logits of each
chunk again: one product more than ops.loss. What is not trained costs no gradient: a frozen head, a teacher.

B rows, T tokens, D model dim, V vocabulary, K tokens kept of each distribution; G groups of C tokens (ops.chunks); M
masks of a row, each a bit per token in W = ceil(V / 32) uint32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.core.choice import one_of, require
from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, constrain
from dovetail.ops.chunks import Chunks, capped, chunks_of, is_target, scaled
from dovetail.ops.linear import ARRAYS, matmul
from dovetail.ops.sample import unpack

DIVERGENCES = ("forward", "reverse", "jsd")
# What follows from a chunk's logits is in f32: with a copy of that counted, the most that is held at a time is about
# twice the bytes of a chunk, which is what plan.memory reckons with.
F32 = 4
ABSENT = -1e30  # the logit of a word that is not there


@dataclass(frozen=True)
class Unembed:
    """Describe how hidden states become logits: multiplied by `scale`, capped, and divided by `temperature`."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    dtype: Any = jnp.float32  # that they are held in; what follows is computed in f32
    placement: Placement | None = None
    chunk: int | None = None  # tokens whose logits a device holds at a time


class Allowed(NamedTuple):
    """Hold the allowed tokens of each position as masks, of which few differ."""

    masks: jax.Array  # [B, M, W] uint32: token v is bit v % 32 of word v // 32, and it is there where that is set
    number: jax.Array  # [B, T] int32: which of its row's masks holds in a place


class TokenScores(NamedTuple):
    """Hold values [B, T] in f32."""

    logprobs: jax.Array  # log p(target)
    best: jax.Array  # 1 where no other word outdoes the target; carries no gradient
    entropy: jax.Array | None  # of p, in nats, where it was asked for


def token_logprobs(hidden: jax.Array, head: Any, targets: jax.Array, **unembed: Any) -> jax.Array:
    """Return log p(target) of hidden [B, T, D] under head [V, D], [B, T] in f32; see Unembed for the rest."""
    return token_scores(hidden, head, targets, **unembed).logprobs


def token_scores(
    hidden: jax.Array,
    head: Any,
    targets: jax.Array,
    *,
    entropy: bool = False,
    support: jax.Array | None = None,
    allowed: Allowed | None = None,
    banned: int = -1,
    **unembed: Any,
) -> TokenScores:
    """Return the scores of targets [B, T], differentiable in hidden and head (an array or an ops.linear.Weight).

    A target may be anything where its score is not read.

    Args:
        hidden: [B, T, D].
        head: [V, D].
        targets: [B, T].
        entropy: Also return the entropy.
        support: [B, T, K] int32: the allowed tokens of each position, -1 for padding.
        allowed: The same as masks, for many tokens. Without either, all are allowed.
        banned: A token that is never allowed; -1: none.
        unembed: See Unembed.
    """
    how = Unembed(**unembed)
    _check(hidden, head, targets.shape)
    require(support is None or allowed is None, "support and allowed both say which words there are: give one of them")
    columns, narrowed = (), _all_of
    if support is not None:
        columns, narrowed = (support,), _among
    elif allowed is not None:
        flat, number = _flat(allowed, head.shape[0], how.placement)
        columns, narrowed = (number,), functools.partial(_within, flat)

    def score(logits: jax.Array, targets: jax.Array, *words: jax.Array) -> TokenScores:
        chosen = jnp.sum(jnp.where(is_target(logits, targets), logits, 0.0), axis=-1)
        if banned >= 0:
            logits = jnp.where(is_target(logits, jnp.full_like(targets, banned)), ABSENT, logits)
        logits = narrowed(logits, *words)
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - top[..., None])
        total = jnp.sum(weights, axis=-1)
        lse = top + jnp.log(total)
        best = jax.lax.stop_gradient(chosen >= top).astype(jnp.float32)
        # H = -sum_v p_v log p_v = lse - sum_v p_v logit_v
        spread = lse - jnp.sum(weights * logits, axis=-1) / total if entropy else None
        return TokenScores(chosen - lse, best, spread)

    return _over_chunks(score, [(hidden, head, how)], targets, *columns)


def _all_of(logits: jax.Array) -> jax.Array:
    return logits


def _among(logits: jax.Array, words: jax.Array) -> jax.Array:
    """Return the logits of these tokens [..., K] alone."""
    return jnp.where(words >= 0, jnp.take_along_axis(logits, jnp.maximum(words, 0), axis=-1), ABSENT)


def _within(masks: jax.Array, logits: jax.Array, number: jax.Array) -> jax.Array:
    """Mask the logits by each position's mask of masks [B * M, W]."""
    return jnp.where(unpack(masks[number], logits.shape[-1]), logits, ABSENT)


def _flat(allowed: Allowed, vocab: int, placement: Placement | None) -> tuple[jax.Array, jax.Array]:
    """Return all rows' masks [B * M, W], on every device, and the index of each position's mask [B, T]."""
    rows, count, words = allowed.masks.shape
    require(
        words == -(-vocab // 32),
        f"a mask must be {-(-vocab // 32)} x 32 bits, one for each of {vocab:,} words; it is {words} x 32",
    )
    masks = constrain(allowed.masks.reshape(rows * count, words), placement, None, None)
    return masks, allowed.number + count * jnp.arange(rows, dtype=jnp.int32)[:, None]


def token_divergence(
    hidden: jax.Array,
    head: Any,
    teacher_hidden: jax.Array,
    teacher_head: Any,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
    **unembed: Any,
) -> jax.Array:
    """Return the divergence [B, T] in f32 of the student's distribution S from the teacher's T.

    It is the forward KL(T || S), the reverse KL(S || T), or jsd: beta KL(T || M) + (1 - beta) KL(S || M) with M = (1 -
    beta) S + beta T, which is the forward one at beta 0 and the reverse one at beta 1 (GKD, arXiv 2306.13649). Only the
    student has a gradient; `unembed` is the student's.
    """
    how = Unembed(**unembed)
    _check(hidden, head, teacher_hidden.shape[:2])
    _check_vocabularies(head.shape[0], teacher_head.shape[0])
    theirs = Unembed(teacher_scale, teacher_softcap, how.temperature, how.dtype)
    measure = functools.partial(divergence, kind=kind, beta=beta)
    frozen = jax.lax.stop_gradient((teacher_hidden, teacher_head))
    return _over_chunks(measure, [(hidden, head, how), (*frozen, theirs)])


class DraftScores(NamedTuple):
    """Hold values [B, T] in f32 of a drafter's distribution q beside its target's distribution p."""

    logprobs: jax.Array  # log q(token)
    best: jax.Array  # 1 where no other word is more probable by q than the token; carries no gradient
    distance: jax.Array  # sum |p - q|, twice the probability that a draft token drawn from q is rejected


def draft_scores(
    hidden: jax.Array,
    head: Any,
    target_hidden: jax.Array,
    target_head: Any,
    tokens: jax.Array,
    *,
    target_scale: float = 1.0,
    target_softcap: float | None = None,
    **unembed: Any,
) -> DraftScores:
    """Return the scores of a drafter's states [B, T, D] for tokens [B, T], which may be anything where not read.

    Only the drafter has a gradient; `unembed` is the drafter's.
    """
    how = Unembed(**unembed)
    _check(hidden, head, target_hidden.shape[:2])
    theirs = Unembed(target_scale, target_softcap, dtype=how.dtype)
    frozen = jax.lax.stop_gradient((target_hidden, target_head))

    def score(ours: jax.Array, theirs: jax.Array, tokens: jax.Array) -> DraftScores:
        logq = jax.nn.log_softmax(ours.astype(jnp.float32))
        chosen = jnp.sum(jnp.where(is_target(logq, tokens), logq, 0.0), axis=-1)
        best = jax.lax.stop_gradient(chosen >= logq.max(axis=-1)).astype(jnp.float32)
        distance = jnp.abs(jax.nn.softmax(theirs.astype(jnp.float32)) - jnp.exp(logq)).sum(axis=-1)
        return DraftScores(chosen, best, distance)

    return _over_chunks(score, [(hidden, head, how), (*frozen, theirs)], tokens)


def top_k_divergence(
    hidden: jax.Array,
    head: Any,
    words: jax.Array,
    logits: jax.Array,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    **unembed: Any,
) -> jax.Array:
    """Return `token_divergence` given the teacher's `logits` (or log-probabilities) of `words`, both [B, T, K].

    Both distributions are renormalised over these tokens.
    """
    how = Unembed(**unembed)
    _check(hidden, head, words.shape[:2])

    def measure(ours: jax.Array, words: jax.Array, theirs: jax.Array) -> jax.Array:
        ours = jnp.take_along_axis(ours, words, axis=-1)
        return divergence(ours, theirs.astype(jnp.float32) / how.temperature, kind=kind, beta=beta)

    return _over_chunks(measure, [(hidden, head, how)], words, jax.lax.stop_gradient(logits))


def token_top_k(hidden: jax.Array, head: Any, k: int, **unembed: Any) -> tuple[jax.Array, jax.Array]:
    """Return the k most probable tokens, int32, and their log-probabilities, f32, each [B, T, K], of a teacher."""
    require(
        1 <= k <= head.shape[0],
        f"top_k must be from 1 to the vocabulary's {head.shape[0]} tokens; got {k}",
        param="top_k",
    )

    def top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, words = jax.lax.top_k(jax.nn.log_softmax(logits), k)
        return words.astype(jnp.int32), values

    return jax.lax.stop_gradient(_over_chunks(top, [(hidden, head, Unembed(**unembed))]))


def divergence(ours: jax.Array, theirs: jax.Array, *, kind: str, beta: float = 0.5) -> jax.Array:
    """Return the divergence of two distributions given by their logits [..., V] (see token_divergence)."""
    one_of("kind", kind, DIVERGENCES)
    require(0 <= beta <= 1, f"beta must be from 0 (forward KL) to 1 (reverse KL); got {beta}", param="beta")
    s, t = jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs)
    if kind == "forward" or (kind == "jsd" and beta == 0):
        return _kl(t, s)
    if kind == "reverse" or beta == 1:
        return _kl(s, t)
    m = jnp.logaddexp(s + jnp.log1p(-beta), t + jnp.log(beta))
    return beta * _kl(t, m) + (1 - beta) * _kl(s, m)


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return KL(p || q) of log-probabilities: sum_v p_v (log p_v - log q_v)."""
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


# --- chunks -----------------------------------------------------------------------------------------------------------


def _over_chunks(measure: Callable, models: list[tuple[jax.Array, Any, Unembed]], *columns: jax.Array) -> Any:
    """Return measure(logits [G, C, V] of each model, chunks of columns) -> [G, C, ...] for all tokens [B, T, ...].

    The first model's Unembed decides the chunks.
    """
    hidden, head, how = models[0]
    itemsize = len(models) * (jnp.dtype(how.dtype).itemsize + F32)
    cut = chunks_of(hidden.shape, head.shape[0], itemsize=itemsize, chunk=how.chunk, placement=how.placement)
    heads = [_per_group(cut, head) for _, head, _ in models]
    hows = [how for _, _, how in models]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a scan's body is not merged with what is outside it
    def one(heads: list, states: list, chunk: tuple) -> Any:
        logits = [_logits(cut, *model) for model in zip(states, heads, hows, strict=True)]
        return measure(*logits, *chunk)

    states = [cut.split(scaled(hidden, how.scale)) for hidden, _, how in models]
    chunks = states, tuple(cut.split(x) for x in columns)
    _, found = jax.lax.scan(lambda _, chunk: (None, one(heads, *chunk)), None, chunks)
    return jax.tree.map(cut.join, found)


def _per_group(cut: Chunks, head: Any) -> Any:
    """Return the head [V, D] once per group of tokens, [G, V, D], each on its own device.

    Each sums its own part of the gradient, in f32, and the parts are added once, after the loop.
    """
    if not isinstance(head, ARRAYS):
        return head  # what of it is trained (an adapter) is small
    laid_out = constrain(jnp.asarray(head), cut.placement, "vocab", "embed")  # and so is its gradient
    whole = constrain(laid_out, cut.placement, "vocab", None)
    own = jnp.broadcast_to(whole.astype(jnp.float32), (cut.groups, *whole.shape))
    return constrain(own, cut.placement, "tokens", "vocab", None)


def _logits(cut: Chunks, h_GCD: jax.Array, head: Any, how: Unembed) -> jax.Array:
    raw: Any = matmul(h_GCD, head, out_dtype=how.dtype) if not isinstance(head, ARRAYS) else _product(
        cut.placement, jnp.dtype(how.dtype), h_GCD, head
    )  # fmt: skip
    logits = capped(constrain(raw, cut.placement, "tokens", None, "vocab"), how.softcap)
    return logits if how.temperature == 1.0 else logits / how.temperature


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(placement: Placement | None, dtype: Any, h_GCD: jax.Array, head_GVD: jax.Array) -> jax.Array:
    """Multiply in the dtype of h, in the backward pass too, whatever the type of the logits; sums are in f32."""
    return jnp.einsum("gcd,gvd->gcv", h_GCD, head_GVD.astype(h_GCD.dtype), preferred_element_type=dtype)


def _product_forward(placement: Placement | None, dtype: Any, h_GCD: jax.Array, head_GVD: jax.Array):
    return _product(placement, dtype, h_GCD, head_GVD), (h_GCD, head_GVD)


def _product_backward(placement: Placement | None, dtype: Any, saved: tuple[jax.Array, jax.Array], g_GCV: jax.Array):
    h, head = saved
    g = g_GCV.astype(h.dtype)
    dh = jnp.einsum("gcv,gvd->gcd", g, head.astype(h.dtype), preferred_element_type=jnp.float32)
    dhead = jnp.einsum("gcv,gcd->gvd", g, h, preferred_element_type=jnp.float32)
    return (
        constrain(dh.astype(h.dtype), placement, "tokens", None, None),
        constrain(dhead, placement, "tokens", "vocab", None),
    )


_product.defvjp(_product_forward, _product_backward)


# --- what is refused --------------------------------------------------------------------------------------------------


def _check(hidden: jax.Array, head: Any, tokens: tuple[int, ...]) -> None:
    if hidden.ndim != 3 or len(head.shape) != 2 or hidden.shape[-1] != head.shape[-1]:
        raise UserError(f"hidden must be [B, T, D] and head [V, D]; got {hidden.shape} and {head.shape}")
    if tokens != hidden.shape[:2]:
        raise UserError(f"what comes with the hidden states must be of {hidden.shape[:2]} tokens; got {tokens}")


def _check_vocabularies(ours: int, theirs: int) -> None:
    require(
        ours == theirs,
        f"the teacher must have the student's vocabulary, of {ours:,} words; it has {theirs:,}: "
        "choose a teacher with the same tokenizer",
        param="teacher",
    )
