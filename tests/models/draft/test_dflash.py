"""DFlash and DSpark: drafts from pages against the papers' equations, and against speculators' torch classes."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import random_params
from refusals import refuses

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.core.spec import leaves
from dovetail.core.types import Paged
from dovetail.models.decoder import init_cache
from dovetail.models.draft.dflash import DFlash
from dovetail.models.draft.dflash2 import DynamicConv
from dovetail.models.draft.dflash_config import parse_dflash
from dovetail.models.draft.draft import DraftCall, Target
from dovetail.models.draft.registry import draft_kind
from dovetail.models.registry import parse_config

pytestmark = pytest.mark.slow

V, D, U, PAGE = 61, 32, 20, 4
LAYER = dict(
    model_type="qwen3", vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip
TARGET = parse_config(
    dict(LAYER, model_type="llama", num_hidden_layers=6, eos_token_id=0, bos_token_id=1, tie_word_embeddings=True)
)
SPECULATORS = dict(
    speculators_model_type="dflash", transformer_layer_config=LAYER, draft_vocab_size=V, block_size=6,
    mask_token_id=V - 1, aux_hidden_state_layer_ids=[2, 3, 5],
)  # fmt: skip
DSPARK = dict(SPECULATORS, speculators_model_type="dspark", markov_rank=8, draft_vocab_size=U)
ZLAB = dict(
    LAYER, architectures=["DFlashDraftModel"], block_size=6, num_target_layers=6,
    dflash_config=dict(mask_token_id=V - 1, target_layer_ids=[1, 2, 4]),
)  # fmt: skip
DFLASH2 = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=4)
SLIDING = dict(LAYER, layer_types=["sliding_attention", "full_attention"], sliding_window=5)
CONFIGS = {
    "dflash": SPECULATORS,
    "dspark": DSPARK,
    "dspark without the anchor": dict(DSPARK, sample_from_anchor=False),
    "z-lab": ZLAB,
    "causal window": dict(SPECULATORS, transformer_layer_config=SLIDING),
    "dflash2": dict(SPECULATORS, speculators_model_type="dflash2", transformer_layer_config=SLIDING, **DFLASH2),
    "window both ways": dict(SPECULATORS, transformer_layer_config=SLIDING, sliding_window_non_causal=True),
}


def weights(model: DFlash, seed: int = 0) -> dict:
    params = random_params(model.spec(), seed)
    if model.own_head:
        ids = np.sort(np.random.default_rng(seed).choice(V, U, replace=False))
        params["d2t"] = jnp.asarray(ids - np.arange(U), jnp.int32)
    return params


def target(seed: int = 1) -> Target:
    return Target({"embed": jax.random.normal(jax.random.key(seed), (V, D))}, TARGET)


# --- the equations, for one sequence ----------------------------------------------------------------------------------


def norm(x, w):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + LAYER["rms_norm_eps"]) * w


def turned(x, positions):
    """Rotate x [T, heads, H]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / LAYER["rope_theta"] ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(model, layer, p, x, context, slots):
    n, G = len(context), layer.attn.heads // layer.attn.kv_heads
    positions = np.arange(n + slots)
    heads = lambda w, x: np.einsum("td,nhd->tnh", x, w)  # noqa: E731
    both = np.concatenate([context, x])
    q = turned(norm(heads(p["q"], x), p["q_norm"]), positions[n:])
    k = turned(norm(heads(p["k"], both), p["k_norm"]), positions).repeat(G, 1)
    v = heads(p["v"], both).repeat(G, 1)
    scores = np.einsum("qnh,knh->nqk", q, k) * layer.attn.head_dim**-0.5
    far, later = positions < n - (layer.attn.window or n), np.zeros((slots, n + slots), bool)
    hidden = np.broadcast_to(far, later.shape)
    if layer.attn.causal:  # within the block, and by each slot's own window
        distance = positions[n:, None] - positions
        hidden = (distance < 0) | (distance >= layer.attn.window)
    scores = np.where(hidden, -np.inf, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v)
    return np.einsum("qnh,dnh->qd", out, p["o"])


