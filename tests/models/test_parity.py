"""Test every family against transformers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from reference_models import FAMILIES, reference, reference_logits

from dovetail.core.types import Packed, Paged
from dovetail.io.load import load
from dovetail.models.decoder import forward, init_cache, unembed
from dovetail.ops.paged import token_rows

pytestmark = pytest.mark.slow

FAST = {"llama3.1", "gemma3", "glm4"}
NAMES = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES]
# those whose attention differs in more than ropes, names and biases
KINDS = {"gemma2", "gemma4-moe", "gemma4-per-layer", "deepseek-v3", "gpt-oss", "qwen3", "phi4-mini", "smollm3", "olmo3"}
PAGED = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES if n in FAST | KINDS]
PAGED += [pytest.param(n, marks=pytest.mark.thorough) for n in FAMILIES if n not in FAST | KINDS]
LENGTHS = (13, 25, 8, 21, 3)
PAGE = 4


@functools.cache
def documents(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, n).tolist() for n in LENGTHS]


@functools.partial(jax.jit, static_argnames="cfg")
def packed_logits(params, cfg, tokens, positions, segments):
    hidden, cache = forward(params, cfg, tokens, positions, Packed(segments))
    assert cache is None
    return unembed(params, cfg, hidden)


@functools.partial(jax.jit, static_argnames="cfg")
def paged_logits(params, cfg, tokens, ctx, cache):
    _, positions, _ = token_rows(ctx, tokens.shape[0])
    hidden, cache = forward(params, cfg, tokens, positions, ctx, cache)
    return unembed(params, cfg, hidden), cache


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_of_several_documents(name):
    model = load(reference(name)[1], dtype="f32")
    docs = documents(model.config.vocab)
    rows = [[0, 1], [2, 3, 4]]  # which documents share a row
    width = 40
    tokens, positions, segments = (np.zeros((2, width), np.int32) for _ in range(3))
    places = {}
    for row, members in enumerate(rows):
        at = 0
        for i in members:
            end = at + len(docs[i])
            tokens[row, at:end], positions[row, at:end], segments[row, at:end] = docs[i], np.arange(len(docs[i])), i + 1
            places[i], at = (row, slice(at, end)), end
    ours = np.asarray(packed_logits(model.params, model.config, tokens, positions, segments))
    for i, doc in enumerate(docs):
        theirs = reference_logits(name, doc)
        assert theirs.std() > 0.1, "a test of nothing"
        np.testing.assert_allclose(ours[places[i]], theirs, atol=1e-4, rtol=0)


def feed(model, tables, fed, counts, docs, cache, size):
    """Run `counts[i]` more tokens of each document through one paged call of `size` tokens; logits by document."""
    flat = [t for i, n in enumerate(counts) for t in docs[i][fed[i] : fed[i] + n]]
    cu = np.concatenate([[0], np.cumsum(counts), [sum(counts)]]).astype(np.int32)  # one padding sequence
    lens = np.append(np.add(fed, counts), 0).astype(np.int32)
    ctx = Paged(jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(cu), jnp.asarray([len(docs)], jnp.int32))
    tokens = jnp.asarray(flat + [0] * (size - len(flat)), jnp.int32)
    logits, cache = paged_logits(model.params, model.config, tokens, ctx, cache)
    return [np.asarray(logits[cu[i] : cu[i + 1]]) for i in range(len(docs))], cache


@pytest.mark.parametrize("name", PAGED)
def test_paged_in_three_chunks_then_one_by_one(name):
    model = load(reference(name)[1], dtype="f32")
    docs = documents(model.config.vocab)
    pages_each = -(-max(LENGTHS) // PAGE)
    pool = len(docs) * pages_each + 3
    tables = np.zeros((len(docs) + 1, pages_each), np.int32)
    order = np.random.default_rng(1).permutation(pool)
    tables[: len(docs)] = order[: len(docs) * pages_each].reshape(len(docs), pages_each)
    # NaN in every page, so that a read of unwritten memory shows
    cache = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), init_cache(model.config, pool, PAGE, jnp.float32))
    fed, got = [0] * len(docs), [[] for _ in docs]
    tail = 3
    chunks = [[max(0, min(9, n - tail - 9 * c)) for n in LENGTHS] for c in range(3)]
    ones = [[1 if n > tail else 0 for n in LENGTHS]] * tail
    for counts in chunks + ones:
        single = max(counts) == 1
        logits, cache = feed(model, tables, fed, counts, docs, cache, size=6 if single else 48)
        fed = [a + b for a, b in zip(fed, counts, strict=True)]
        for i, rows in enumerate(logits):
            got[i].append(rows)
    for i, doc in enumerate(docs):
        ours = np.concatenate(got[i])
        assert ours.shape[0] == fed[i]
        np.testing.assert_allclose(ours, reference_logits(name, doc)[: fed[i]], atol=1e-4, rtol=0)
    assert sum(fed) >= sum(LENGTHS) - tail


def test_longrope_of_one_sequence_follows_its_length():
    """transformers takes the short factors up to the original context and the long ones beyond; so does whoever knows
    how long the sequence is."""
    theirs, folder = reference("phi4-mini", original_max_position_embeddings=10)
    model = load(folder, dtype="f32")
    for length in (8, 10, 11, 25):
        doc = documents(model.config.vocab)[1][:length]
        with torch.no_grad():
            expected = theirs(torch.tensor([doc])).logits[0].numpy()
        np.testing.assert_allclose(model.logits(doc), expected, atol=1e-4, rtol=0)
