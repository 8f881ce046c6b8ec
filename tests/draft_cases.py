"""Drive a draft model through its pages as the engine does, with sequences of given tokens and tapped states."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.mesh import Placement, param_sharding
from dovetail.core.spec import is_spec, tree_map
from dovetail.core.types import Paged
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import init_cache, tapped
from dovetail.models.draft.draft import Carried, DraftCall, Target
from dovetail.models.spec import spec

PAGE, WIDTH, POOL = 4, 8, 40  # a page's tokens, a sequence's most pages, all pages
ROWS, TOKENS = 4, 24  # of a call, padding included


@dataclass
class Sequence:
    """Hold a sequence: its tokens, the target's states at each position, its pages, and the last feature."""

    tokens: np.ndarray  # [n + 1]: the newest has no state yet
    tapped: np.ndarray  # [n, taps * D]
    pages: list[int]
    feature: np.ndarray | None = None


@dataclass
class Follower:
    """Hold a draft model and its pages, which start with random contents."""

    draft: object
    params: dict
    target: Target
    cache: tuple = ()
    placement: Placement | None = None

    def __post_init__(self):
        rng = np.random.default_rng(3)
        rows = [layer.attn.page_row(np.float32, None, None) for layer in self.draft.layers]
        self.cache = tuple(jnp.asarray(rng.normal(size=(POOL, PAGE, *row)), jnp.float32) for row in rows)
        self.free = rng.permutation(POOL).tolist()
        if self.placement is not None:
            self.params = _placed(self.draft.spec(), self.params, self.placement)
            self.target = Target(_placed(spec(self.target.cfg), self.target.params, self.placement), self.target.cfg)

    def sequence(self, tokens, tapped, shared: list[int] = ()) -> Sequence:
        """Return a sequence with pages for its tokens and drafts, the first of them `shared`."""
        own = [self.free.pop() for _ in range(WIDTH - len(shared))]
        return Sequence(np.asarray(tokens), np.asarray(tapped, np.float32), [*shared, *own])

    def absorb(self, *parts: tuple[Sequence, int, int]) -> np.ndarray:
        """Absorb tokens start to end of each sequence in one call; return the features [T, F]."""
        ctx = self._context([(s, end, end - start) for s, start, end in parts])
        tokens, tapped = np.zeros(TOKENS, np.int32), np.ones((TOKENS, parts[0][0].tapped.shape[1]), np.float32)
        feature = np.full((ROWS, self.draft.feature_dim), np.nan, np.float32)  # what is not known must not be used
        known, at = np.zeros(ROWS, bool), 0
        for row, (s, start, end) in enumerate(parts):
            tokens[at : at + end - start], tapped[at : at + end - start] = s.tokens[start:end], s.tapped[start:end]
            if s.feature is not None:
                feature[row], known[row] = s.feature, True
            at += end - start
        carried = Carried(jnp.asarray(feature), jnp.asarray(known))
        given = self.params, self.target.params, tokens, tapped, ctx, self.cache, carried
        self.cache, features = _absorb(*given, draft=self.draft, cfg=self.target.cfg)
        for (s, _, _), last in zip(parts, np.asarray(ctx.cu_q_lens)[1:], strict=False):
            s.feature = np.asarray(features[last - 1])
        return np.asarray(features[:at])

    def propose(self, *sequences: Sequence, count: int, forced=None) -> tuple[np.ndarray, np.ndarray]:
        """Return draft tokens [count, rows] and logits [count, rows, V] after each sequence's newest token.

        `forced` [count, rows]: the tokens that are picked, whatever the logits are.
        """
        ctx = self._context([(s, len(s.tokens), 1) for s in sequences])
        newest = np.zeros(ROWS, np.int32)
        feature = np.zeros((ROWS, self.draft.feature_dim), np.float32)
        picked = None if forced is None else np.zeros((count, ROWS), np.int32)
        for row, s in enumerate(sequences):
            newest[row], feature[row] = s.tokens[-1], s.feature
            if picked is not None:
                picked[:, row] = forced[:, row]
        given = self.params, self.target.params, self.target.cache, newest, ctx, self.cache, feature, picked
        tokens, logits, self.cache = _draft(*given, draft=self.draft, cfg=self.target.cfg, count=count)
        return np.asarray(tokens[:, : len(sequences)]), np.asarray(logits[:, : len(sequences)])

    def _context(self, rows: list[tuple[Sequence, int, int]]) -> Paged:
        """Return the context of (sequence, length after the call, new tokens) rows, with padding after them."""
        tables = np.zeros((ROWS, WIDTH), np.int32)
        kv_lens, cu = np.zeros(ROWS, np.int32), np.zeros(ROWS + 1, np.int32)
        for i, (s, length, count) in enumerate(rows):
            tables[i], kv_lens[i], cu[i + 1 :] = s.pages, length, cu[i] + count
        ints = (jnp.asarray(x) for x in (tables, kv_lens, cu, np.asarray([len(rows)], np.int32)))
        return Paged(*ints, placement=self.placement)