def convolved(model, p, x, side, state):
    """Convolve x [slots, D] as one side of a half of a layer does, given the half's normed state."""
    G, out = D // model.conv.group_size, np.zeros_like(x)
    delta = (state @ p["projection"].T).reshape(len(x), 2, model.conv.taps, G).repeat(model.conv.group_size, -1)
    for t in range(len(x)):
        for i in range(min(t + 1, model.conv.taps)):
            out[t] += x[t - i] * (p["base"][side, i] + delta[t, side, i])
    return out


def half(model, p, name, state, inner):
    if model.conv is None:
        return inner(state)
    own = p[f"{name}_conv"]
    return convolved(model, own, inner(convolved(model, own, state, 0, state)), 1, state)


def mlp(p, h):
    gate, up = h @ p["gate"].T, h @ p["up"].T
    return (gate / (1 + np.exp(-gate)) * up) @ p["down"].T


def selected(model, p, row, hidden, previous):
    """Return the candidates in the order of their ids, and their scores."""
    ids = np.sort(np.argsort(-row)[: model.selector.top_k])
    return ids, row[ids] + p["after"][ids] @ (p["before"][previous] * (p["projection"] @ hidden))


def reference(model, params, goal, tapped, newest, count):
    """Return the greedy drafts of one sequence, and the logits [count, U] that they are chosen by."""
    params, embed = jax.tree.map(np.asarray, (params, goal.params["embed"]))
    context = norm(tapped @ params["fc"].T, params["hidden_norm"])
    slots = count if model.sample_from_anchor else count + 1
    x = embed[[newest] + [model.mask_token_id] * (slots - 1)]
    for layer, p in zip(model.layers, params["layers"], strict=True):
        attend = functools.partial(attention, model, layer, p["attn"], context=context, slots=slots)
        x = x + half(model, p, "attn", norm(x, p["attn_norm"]), attend)
        x = x + half(model, p, "mlp", norm(x, p["mlp_norm"]), functools.partial(mlp, p["mlp"]))
    hidden = norm(x, params["norm"])[-count:]
    logits = hidden @ (params["head"] if model.own_head else embed).T
    drafts, previous = [], newest
    if model.selector:
        rows = []
        for row, h in zip(logits, hidden, strict=True):
            ids, scores = selected(model, params["selector"], row, h, previous)
            previous = int(ids[scores.argmax()])
            drafts.append(previous)
            rows.append(scores)
        return drafts, np.stack(rows)
    for row in logits:
        if model.markov_rank:
            row += params["markov"]["w2"] @ params["markov"]["w1"][previous]
        previous = int(row.argmax()) + (int(params["d2t"][row.argmax()]) if model.own_head else 0)
        drafts.append(previous)
    return drafts, logits


# --- pages ------------------------------------------------------------------------------------------------------------


def paged(tables, lengths, counts, rows=None):
    """Return the context of `counts` new tokens per sequence after `lengths`; `rows` with padding."""
    S = rows or len(lengths)
    pad = lambda x: np.pad(x, (0, S - len(x)))  # noqa: E731
    ends = np.concatenate([[0], np.cumsum(counts)])
    return Paged(
        jnp.asarray(np.pad(tables, ((0, S - len(tables)), (0, 0))), jnp.int32),
        jnp.asarray(pad(np.asarray(lengths) + counts), jnp.int32),
        jnp.asarray(np.pad(ends, (0, S + 1 - len(ends))), jnp.int32),
        jnp.asarray([len(lengths)], jnp.int32),
    )


def absorbed(model, params, goal, cache, tables, lengths, tapped, chunk):
    """Let the drafter follow sequences of these lengths, `chunk` tokens per call and sequence."""
    done = np.zeros(len(lengths), int)
    while (done < lengths).any():
        counts = np.minimum(chunk, lengths - done)
        parts = np.concatenate([tapped[i][done[i] : done[i] + n] for i, n in enumerate(counts)])
        tokens = jnp.zeros(len(parts) + 3, jnp.int32)  # three of padding
        parts = jnp.asarray(np.pad(parts, ((0, 3), (0, 0))))
        cache = absorb(model, params, goal.params, tokens, parts, paged(tables, done, counts), cache)
        done = done + counts
    return cache


