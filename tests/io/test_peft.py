"""Adapters both ways: what we save PEFT loads, what PEFT saves we load, and the logits are the same."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from reference_models import reference

from dovetail.core.spec import init
from dovetail.core.types import Packed
from dovetail.io.load import load
from dovetail.io.peft import read_adapter, save_adapter
from dovetail.models.decoder import forward, unembed
from dovetail.models.lora import Lora, attach, lora_spec, merge

TOKENS = [5, 17, 3, 44, 9, 2, 31]


def logits(params, cfg) -> np.ndarray:
    tokens = jnp.asarray([TOKENS], jnp.int32)
    positions = jnp.arange(len(TOKENS))[None]
    return np.asarray(unembed(params, cfg, forward(params, cfg, tokens, positions, Packed(jnp.ones_like(tokens)))[0]))[
        0
    ]


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def random_adapters(cfg, lora):
    """Random ones that do something: PEFT's start is no change at all."""
    tree = init(lora_spec(cfg, lora), jax.random.key(1), jnp.float32)
    keys = iter(jax.random.split(jax.random.key(2), 1000))

    def one(path, x):
        name = path[-1].key
        if name == "lora_b":
            return jax.random.normal(next(keys), x.shape) * 0.3
        return jax.random.uniform(next(keys), x.shape, minval=0.5, maxval=1.5) if name == "magnitude" else x

    return jax.tree_util.tree_map_with_path(one, tree)


@pytest.mark.parametrize(
    "name, lora",
    [
        ("llama3.1", Lora(4, 8.0)),
        ("llama3.1", Lora(4, 8.0, ("q_proj", "down_proj"), rslora=True)),
        ("llama3.1", Lora(4, 8.0, ("o_proj", "gate_proj"), dora=True)),
        ("phi3", Lora(4, 8.0)),
        ("qwen3-moe", Lora(3, 6.0, ("q_proj", "o_proj"))),
        ("deepseek-v3", Lora(3, 6.0, (r".*\.self_attn\..*",))),
    ],
    ids=["all", "rslora", "dora", "joined", "moe", "latent"],
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
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, tensor in wrapped.named_parameters():
            if "lora_B" in key:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    wrapped.save_pretrained(tmp_path)
    expected = theirs(wrapped)
    wrapped.unload()
    ours = load(folder, dtype="f32")
    lora, adapters = read_adapter(tmp_path, ours.config)
    np.testing.assert_allclose(logits(attach(ours.params, adapters, lora), ours.config), expected, atol=1e-4, rtol=1e-4)


def test_experts_are_adapted_each(tmp_path):
    ours = load(reference("mixtral")[1], dtype="f32")
    lora = Lora(2, 4.0)
    adapters = random_adapters(ours.config, lora)
    adapted = logits(attach(ours.params, adapters, lora), ours.config)
    merged = logits(merge(ours.params, adapters, ours.config, lora), ours.config)
    np.testing.assert_allclose(adapted, merged, atol=1e-4, rtol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


def saved(tmp_path, **changes):
    cfg = load(reference("llama3.1")[1], dtype="f32").config
    lora = Lora(4, 8.0, ("q_proj",))
    save_adapter(tmp_path, cfg, random_adapters(cfg, lora), lora)
    said = json.loads((tmp_path / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    return cfg


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"r": 8}, "ranks 4 and 4 and its config says 8"),
        ({"peft_type": "IA3"}, "kind IA3"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused(changes, words, tmp_path):
    cfg = saved(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        read_adapter(tmp_path, cfg)


def test_an_adapter_for_another_model_is_refused(tmp_path):
    saved(tmp_path)
    other = load(reference("llama3.1", hidden_size=96)[1], dtype="f32").config
    with pytest.raises(ValueError, match="another model"):
        read_adapter(tmp_path, other)
    with pytest.raises(ValueError, match="no adapter"):
        read_adapter(tmp_path / "nowhere", other)


def test_targets_that_are_not_there():
    cfg = load(reference("llama3.1")[1], dtype="f32").config
    with pytest.raises(ValueError, match="no projection of this model is called so: it has down_proj, gate_proj"):
        lora_spec(cfg, Lora(targets=("c_attn",)))
