"""Adapters of experts: transformers 5 stacks experts, and PEFT adapts the stack as a parameter."""

from __future__ import annotations

import copy
import json

import jax
import numpy as np
import pytest
from adapter_cases import logits, random_adapters, shake, theirs
from later import later
from reference_models import reference
from refusals import refuses
from safetensors.numpy import load_file, save_file

from dovetail.core.errors import CheckpointError
from dovetail.io.load import load
from dovetail.io.peft import read_adapter, save_adapter
from dovetail.models.lora import Lora, attach, merge

peft = later("peft")

# PEFT looks for the names of patterns among modules alone, and then takes them for parameters all the same
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def small(name: str, **changes):
    """With a layer of each kind. PEFT leaves the parameters of a model in another order than it found them."""
    kinds = dict(layer_types=("sliding_attention", "full_attention")) if name == "gemma4-moe" else {}
    model, folder = reference(name, num_hidden_layers=2, **kinds, **changes)
    return copy.deepcopy(model), folder


def same(ours, others) -> None:
    np.testing.assert_allclose(ours, others, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name, lora",
    [
        pytest.param("qwen3-moe", Lora(3, 6.0), marks=pytest.mark.thorough),
        ("qwen3-moe", Lora(3, 6.0, ("gate_proj",), lora_dropout=0.1)),  # up is beside it in one parameter
        pytest.param("mixtral", Lora(2, 4.0), marks=pytest.mark.thorough),
        ("mixtral", Lora(2, 4.0, (r".*\.0\..*w1", r".*\.1\..*w2"))),  # each layer another
        pytest.param("deepseek-v2", Lora(2, 4.0, ("down_proj",)), marks=pytest.mark.thorough),
        pytest.param("deepseek-v3", Lora(2, 4.0, use_rslora=True), marks=pytest.mark.thorough),
        ("gpt-oss", Lora(2, 4.0)),
        pytest.param("gemma4-moe", Lora(2, 4.0), marks=pytest.mark.thorough),
    ],
    ids=["qwen3", "gate", "mixtral", "layers", "down", "deepseek", "gpt-oss", "gemma4"],
)
def test_saved_by_us_loaded_by_peft(name, lora, tmp_path):
    model, folder = small(name)
    ours = load(folder, dtype="f32")
    adapters = random_adapters(ours.config, lora)
    save_adapter(tmp_path, ours.config, adapters, lora, str(folder))
    adapted = logits(attach(ours.params, adapters, lora), ours.config)
    assert np.abs(adapted - theirs(model)).max() > 0.01
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path)
    same(adapted, theirs(wrapped))
    again, tree = read_adapter(tmp_path, ours.config)
    assert again.scale == pytest.approx(lora.scale)
    jax.tree.map(np.testing.assert_array_equal, tree, adapters)