@functools.partial(jax.jit, static_argnums=0)
def absorb(model, params, own, tokens, tapped, ctx, cache):
    cache, none = model.absorb(DraftCall(params, Target(own, TARGET), tokens, ctx, cache), tapped, None)
    assert none is None
    return cache


@functools.partial(jax.jit, static_argnums=(0, 6))
def drafted(model, params, own, newest, ctx, cache, count):
    """Return the greedy drafts, the pages, and the logits [count, S, V]."""
    seen = []

    def pick(j, logits):
        assert logits.shape == (len(newest), V) and logits.dtype == jnp.float32 and j == len(seen)
        seen.append(logits)
        return jnp.argmax(logits, -1).astype(jnp.int32)

    drafts, cache = model.draft(DraftCall(params, Target(own, TARGET), newest, ctx, cache), None, count, pick)
    return drafts, cache, jnp.stack(seen)


def assert_close(logits, expected):
    """Compare logits [count, V] with those of the drafter's tokens [count, U]."""
    known = np.asarray(logits)[np.isfinite(np.asarray(logits))]
    np.testing.assert_allclose(known.reshape(len(expected), -1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [3, 50])
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_from_pages_follow_the_equations(name, chunk):
    model, goal = parse_dflash(CONFIGS[name], TARGET), target()
    params, rng = weights(model), np.random.default_rng(0)
    lengths, count = np.asarray([11, 1, 24]), min(5, model.most)
    tapped = [rng.normal(size=(n, 3 * D)).astype(np.float32) for n in lengths]
    tables = rng.permutation(40)[:30].reshape(3, 10)
    empty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), init_cache(model.cfg, 40, PAGE, jnp.float32))
    cache = absorbed(model, params, goal, empty, tables, lengths, tapped, chunk)
    newest = jnp.asarray([5, 6, 7, 0], jnp.int32)
    ctx = paged(tables, lengths, np.ones(3, int), rows=4)  # one row of padding
    drafts, cache, seen = drafted(model, params, goal.params, newest, ctx, cache, count)
    assert drafts.shape == (count, 4)
    for i in range(3):
        expected, logits = reference(model, params, goal, tapped[i], int(newest[i]), count)
        assert np.asarray(drafts[:, i]).tolist() == expected
        assert_close(seen[:, i], logits)
    others = np.setdiff1d(np.arange(40), tables)
    for entry in cache:
        assert np.isnan(np.asarray(entry)[others]).all()


def test_a_shorter_draft_computes_fewer_slots_and_leaves_the_context_alone():
    model, goal = parse_dflash(DSPARK, TARGET), target()
    params, tables = weights(model), np.arange(6)[None]
    tapped = [np.random.default_rng(2).normal(size=(9, 3 * D)).astype(np.float32)]
    before = absorbed(
        model, params, goal, init_cache(model.cfg, 6, PAGE, jnp.float32), tables, np.asarray([9]), tapped, 9
    )
    ctx = paged(tables, np.asarray([9]), np.ones(1, int))
    for count in (1, 2, 6):
        found, cache, _ = drafted(model, params, goal.params, jnp.asarray([3]), ctx, before, count)
        assert np.asarray(found[:, 0]).tolist() == reference(model, params, goal, tapped[0], 3, count)[0]
        for old, new in zip(before, cache, strict=True):
            flat = np.asarray(old).reshape(24, -1), np.asarray(new).reshape(24, -1)
            changed = (flat[0] != flat[1]).any(-1)
            assert changed.tolist() == [9 <= i < 9 + count for i in range(24)]


