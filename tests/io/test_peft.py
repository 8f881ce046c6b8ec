"""Adapters: PEFT loads ours, we load those of PEFT, with equal logits."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from adapter_cases import logits, random_adapters, shake, theirs
from later import later
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import CheckpointError, RecipeError
from dovetail.io.adapter_folder import check_servable
from dovetail.io.load import load
from dovetail.io.peft import read_adapter, save_adapter
from dovetail.models.lora import Lora, attach, lora_spec, merge

pytestmark = pytest.mark.slow

peft = later("peft")


@pytest.mark.parametrize(
    "name, lora",
    [
        pytest.param("llama3.1", Lora(4, 8.0), marks=pytest.mark.thorough),
        pytest.param("llama3.1", Lora(4, 8.0, ("q_proj", "down_proj"), use_rslora=True), marks=pytest.mark.thorough),
        ("llama3.1", Lora(4, 8.0, ("o_proj", "gate_proj"), use_dora=True)),
        ("phi3", Lora(4, 8.0)),
    ],
    ids=["all", "rslora", "dora", "joined"],
)
def test_saved_by_us_loaded_by_peft(name, lora, tmp_path):
    model, folder = reference(name)
    ours = load(folder, dtype="f32")
    adapters = random_adapters(ours.config, lora)
    save_adapter(tmp_path, ours.config, adapters, lora, str(folder))
    adapted = logits(attach(ours.params, adapters, lora), ours.config)
    assert np.abs(adapted - logits(ours.params, ours.config)).max() > 0.01
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path)
    np.testing.assert_allclose(adapted, theirs(wrapped), atol=1e-4, rtol=1e-4)
    wrapped.unload()
    again, tree = read_adapter(tmp_path, ours.config)
    np.testing.assert_allclose(logits(attach(ours.params, tree, again), ours.config), adapted, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(
        logits(merge(ours.params, adapters, ours.config, lora), ours.config), adapted, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"k_proj": 2}}])
def test_saved_by_peft_loaded_by_us(options, tmp_path):
    model, folder = reference("llama3.1")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "up_proj"], **options)
    wrapped = peft.get_peft_model(model, config)
    shake(wrapped)
    wrapped.save_pretrained(tmp_path)
    expected = theirs(wrapped)
    wrapped.unload()
    ours = load(folder, dtype="f32")
    lora, adapters = read_adapter(tmp_path, ours.config)
    np.testing.assert_allclose(logits(attach(ours.params, adapters, lora), ours.config), expected, atol=1e-4, rtol=1e-4)


# --- embeddings and head ----------------------------------------------------------------------------------------------

OUTER = {
    "adapted": (Lora(4, 8.0, ("q_proj", "embed_tokens", "lm_head")), {}),
    "tied, adapted": (Lora(4, 8.0, ("q_proj", "embed_tokens")), {"tie_word_embeddings": True}),
    "whole": (Lora(4, 8.0, ("q_proj",), modules_to_save=("embed_tokens", "lm_head")), {}),
    "tied, whole": (Lora(4, 8.0, ("q_proj",), modules_to_save=("lm_head",)), {"tie_word_embeddings": True}),
    "one of each": (Lora(4, 8.0, ("q_proj", "embed_tokens"), modules_to_save=("lm_head",)), {}),
}


@pytest.mark.parametrize("case", OUTER)
def test_embeddings_and_head_are_saved_for_peft_and_read_back(case, tmp_path):
    lora, changes = OUTER[case]
    model, folder = reference("llama3.1", **changes)
    ours = load(folder, dtype="f32")
    adapters = random_adapters(ours.config, lora)
    save_adapter(tmp_path, ours.config, adapters, lora, str(folder))
    adapted = logits(attach(ours.params, adapters, lora), ours.config)
    wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    np.testing.assert_allclose(adapted, theirs(wrapped), atol=1e-4, rtol=1e-4)
    again, tree = read_adapter(tmp_path, ours.config)
    np.testing.assert_allclose(logits(attach(ours.params, tree, again), ours.config), adapted, atol=1e-4, rtol=1e-4)
    whole = merge(ours.params, adapters, ours.config, lora)
    np.testing.assert_allclose(logits(whole, ours.config), adapted, atol=1e-4, rtol=1e-4)
    with refuses(None, CheckpointError, naming="merge it"):
        check_servable(tmp_path, None)


@pytest.mark.parametrize("options", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["embed_tokens"]}])
def test_embeddings_of_peft_are_read(options, tmp_path):
    model, folder = reference("llama3.1")
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=8, **{"target_modules": ["q_proj"]} | options)
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.requires_grad)
    wrapped.save_pretrained(tmp_path, save_embedding_layers="target_modules" in options)
    ours = load(folder, dtype="f32")
    lora, adapters = read_adapter(tmp_path, ours.config)
    found = logits(attach(ours.params, adapters, lora), ours.config)
    np.testing.assert_allclose(found, theirs(wrapped), atol=1e-4, rtol=1e-4)
    tied = load(reference("llama3.1", tie_word_embeddings=True)[1], dtype="f32").config
    with refuses(None, CheckpointError, naming="embed_tokens and lm_head"):
        read_adapter(tmp_path, tied)


@pytest.mark.parametrize(
    "given, param",
    [
        ({"modules_to_save": ("norm",)}, "modules_to_save"),
        ({"modules_to_save": ("lm_head",), "target_modules": ("lm_head",)}, "lora.target_modules"),
        ({"target_modules": ("lm_head",), "lora_dropout": 0.1}, "lora.target_modules"),
    ],
)
def test_outer_weights_that_cannot_be_trained_are_refused(given, param):
    with refuses(param, RecipeError):
        lora_spec(load(reference("llama3.1")[1], dtype="f32").config, Lora(**given))


# --- refusals --------------------------------------------------------------------------------------------------


def saved(tmp_path, **changes):
    cfg = load(reference("llama3.1")[1], dtype="f32").config
    lora = Lora(4, 8.0, ("q_proj",))
    save_adapter(tmp_path, cfg, random_adapters(cfg, lora), lora)
    said = json.loads((tmp_path / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    return cfg


@pytest.mark.parametrize(
    "changes, naming",
    [
        ({"r": 8}, "ranks 4 and 4"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused(changes, naming, tmp_path):
    cfg = saved(tmp_path, **changes)
    with refuses(None, CheckpointError, naming=naming):
        read_adapter(tmp_path, cfg)


def test_an_adapter_for_another_model_is_refused(tmp_path):
    saved(tmp_path)
    other = load(reference("llama3.1", hidden_size=96)[1], dtype="f32").config
    with refuses(None, CheckpointError, naming="another model"):
        read_adapter(tmp_path, other)
    with refuses(None, CheckpointError, naming="nowhere"):
        read_adapter(tmp_path / "nowhere", other)


def test_targets_that_are_not_there():
    cfg = load(reference("llama3.1")[1], dtype="f32").config
    with refuses("lora.target_modules", naming="down_proj, gate_proj"):
        lora_spec(cfg, Lora(target_modules=("c_attn",)))