@pytest.mark.parametrize(
    "name, options",
    [
        ("qwen3-moe", dict(target_modules=["q_proj"], target_parameters=BOTH)),
        ("qwen3-moe", dict(target_modules="all-linear")),  # which PEFT turns into parameters, the router's too
        pytest.param(
            "mixtral", dict(target_modules=[], target_parameters=BOTH[:1], use_rslora=True),
            marks=pytest.mark.thorough,
        ),
        (
            "mixtral",
            dict(target_modules=["o_proj"], target_parameters=[*BOTH, "mlp.gate.weight", "q_proj.weight"],
                 rank_pattern={"experts.down_proj": 2, "q_proj.weight": 5}, alpha_pattern={"gate_up_proj": 5}),
        ),
        pytest.param(
            "deepseek-v3", dict(target_modules=["q_a_proj"], target_parameters=["experts.down_proj"]),
            marks=pytest.mark.thorough,
        ),
        pytest.param("gpt-oss", dict(target_modules=["v_proj"], target_parameters=BOTH), marks=pytest.mark.thorough),
        pytest.param(
            "gemma4-moe", dict(target_modules=[], target_parameters=["gate_up_proj", "experts.down_proj"]),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["qwen3", "all-linear", "joined-alone", "patterns", "down-alone", "gpt-oss", "gemma4"],
)  # fmt: skip
def test_saved_by_peft_loaded_by_us(name, options, tmp_path):
    model, folder = small(name)
    before = theirs(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, **options))
    shake(wrapped)
    wrapped.save_pretrained(tmp_path)
    expected = theirs(wrapped)
    assert np.abs(expected - before).max() > 0.01
    ours = load(folder, dtype="f32")
    lora, adapters = read_adapter(tmp_path, ours.config)
    same(logits(merge(ours.params, adapters, ours.config, lora), ours.config), expected)
    if name == "qwen3-moe":  # once: whether merged equals unmerged is not PEFT's matter
        same(logits(attach(ours.params, adapters, lora), ours.config), expected)


def test_an_adapter_of_peft_is_written_unchanged(tmp_path):
    """Gate and up have the ranks of their one pair, and no more."""
    model, folder = small("gpt-oss")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=[], target_parameters=BOTH))
    shake(wrapped)
    wrapped.save_pretrained(tmp_path / "theirs")
    cfg = load(folder, dtype="f32").config
    lora, adapters = read_adapter(tmp_path / "theirs", cfg)
    save_adapter(tmp_path / "ours", cfg, adapters, lora)
    before, after = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "ours"))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_model_wrapped_by_peft_before(tmp_path):
    """Gate and up are then outermost."""
    model, folder = small("qwen3-moe")
    config = peft.LoraConfig(r=3, target_modules=[], target_parameters=BOTH)
    wrapped = peft.get_peft_model(model, config)
    theirs(wrapped)
    wrapped = peft.get_peft_model(wrapped.unload(), config)
    shake(wrapped)
    wrapped.save_pretrained(tmp_path)
    ours = load(folder, dtype="f32")
    lora, adapters = read_adapter(tmp_path, ours.config)
    same(logits(merge(ours.params, adapters, ours.config, lora), ours.config), theirs(wrapped))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_pair_per_expert_is_read(name, tmp_path):
    """Earlier versions of Dovetail wrote them."""
    cfg = load(small(name)[1], dtype="f32").config
    w1, w2, w3 = ("w1", "w2", "w3") if name == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    within = "block_sparse_moe" if name == "mixtral" else "mlp"
    lora = Lora(2, 4.0, (rf".*experts\..*({w1}|{w2}|{w3})",))
    adapters, tensors = random_adapters(cfg, lora), {}
    for i, layer in enumerate(adapters["layers"]):
        for part, called in zip(("gate", "down", "up"), (w1, w2, w3), strict=True):
            pair = layer["moe"]["experts"][part] if layer else {"lora_a": []}
            for e in range(len(pair["lora_a"])):
                module = f"base_model.model.model.layers.{i}.{within}.experts.{e}.{called}"
                tensors |= {f"{module}.lora_{x.upper()}.weight": np.array(pair[f"lora_{x}"][e]) for x in "ab"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": [w1, w2, w3]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    jax.tree.map(np.testing.assert_array_equal, read_adapter(tmp_path, cfg)[1], adapters)


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, naming",
    [
        ({"target_parameters": [*BOTH, "experts.gate_up_proj_bias"]}, "gate_up_proj_bias"),
        ({"use_dora": True}, "use_dora and target_parameters"),
        ({"rank_pattern": {}}, "ranks 4 and 4"),
        ({"target_parameters": BOTH[1:]}, "model.layers.0.mlp.experts.base_layer"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused(changes, naming, tmp_path):
    cfg = load(small("gpt-oss")[1], dtype="f32").config
    lora = Lora(2, 4.0, ("gate_up_proj", "down_proj"))
    save_adapter(tmp_path, cfg, random_adapters(cfg, lora), lora)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(said | changes))
    with refuses(None, CheckpointError, naming=naming):
        read_adapter(tmp_path, cfg)


def test_an_adapter_for_other_experts_is_refused(tmp_path):
    cfg = load(small("gpt-oss")[1], dtype="f32").config
    lora = Lora(2, 4.0, ("down_proj",))
    save_adapter(tmp_path, cfg, random_adapters(cfg, lora), lora)
    other = load(small("gpt-oss", intermediate_size=64)[1], dtype="f32").config
    with refuses(None, CheckpointError, naming="5 experts of 48 x 64"):
        read_adapter(tmp_path, other)