# --- speculators' own classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_drafts_equal_those_of_speculators(kind):
    torch = pytest.importorskip("torch")
    core = pytest.importorskip(f"speculators.models.{kind}.core")
    config = pytest.importorskip(f"speculators.models.{kind}.config")
    from transformers import Qwen3Config

    hf = dict(CONFIGS[kind])
    layer = {k: v for k, v in hf["transformer_layer_config"].items() if k != "model_type"}
    own = Qwen3Config(**layer, use_sliding_window="sliding_window" in layer)
    own._attn_implementation = "eager"
    of = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}[kind]
    theirs = getattr(core, f"{of}DraftModel")(
        getattr(config, f"{of}SpeculatorConfig")(**hf | dict(transformer_layer_config=own))
    ).eval()
    model, goal = parse_dflash(json.loads(theirs.config.to_json_string()), TARGET), target()
    params = weights(model)
    state = {one.stored.names[0]: np.asarray(x).reshape(one.stored.shape) for (_, one), x in
             zip(leaves(model.spec()), jax.tree.leaves(params), strict=True)}  # fmt: skip
    state["embed_tokens.weight"] = np.asarray(goal.params["embed"])
    state.setdefault("lm_head.weight", state["embed_tokens.weight"])
    left = theirs.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    assert not left.unexpected_keys
    assert not [k for k in left.missing_keys if not k.startswith(("verifier", "t2d", "confidence_head"))]
    n, count = 10, model.most
    tapped = np.random.default_rng(4).normal(size=(n, 3 * D)).astype(np.float32)
    newest = 9
    drafts = reference(model, params, goal, tapped, newest, count)[0]
    # one anchor at position n, in a row that goes on with the drafts: the Markov head is teacher-forced
    ids = torch.tensor([[0] * n + [newest, *drafts][: model.block_size] + [0] * model.block_size])
    T = ids.shape[1]
    loss_mask = torch.zeros(1, T)
    loss_mask[0, n] = 1
    with torch.no_grad():
        hidden, logits, *_ = theirs._backbone_forward(
            torch.tensor(np.pad(tapped, ((0, T - n), (0, 0))))[None], ids, loss_mask, torch.zeros(1, T, D),
            torch.zeros(1, T, dtype=torch.long), max_anchors=1,
        )  # fmt: skip
        if kind == "dspark":
            block = ids[:, n : n + model.block_size]
            logits = logits + theirs.markov_head.block_bias(prev_token_ids=block, hidden_states=hidden)
        if kind == "dflash2":
            before = torch.tensor([[newest, newest, *drafts[:-1]]])
            ids, scores = theirs.candidate_selector.select(logits, hidden, before)
            logits = torch.stack([x[i.argsort()] for x, i in zip(scores[0], ids[0], strict=True)])[None]
    cache = init_cache(model.cfg, 8, PAGE, jnp.float32)
    cache = absorbed(model, params, goal, cache, np.arange(8)[None], np.asarray([n]), [tapped], n)
    ctx = paged(np.arange(8)[None], np.asarray([n]), np.ones(1, int))
    found, _, seen = drafted(model, params, goal.params, jnp.asarray([newest]), ctx, cache, count)
    assert np.asarray(found[:, 0]).tolist() == drafts
    assert_close(seen[:, 0], logits[0, -count:].numpy())


# --- configs ----------------------------------------------------------------------------------------------------------


def test_both_layouts_count_layers_from_0():
    ours, theirs = parse_dflash(SPECULATORS, TARGET), parse_dflash(ZLAB, TARGET)
    assert ours.taps == theirs.taps == (1, 2, 4)
    assert (ours.most, theirs.most, parse_dflash(DSPARK, TARGET).most) == (5, 5, 6)
    assert ours.layers == theirs.layers


def test_newer_z_lab_configs_have_the_block_size_in_their_section():
    newer = {k: v for k, v in ZLAB.items() if k != "block_size"}
    newer["dflash_config"] = newer["dflash_config"] | dict(block_size=4)
    assert parse_dflash(newer, TARGET).block_size == 4