def computed(params, cfg: ModelConfig, tokens, taps: tuple[int, ...]) -> tuple[Target, np.ndarray, list[int]]:
    """Return the target with the tokens in its pages, its tapped states [n, taps * D], and the pages."""
    pages = list(range(WIDTH))
    ints = [jnp.asarray(x, jnp.int32) for x in ([pages], [len(tokens)], [0, len(tokens)], [1])]
    given = jnp.asarray(tokens), jnp.arange(len(tokens)), Paged(*ints), init_cache(cfg, WIDTH, PAGE, jnp.float32)
    _, cache, seen = jax.jit(tapped, static_argnames=("cfg", "taps"))(params, cfg, *given, taps=taps)
    return Target(params, cfg, cache), np.asarray(seen), pages


def _placed(specs, params, placement: Placement):
    return tree_map(lambda leaf, x: jax.device_put(x, param_sharding(placement, leaf)), specs, params)


@functools.partial(jax.jit, static_argnames=("draft", "cfg"))
def _absorb(params, weights, tokens, tapped, ctx, cache, carried, *, draft, cfg):
    return draft.absorb(DraftCall(params, Target(weights, cfg), tokens, ctx, cache), tapped, carried)


@functools.partial(jax.jit, static_argnames=("draft", "cfg", "count"))
def _draft(params, weights, held, tokens, ctx, cache, feature, forced, *, draft, cfg, count):
    seen = []

    def pick(j, logits):
        seen.append(logits)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32) if forced is None else forced[j]

    call = DraftCall(params, Target(weights, cfg, held), tokens, ctx, cache)
    drafted, cache = draft.draft(call, feature, count, pick)
    return drafted, jnp.stack(seen), cache


def follow_in_chunks(follower: Follower, sequences: list[Sequence]) -> None:
    """Absorb sequences a few tokens at a time, in ragged calls that others join: one token alone, a page's end."""
    a, b, c = sequences
    follower.absorb((a, 0, 5), (b, 0, 1))
    follower.absorb((b, 1, 4), (a, 5, 8), (c, 0, 2))
    follower.absorb((a, 8, 9), (c, 2, len(c.tapped)))
    follower.absorb((a, 9, len(a.tapped)), (b, 4, len(b.tapped)))


def entries_of(cache: tuple, pages: list[int]) -> list[np.ndarray]:
    """Return the entries [positions, ...] of a sequence's pages, for each layer."""
    return [np.asarray(layer)[np.asarray(pages)].reshape(-1, *layer.shape[2:]) for layer in cache]


# --- a layer of attention and gated units, dense, in numpy ------------------------------------------------------------


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return RMSNorm(x)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Return x [T, N, H] with its two halves rotated by the positions 0 to T - 1."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(p: dict, attn, x: np.ndarray, eps: float) -> np.ndarray:
    """Return causal attention over x [T, in]."""
    q, k, v = (np.einsum("td,nhd->tnh", x, p[name]) for name in "qkv")
    if attn.qk_norm:
        q, k = rms(q, p["q_norm"], eps), rms(k, p["k_norm"], eps)
    q, k = rotated(q, attn.rope.theta), rotated(k, attn.rope.theta)
    k, v = (np.repeat(y, attn.heads // attn.kv_heads, axis=1) for y in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) * attn.scale
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
    return np.einsum("tnh,dnh->td", heads, p["o"])


def gated(p: dict, x: np.ndarray) -> np.ndarray:
    """Return down(silu(gate x) * up x)."""
    gate = x @ p["gate"].T
    return (gate / (1 + np.exp(-gate)) * (x @ p["up"].T)) @ p["down"].T


def after_attention(p: dict, stream: np.ndarray, eps: float) -> np.ndarray:
    """Return the stream with the feed-forward half added."""
    return stream + gated(p["mlp"], rms(stream, p["mlp_norm"], eps))


def as_numpy(tree):
    """Return a tree of arrays in f64; tables of integers as they are."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype.kind == "f" else np.asarray(x), tree)


def random_params(specs, seed: int) -> dict:
    """Return weights in which no norm is one and no product is small."""
    flat, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    rng = np.random.default_rng(seed)

    def one(leaf):
        if leaf.dtype is not None:
            return jnp.zeros(leaf.shape, leaf.dtype)
        if len(leaf.shape) == 1:
            return jnp.asarray(1 + 0.3 * rng.normal(size=leaf.shape), jnp.float32)
        return jnp.asarray(rng.normal(size=leaf.shape) * 2 * leaf.shape[-1] ** -0.5, jnp.float32)

    return jax.tree.unflatten(treedef, [one(leaf) for leaf in flat])
