"""EAGLE-3 in pages against its equations, dense, in numpy, and against speculators' own class."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import (
    PAGE,
    Follower,
    after_attention,
    as_numpy,
    attention,
    entries_of,
    follow_in_chunks,
    random_params,
    rms,
)
from refusals import refuses

from dovetail.core.errors import CheckpointError, UnsupportedError, UserError
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.io.draft_folder import load_draft, save_draft
from dovetail.models.draft.draft import Target
from dovetail.models.draft.eagle3 import Eagle3
from dovetail.models.draft.registry import draft_kind, parse_draft
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

pytestmark = pytest.mark.slow

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip
TARGET = parse_config(SIZES | dict(model_type="llama", num_hidden_layers=8))
LAYER = SIZES | dict(model_type="llama", num_hidden_layers=1, tie_word_embeddings=False)
VERIFIER = dict(name_or_path="org/target", architectures=["LlamaForCausalLM"])
COUNT = 4


def config(layer: dict | None = None, **options) -> dict:
    return dict(
        architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=64,
        transformer_layer_config=LAYER | (layer or {}), speculators_version="0.9.0",
        speculators_config=dict(algorithm="eagle3", verifier=VERIFIER, default_proposal_method="greedy",
                                proposal_methods=[dict(proposal_type="greedy", speculative_tokens=3)]),
        **options,
    )  # fmt: skip


CASES = {
    "plain": config(),
    "norm_before_residual": config(norm_before_residual=True, norm_output=True),
    "norm_before_fc": config(norm_before_fc=True),
    "fc_norm": config(fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 3, 5, 8]),
    "reduced": config() | dict(draft_vocab_size=24),
    "qwen3": config(dict(model_type="qwen3"), norm_output=True),
    "two layers": config(dict(num_hidden_layers=2)),
    "another width": config(dict(hidden_size=40), target_hidden_size=32),
}


@functools.cache
def target() -> Target:
    return Target(random_params(spec(TARGET), seed=1), TARGET)


def follower(hf: dict, **changes) -> Follower:
    draft = parse_draft(hf, TARGET, "here")
    assert isinstance(draft, Eagle3)
    draft = Eagle3(**{**vars(draft), **changes})
    params = random_params(draft.spec(), seed=2)
    if draft.is_reduced:
        chosen = np.sort(np.random.default_rng(5).permutation(TARGET.vocab)[: draft.vocab])
        params["d2t"] = jnp.asarray(chosen - np.arange(draft.vocab), jnp.int32)
    return Follower(draft, params, target())


def sequence_data(draft, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [length + 1] and tapped states [length, taps * D]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, TARGET.vocab, length + 1), rng.normal(size=(length, len(draft.taps) * TARGET.dim))


def expected(f: Follower, tokens: np.ndarray, tapped: np.ndarray, count: int, forced=None) -> np.ndarray:
    """Return the logits [count, V] after the newest token, from the equations."""
    draft, p, eps = f.draft, as_numpy(f.params), f.draft.cfg.norm_eps
    weights = as_numpy(f.target.params)
    embedding = weights["embed"] if "embed" in draft.shared else p["embed"]
    x = tapped.astype(np.float64)
    x = rms(x, p["input_norm"], eps) if draft.norm_before_fc else x
    if draft.fc_norm:
        parts = np.split(x, len(draft.taps), axis=-1)
        x = np.concatenate([rms(part, w, eps) for part, w in zip(parts, p["fc_norm"], strict=True)], -1)
    hidden, tokens, found = list(x @ p["fc"].T), list(tokens[1:]), []
    for j in range(count):
        h = layers(draft, p["layers"], embedding[np.asarray(tokens)], np.stack(hidden))[-1]
        normed = rms(h, p["norm"], eps)
        logits = normed @ (weights["head"] if "head" in draft.shared else p["head"]).T
        if draft.is_reduced:
            logits, few = np.full(TARGET.vocab, -np.inf), logits
            logits[np.arange(draft.vocab) + p["d2t"]] = few
        found.append(logits)
        tokens.append(int(logits.argmax()) if forced is None else forced[j])
        hidden.append(normed if draft.norm_output else h)
    return np.stack(found)


def layers(draft, weights: list, embedding: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    eps = draft.cfg.norm_eps
    for i, (p, layer) in enumerate(zip(weights, draft.layers, strict=True)):
        stream, x = hidden, rms(hidden, p["hidden_norm" if i == 0 else "attn_norm"], eps)
        if i == 0:
            stream = x if draft.norm_before_residual else hidden
            x = np.concatenate([rms(embedding, p["attn_norm"], eps), x], -1)
        hidden = after_attention(p, stream + attention(p["attn"], layer.attn, x, eps), eps)
    return hidden


@pytest.mark.parametrize(
    ("name", "shared"), [*((name, ()) for name in CASES), ("plain", ("embed", "head")), ("reduced", ("embed",))]
)
def test_drafts_after_chunks_are_those_of_the_equations(name, shared):
    f = follower(CASES[name], shared=shared)
    data = [sequence_data(f.draft, length, seed) for seed, length in enumerate((13, 7, 4))]
    sequences = [f.sequence(*one) for one in data]
    follow_in_chunks(f, sequences)
    tokens, logits = f.propose(*sequences, count=COUNT)
    for row, one in enumerate(data):
        wanted = expected(f, *one, COUNT)
        np.testing.assert_allclose(logits[:, row], wanted, atol=1e-4, rtol=1e-4)
        assert tokens[:, row].tolist() == wanted.argmax(-1).tolist()


def test_a_token_at_the_start_writes_nothing_and_drafts_follow_one_token():
    f = follower(CASES["plain"])
    s = f.sequence(*sequence_data(f.draft, 1, 0))
    before = f.cache
    f.absorb((s, 0, 1))
    np.testing.assert_array_equal(f.cache[0], before[0])
    _, logits = f.propose(s, count=2)
    np.testing.assert_allclose(logits[:, 0], expected(f, s.tokens, s.tapped, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["plain", "two layers"])
def test_chunks_write_what_one_call_writes_and_nothing_else(name):
    f, whole = follower(CASES[name]), follower(CASES[name])
    data = [sequence_data(f.draft, length, seed) for seed, length in enumerate((13, 7, 4))]
    sequences, again = ([one.sequence(*d) for d in data] for one in (f, whole))
    before = [np.asarray(layer) for layer in f.cache]
    follow_in_chunks(f, sequences)
    whole.absorb(*((s, 0, len(s.tapped)) for s in again))
    written = np.zeros(before[0].shape[:2], bool)
    for s in sequences:
        place = np.arange(len(s.tapped) - 1)
        written[np.asarray(s.pages)[place // PAGE], place % PAGE] = True
    for ours, theirs, old in zip(f.cache, whole.cache, before, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(ours)[~written], old[~written])
        assert (np.asarray(ours)[written] != old[written]).any(axis=-1).all()


def test_a_prefix_hit_leaves_the_entry_before_its_first_token():
    f = follower(CASES["plain"])
    tokens, tapped = sequence_data(f.draft, 13, 0)
    first = f.sequence(tokens, tapped)
    f.absorb((first, 0, 13))
    kept = entries_of(f.cache, first.pages)
    other = np.concatenate([tokens[:9], (tokens[9:] + 1) % TARGET.vocab])  # 8 tokens are shared, and the next is equal
    states = np.concatenate([tapped[:8], sequence_data(f.draft, 5, 1)[1]])
    second = f.sequence(other, states, shared=first.pages[:2])
    f.absorb((second, 8, 11))
    f.absorb((second, 11, 13))
    for now, old in zip(entries_of(f.cache, first.pages), kept, strict=True):
        np.testing.assert_array_equal(now, old)
    _, logits = f.propose(first, second, count=COUNT)
    np.testing.assert_allclose(logits[:, 0], expected(f, tokens, tapped, COUNT), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(logits[:, 1], expected(f, other, states, COUNT), atol=1e-4, rtol=1e-4)


def test_drafting_leaves_no_trace_in_the_entries_before():
    f = follower(CASES["plain"])
    tokens, tapped = sequence_data(f.draft, 9, 0)
    s = f.sequence(tokens[:7], tapped[:6])
    f.absorb((s, 0, 6))
    f.propose(s, count=COUNT)
    s.tokens, s.tapped = tokens, tapped
    f.absorb((s, 6, 9))
    _, logits = f.propose(s, count=COUNT)
    np.testing.assert_allclose(logits[:, 0], expected(f, tokens, tapped, COUNT), atol=1e-4, rtol=1e-4)


def test_drafts_of_two_devices_are_those_of_one():
    one = follower(CASES["reduced"], shared=("embed",))
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    two = Follower(one.draft, one.params, one.target, placement=Placement(mesh, SERVE))
    data = [sequence_data(one.draft, length, seed) for seed, length in enumerate((13, 7, 4))]
    found = []
    for f in (one, two):
        sequences = [f.sequence(*d) for d in data]
        follow_in_chunks(f, sequences)
        found.append(f.propose(*sequences, count=COUNT)[1])
    np.testing.assert_allclose(*found, atol=1e-4)


def test_layer_ids_count_from_one_and_specforge_counts_from_zero():
    assert parse_draft(config(), TARGET, "here").taps == (1, 3, 4)
    assert parse_draft(config(eagle_aux_hidden_state_layer_ids=[2, 8]), TARGET, "here").taps == (1, 7)
    original = LAYER | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24, max_window_layers=3)
    draft = parse_draft(original | dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 7])), TARGET, "here")
    assert isinstance(draft, Eagle3)
    assert (draft.taps, draft.vocab, draft.is_reduced) == ((0, 7), 24, True)


@pytest.mark.parametrize(
    ("hf", "param"),
    [
        (config(dict(hidden_size=40)), "hidden_size"),
        (config(dict(vocab_size=65)), "vocab_size"),
        (config(eagle_aux_hidden_state_layer_ids=[2, 9]), "eagle_aux_hidden_state_layer_ids"),
        (config(eagle_aux_hidden_state_layer_ids=[0, 4]), "eagle_aux_hidden_state_layer_ids"),
        (config() | dict(draft_vocab_size=65), "draft_vocab_size"),
        (config() | dict(speculators_config=dict(verifier=dict(architectures=["Qwen3ForCausalLM"]))), "verifier"),
    ],
)
def test_drafts_for_another_model_are_refused(hf, param):
    with refuses(param, CheckpointError):
        parse_draft(hf, TARGET, "here")


def test_unknown_kinds_and_fields_are_refused():
    with refuses("speculators_model_type", UnsupportedError, naming="peagle"):
        draft_kind(config() | dict(speculators_model_type="peagle"))
    with refuses("new_option", UserError):
        parse_draft(config(new_option=3), TARGET, "here")


@pytest.mark.parametrize("name", ["plain", "norm_before_residual", "norm_before_fc", "fc_norm", "reduced", "qwen3"])
def test_drafts_are_those_of_speculators(name, tmp_path):
    core = pytest.importorskip("speculators.models.eagle3.core", exc_type=ImportError)
    import torch
    from safetensors.torch import load_file
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig

    f = follower(CASES[name])
    ids = dict(eagle_aux_hidden_state_layer_ids=[i + 1 for i in f.draft.taps])
    save_draft(tmp_path / "draft", f.draft, f.params, CASES[name] | ids)
    config = Eagle3SpeculatorConfig(**json.loads((tmp_path / "draft" / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = core.Eagle3DraftModel(config)
    missing, unexpected = theirs.load_state_dict(load_file(tmp_path / "draft" / "model.safetensors"), strict=False)
    assert not unexpected and all("verifier" in key for key in missing)
    theirs.save_pretrained(tmp_path / "theirs")
    again, params = load_draft(tmp_path / "theirs", TARGET, jnp.float32)
    assert again.layers == f.draft.layers and dataclasses.replace(again, cfg=f.draft.cfg) == f.draft
    jax.tree.map(np.testing.assert_array_equal, params, f.params)
    length, steps = 12, 3
    tokens, tapped = sequence_data(f.draft, length, 0)
    with torch.no_grad():
        drafted = theirs(
            torch.tensor(tapped[None], dtype=torch.float32), torch.tensor(tokens[None, 1:]),
            torch.zeros(1, length, dtype=torch.long), ttt_steps=steps,
        )  # fmt: skip
    ids = np.arange(f.draft.vocab) + np.asarray(f.params.get("d2t", 0))
    for n in range(2, length - steps):  # the draft after token n, given the tokens that follow it
        forced = tokens[n + 1 : n + 1 + steps]
        s = f.sequence(tokens[: n + 1], tapped[:n])
        f.absorb((s, 0, n))
        _, logits = f.propose(s, count=steps, forced=forced[:, None])
        assert logits[:, 0].argmax(-1).tolist() == [int(ids[step[0, n - 1]]) for step in drafted]
        f.free += s.pages
