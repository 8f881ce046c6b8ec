"""The Gemma 4 assistant against transformers: a random checkpoint in its published names gives the same drafts."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from draft_cases import Follower, computed
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import CheckpointError, UnsupportedError, UserError
from dovetail.io.draft_folder import load_draft, open_draft
from dovetail.io.load import load
from dovetail.models.draft.registry import draft_kind, parse_draft
from dovetail.models.registry import parse_config
from dovetail.plan.serve_memory import held_draft

pytestmark = pytest.mark.slow

TEXT = dict(
    vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, head_dim=16,
    num_key_value_heads=2, global_head_dim=24, sliding_window=6, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    num_kv_shared_layers=3, max_position_embeddings=512,
)  # fmt: skip
CLUSTERS = dict(use_ordered_embeddings=True, num_centroids=20, centroid_intermediate_top_k=3)
# target, fields of the assistant's text_config, fields beside it
CASES = {
    "clusters": ("gemma4-per-layer", dict(attention_bias=True), CLUSTERS),
    "dense head": ("gemma4-dense", dict(attention_k_eq_v=True, num_global_key_value_heads=1), {}),
}
LENGTH, COUNT = 11, 4


@pytest.fixture(autouse=True)
def shared_keys(monkeypatch):
    """Let transformers share keys as its docstrings say: 5.23 refuses a model whose layers all read others' keys, and
    a target without such layers does not return its own."""

    def modes(self):
        first, types = self.num_hidden_layers - self.num_kv_shared_layers, self.layer_types
        own = {kind: i for i, kind in enumerate(types[:first])}  # the last of each type
        return ["reuse" if i >= first else "store" if own[kind] == i else None for i, kind in enumerate(types)]

    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(modes))


def assistant_folder(place, name: str) -> tuple[torch.nn.Module, str, str]:
    """Return transformers' assistant, its folder and that of its target."""
    target, text, beside = CASES[name]
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**TEXT | text), backbone_hidden_size=48, **beside
    )
    torch.manual_seed(5)
    theirs = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for key, tensor in theirs.state_dict().items():
            if key.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor)))
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.3 + (tensor.ndim == 1))
    theirs.save_pretrained(place)
    return theirs, str(place), reference(target)[1]


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_transformers(name, tmp_path):
    theirs, folder, model = assistant_folder(tmp_path, name)
    target = load(model, dtype="f32")
    draft, params = load_draft(folder, target.config, jnp.float32)
    assert draft_kind(json.loads((tmp_path / "config.json").read_text())) == "mtp"
    tokens = np.random.default_rng(0).integers(3, 160, LENGTH + 1)
    given, hidden, pages = computed(target.params, target.config, tokens[:-1], draft.taps)
    f = Follower(draft, params, given)
    s = f.sequence(tokens, hidden, shared=pages)
    f.absorb((s, 0, LENGTH))
    drafted, logits = f.propose(s, count=COUNT)
    wanted = their_logits(theirs, reference(CASES[name][0])[0], tokens)
    found = np.isfinite(logits[:, 0])
    assert found.sum(axis=-1).tolist() == [24 if name == "clusters" else 160] * COUNT
    np.testing.assert_allclose(logits[:, 0][found], wanted[found], atol=2e-4, rtol=2e-4)
    assert drafted[:, 0].tolist() == wanted.argmax(-1).tolist()


@torch.no_grad()
def their_logits(theirs, target, tokens: np.ndarray) -> np.ndarray:
    """Return the logits [COUNT, V] of transformers' steps, as its SinglePositionMultiTokenCandidateGenerator does."""
    for mode, layer in zip(target.config.kv_sharing_modes, target.model.layers, strict=True):
        layer.self_attn.store_full_length_kv = mode == "store"
    out = target.model(torch.tensor(tokens[None, :-1]), return_shared_kv_states=True)
    kinds, window = dict(out.shared_kv_states), TEXT["sliding_window"]
    # a decode step leaves so many in the target's cache
    kinds["sliding_attention"] = tuple(x[:, :, -window:] for x in kinds["sliding_attention"])
    token, hidden, found = torch.tensor(tokens[None, -1:]), out.last_hidden_state[:, -1:], []
    for _ in range(COUNT):
        both = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
        at = torch.tensor([[len(tokens) - 1]])
        step = theirs(inputs_embeds=both, position_ids=at, shared_kv_states=kinds)
        token, hidden = step.logits.argmax(-1), step.last_hidden_state
        found.append(step.logits[0, 0].numpy())
    return np.stack(found)


def config(text=None, **changes) -> dict:
    published = dict(dtype="bfloat16", image_token_id=5, audio_token_id=6, boi_token_id=7, tie_word_embeddings=True)
    text = TEXT | dict(model_type="gemma4_text", tie_word_embeddings=True) | (text or {})
    beside = dict(model_type="gemma4_assistant", backbone_hidden_size=48, text_config=text)
    return published | beside | CLUSTERS | changes


TARGET = dict(model_type="gemma4_text", hidden_size_per_layer_input=0) | {
    key: TEXT[key] for key in ("vocab_size", "num_attention_heads", "head_dim", "num_key_value_heads",
                               "global_head_dim", "sliding_window", "max_position_embeddings")
} | dict(hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_kv_shared_layers=2,
         layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"])  # fmt: skip


def test_layers_read_the_targets_last_own_keys():
    cfg = parse_config(TARGET)
    draft = parse_draft(config(), cfg, "here")
    assert [layer.attn.kv_from for layer in draft.cfg.layers] == [2, 2, 1]
    unified = config(text=dict(model_type="gemma4_unified_text"), model_type="gemma4_unified_assistant")
    assert [layer.attn.kv_from for layer in parse_draft(unified, cfg, "here").cfg.layers] == [2, 2, 1]
    held = held_draft(draft, None, 1, "bf16")
    assert held.per_token == 0 and held.weights > 2 * 160 * 32


@pytest.mark.parametrize(
    ("hf", "param", "kind"),
    [
        (config(backbone_hidden_size=64), "backbone_hidden_size", CheckpointError),
        (config(text=dict(vocab_size=320)), "vocab_size", CheckpointError),
        (config(text=dict(head_dim=8)), "head_dim", CheckpointError),
        (config(text=dict(num_key_value_heads=1)), "num_key_value_heads", CheckpointError),
        (config(text=dict(num_kv_shared_layers=1)), "num_kv_shared_layers", UnsupportedError),
        (config(text=dict(hidden_size_per_layer_input=8)), "text_config", UnsupportedError),
        (config(num_centroids=7), "num_centroids", CheckpointError),
        (config(centroid_intermediate_top_k=21), "centroid_intermediate_top_k", CheckpointError),
        (config(new_option=3), "new_option", UserError),
    ],
)
def test_what_does_not_fit_is_refused(hf, param, kind):
    with refuses(param, kind):
        parse_draft(hf, parse_config(TARGET), "here")


def test_an_assistant_without_sliding_layers_in_the_target_is_refused(tmp_path):
    llama = parse_config(dict(model_type="llama", num_hidden_layers=2, hidden_size=48, intermediate_size=80,
                              num_attention_heads=2, vocab_size=160, max_position_embeddings=512))  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with refuses("layer_types", CheckpointError):
        open_draft(tmp_path, llama, dummy=True)
