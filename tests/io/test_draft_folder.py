"""Draft checkpoints in their published formats: what is read, what is written, what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import random_params
from refusals import refuses
from safetensors.numpy import load_file, save_file

from dovetail.core.errors import CheckpointError
from dovetail.io.draft_folder import load_draft, open_draft, save_draft
from dovetail.io.hf import write_specs
from dovetail.io.load import load, save
from dovetail.models.draft.mtp import NEXTN, QWEN, SPECULATORS, Mtp
from dovetail.models.draft.plain import PlainDraft
from dovetail.models.draft.registry import parse_draft
from dovetail.models.mtp import with_mtp
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128,
)  # fmt: skip
TARGET = parse_config(SIZES | dict(model_type="llama", num_hidden_layers=8))
LAYER = SIZES | dict(model_type="llama", num_hidden_layers=1)
EAGLE3 = dict(
    architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=24, fc_norm=True,
    transformer_layer_config=LAYER,
)  # fmt: skip


def saved(folder, hf=EAGLE3, **changes):
    """Return a random draft model of this config, written to the folder, and its weights."""
    draft = dataclasses.replace(parse_draft(hf, TARGET, "here"), **changes)
    params = random_params(draft.spec(), seed=2)
    if "d2t" in params:
        params["d2t"] = jnp.arange(draft.vocab, dtype=jnp.int32) + 3
    save_draft(folder, draft, params, hf)
    return draft, params


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("shared", [(), ("embed",)])
def test_what_is_saved_is_loaded(shared, tmp_path):
    draft, params = saved(tmp_path / "draft", shared=shared)
    again, weights = load_draft(tmp_path / "draft", TARGET, jnp.float32)
    assert again == draft
    assert_equal(weights, params)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored["d2t"].dtype == np.int64
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), np.arange(24) * 2 + 3)
    assert ("embed_tokens.weight" in stored) == (not shared)


def test_a_head_of_the_whole_vocabulary_may_be_the_targets(tmp_path):
    hf = EAGLE3 | dict(draft_vocab_size=64)
    draft, _ = saved(tmp_path / "draft", hf, shared=("embed", "head"))
    assert load_draft(tmp_path / "draft", TARGET, jnp.float32)[0] == draft


def rewritten(folder, change):
    """Write the tensors of the folder as `change` returns them."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_the_original_format_has_another_name_for_its_layer(tmp_path):
    _, params = saved(tmp_path, dict(EAGLE3, fc_norm=False))
    rewritten(tmp_path, lambda x: {name.replace("layers.0.", "midlayer."): array for name, array in x.items()})
    hf = LAYER | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    draft, weights = load_draft(tmp_path, TARGET, jnp.float32)
    assert draft == parse_draft(hf, TARGET, "here")
    assert_equal(weights, params)


def test_copies_of_the_targets_tensors_are_not_read_and_unknown_tensors_are_refused(tmp_path):
    saved(tmp_path)
    one = np.ones(32, np.float32)
    rewritten(tmp_path, lambda x: x | {"verifier_norm.weight": one, "verifier_lm_head.weight": one})
    load_draft(tmp_path, TARGET, jnp.float32, method="eagle3")
    rewritten(tmp_path, lambda x: x | {"layers.1.hidden_norm.weight": one})
    with refuses(kind=CheckpointError, naming="layers.1.hidden_norm.weight"):
        load_draft(tmp_path, TARGET, jnp.float32)


def test_a_draft_model_of_another_kind_than_the_method_is_refused(tmp_path):
    saved(tmp_path)
    with refuses("speculative_config.method", CheckpointError, naming="eagle3"):
        load_draft(tmp_path, TARGET, jnp.float32, method="mtp")


def test_missing_tensors_and_tables_of_floats_are_refused(tmp_path):
    saved(tmp_path)
    rewritten(tmp_path, lambda x: {k: v for k, v in x.items() if k != "fc.weight"} | {"d2t": np.ones(24, np.float32)})
    with refuses(kind=CheckpointError, naming="fc.weight") as caught:
        load_draft(tmp_path, TARGET, jnp.float32)
    assert "d2t float32" in str(caught.value)