def test_dflash_2_of_both_layouts():
    config = ZLAB | dict(architectures=["DFlash2DraftModel"], dflash_config=ZLAB["dflash_config"] | DFLASH2)
    theirs, ours = parse_dflash(config, TARGET), parse_dflash(CONFIGS["dflash2"], TARGET)
    assert theirs.conv == ours.conv and theirs.selector == ours.selector and theirs.selector.top_k == 4
    assert draft_kind(config) == draft_kind(CONFIGS["dflash2"]) == "dflash"
    names = {one.stored.names[0]: one.shape for _, one in leaves(theirs.spec())}
    assert names["layers.1.mlp_conv.kernel_projection.weight"] == (16, D)
    assert names["layers.0.attention_conv.base_kernel"] == (2, 2, D)
    assert names["candidate_selector.successor_codebook"] == (V, 8)


def test_convolutions_of_training_rows_are_those_of_each_block():
    conv, slots = DynamicConv(2, 8), 4
    p = random_params(conv.spec("conv", D), seed=0)
    x = jax.random.normal(jax.random.key(1), (2, 3 * slots, D))
    rows, _ = conv.around(p, x, slots, lambda y: (y * y, None))
    blocks, _ = conv.around(p, x.reshape(-1, D), slots, lambda y: (y * y, None))
    np.testing.assert_array_equal(rows.reshape(-1, D), blocks)


def test_a_sliding_layer_is_causal_unless_the_config_says_otherwise():
    for key, plain in (("is_causal", ZLAB | SLIDING), ("sliding_window_non_causal", CONFIGS["causal window"])):
        assert [layer.attn.causal for layer in parse_dflash(plain, TARGET).layers] == [True, False]
        both = plain | {key: key != "is_causal"}
        assert [layer.attn.causal for layer in parse_dflash(both, TARGET).layers] == [False, False]


def test_published_names():
    names = {one.stored.names[0] for _, one in leaves(parse_dflash(DSPARK, TARGET).spec())}
    layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    layer |= {f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"}
    assert names == expected | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}


def test_fields_that_speculators_leaves_out_have_transformers_defaults():
    large = parse_config(dict(LAYER, model_type="llama", vocab_size=151936, hidden_size=4096, num_hidden_layers=6))
    hf = dict(SPECULATORS, transformer_layer_config=dict(num_hidden_layers=1), draft_vocab_size=151936)
    found = parse_dflash(hf, large)
    assert (found.cfg.dim, found.layers[0].attn.head_dim, found.layers[0].mlp.width) == (4096, 128, 22016)


@pytest.mark.parametrize(
    "change, param, kind",
    [
        (dict(markov_head_type="gated"), "markov_head_type", UnsupportedError),
        (dict(mask_token_id=None), "mask_token_id", CheckpointError),
        (dict(mask_token_id=V), "mask_token_id", CheckpointError),
        (dict(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids", CheckpointError),
        (dict(aux_hidden_state_layer_ids=[0, 3]), "aux_hidden_state_layer_ids", CheckpointError),
        (dict(aux_hidden_state_layer_ids=[3, 7]), "aux_hidden_state_layer_ids", CheckpointError),
        (dict(transformer_layer_config=LAYER | dict(hidden_size=64)), "hidden_size", CheckpointError),
        (dict(transformer_layer_config=LAYER | dict(vocab_size=62)), "vocab_size", CheckpointError),
        (dict(target_hidden_size=64), "target_hidden_size", CheckpointError),
    ],
)
def test_refusals_of_speculators_configs(change, param, kind):
    with refuses(param, kind):
        parse_dflash(DSPARK | change, TARGET)


@pytest.mark.parametrize(
    "change, param, kind",
    [
        (dict(dflash_config=dict(mask_token_id=1)), "dflash_config.target_layer_ids", CheckpointError),
        (dict(block_size=None), "block_size", CheckpointError),
        (dict(num_target_layers=36), "num_target_layers", CheckpointError),
        (dict(dflash_config=ZLAB["dflash_config"] | dict(selector=16)), "dflash_config.selector", UnsupportedError),
        (dict(architectures=["DFlash2DraftModel"]), "dflash_config.conv_kernel_size", CheckpointError),
    ],
)
def test_refusals_of_z_lab_configs(change, param, kind):
    with refuses(param, kind):
        parse_dflash(ZLAB | change, TARGET)