# --- multi-token prediction -------------------------------------------------------------------------------------------


def test_the_models_own_layers_are_loaded(tmp_path):
    experts = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
    cfg = parse_config(SIZES | experts | dict(model_type="glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1))
    params = random_params(with_mtp(spec(cfg), cfg), seed=1)
    save(tmp_path, cfg, params, None)
    draft, weights = load_draft(tmp_path, cfg, jnp.float32, method="mtp")
    assert (draft, jax.tree.structure(weights)) == (Mtp(cfg), jax.tree.structure({"mtp": params["mtp"]}))
    assert_equal(weights["mtp"], params["mtp"])


@pytest.mark.parametrize(("key", "names"), [("num_nextn_predict_layers", NEXTN), ("mtp_num_hidden_layers", QWEN)])
def test_a_config_alone_describes_the_models_own_layers(key, names, tmp_path, monkeypatch):
    hf = SIZES | dict(model_type="qwen3", num_hidden_layers=2)
    cfg, file = parse_config(hf | {key: 1}), tmp_path / "config.json"
    monkeypatch.setattr("dovetail.io.draft_folder.fetch_config", lambda name: file)
    for where in (tmp_path, "org/name"):
        file.write_text(json.dumps(hf | {key: 1}))
        assert open_draft(where, cfg, "mtp", dummy=True).draft == Mtp(cfg, names)
        file.write_text(json.dumps(hf))
        with refuses("speculative_config.method", CheckpointError, naming="no MTP layers"):
            open_draft(where, cfg, "mtp", dummy=True)


@pytest.fixture
def qwen():
    return parse_config(SIZES | dict(model_type="qwen3", num_hidden_layers=2, mtp_num_hidden_layers=1))


def test_layers_under_qwens_names_are_loaded_beside_the_model(qwen, tmp_path):
    params, draft = random_params(spec(qwen), seed=1), Mtp(qwen, QWEN)
    own = random_params(draft.spec(), seed=2)
    save(tmp_path, qwen, params, None)
    rewritten(tmp_path, lambda x: x | {name: array for name, _, array in write_specs(draft.spec(), own, {})})
    assert "mtp.layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    assert_equal(load(tmp_path, dtype="f32").params, params)
    again, weights = load_draft(tmp_path, qwen, jnp.float32, method="mtp")
    assert again == draft
    assert_equal(weights, own)


def test_layers_of_speculators_are_loaded(qwen, tmp_path):
    draft = Mtp(qwen, SPECULATORS)
    params = random_params(draft.spec(), seed=2)
    layer = SIZES | dict(model_type="qwen3", num_hidden_layers=2)
    save_draft(tmp_path / "draft", draft, params, dict(speculators_model_type="mtp", transformer_layer_config=layer))
    again, weights = load_draft(tmp_path / "draft", qwen, jnp.float32)
    assert again == draft
    assert_equal(weights, params)


def test_a_model_without_such_layers_is_refused(tmp_path):
    save(tmp_path, TARGET, random_params(spec(TARGET), seed=1), None)
    with refuses("speculative_config.method", CheckpointError, naming=str(tmp_path)):
        load_draft(tmp_path, TARGET, jnp.float32, method="mtp")


def test_an_ordinary_model_is_a_draft_model_if_its_vocabulary_is_the_targets(tmp_path):
    cfg = parse_config(LAYER | dict(num_hidden_layers=2, hidden_size=16))
    params = random_params(spec(cfg), seed=1)
    save(tmp_path, cfg, params, None)
    draft, weights = load_draft(tmp_path, TARGET, jnp.float32)
    assert isinstance(draft, PlainDraft)
    assert_equal(weights, params)
    with refuses("speculative_config.model", CheckpointError):
        load_draft(tmp_path, parse_config(SIZES | dict(model_type="llama", num_hidden_layers=8, vocab_size=65)), "f32")
