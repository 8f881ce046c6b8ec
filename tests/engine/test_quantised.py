"""Test engines on quantised weights: the tokens of the unpacked weights, weight updates, adapters, parallelism."""

from __future__ import annotations

import pickle
from dataclasses import replace

import jax
import numpy as np
import pytest
from adapter_cases import random_adapters
from refusals import refuses

from dovetail.core.compute import compute_of
from dovetail.core.errors import UnsupportedError
from dovetail.core.formats import ROUNDED, Format
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import held_bytes, init, num_bytes, tree_map
from dovetail.engine import llm as engine_llm
from dovetail.engine.llm import LLM
from dovetail.engine.options import QUANTIZATIONS, EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.io.peft import save_adapter
from dovetail.models.decoder import greedy
from dovetail.models.formats import formats_of, rounded_formats, with_formats
from dovetail.models.frozen import dense
from dovetail.models.lora import Lora, merge
from dovetail.models.publish import publish, serving_spec
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.ops.quant.weight import abstract_weight, is_quantized, rounded

pytestmark = pytest.mark.slow

CFG = parse_config(dict(
    model_type="llama", vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, hidden_act="silu",
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5,
    eos_token_id=2, tie_word_embeddings=False,
))  # fmt: skip
OPTIONS = EngineOptions(max_num_seqs=2, max_model_len=32, max_num_batched_tokens=16, block_size=4, dtype="f32")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[3, 4, 5], [50, 60, 7, 8, 9]]


def weights(seed: int = 0):
    return init(spec(CFG), jax.random.key(seed), "float32", std=0.2)


def rounded_to(params, scheme: str):
    return tree_map(rounded, with_formats(spec(CFG), rounded_formats(spec(CFG), scheme)), params)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def test_an_engine_on_rounded_weights_and_a_weight_update():
    llm = LLM.from_weights(CFG, weights(), replace(OPTIONS, quantization="int4"))
    held = held_bytes(llm.runner.weights.params)
    assert held == num_bytes(serving_spec(CFG, None, rounded_formats(spec(CFG), "int4")), "float32")
    cfg = replace(CFG, eos_ids=())
    for seed in (0, 1):
        llm.update_weights(weights(seed))
        plain = dense(rounded_to(weights(seed), "int4"))
        assert tokens(llm) == [list(greedy(plain, cfg, ids, 6, compute_of("f32"))) for ids in PROMPTS]
    assert is_quantized(llm.runner.weights.params["layers"][0]["attn"]["q+k+v"])


@pytest.mark.thorough
def test_adapters(tmp_path):
    """A served adapter gives the tokens of the weights that it is merged into."""
    lora = Lora(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
    adapters = random_adapters(CFG, lora)
    save_adapter(tmp_path / "a", CFG, adapters, lora, "base")
    options = replace(OPTIONS, quantization="int8", lora_modules={"a": str(tmp_path / "a")})
    llm = LLM.from_weights(CFG, weights(), options)
    merged = merge(rounded_to(weights(), "int8"), adapters, CFG, lora)
    want = [list(greedy(merged, replace(CFG, eos_ids=()), ids, 6, compute_of("f32"))) for ids in PROMPTS]
    got = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY, adapter="a")]
    assert got == want != tokens(llm)


@pytest.mark.thorough
def test_tensor_parallelism():
    alone, two = (
        LLM.from_weights(CFG, weights(), replace(OPTIONS, quantization="mxfp4", tensor_parallel_size=size))
        for size in (1, 2)
    )
    assert tokens(alone) == tokens(two)


def test_weights_of_other_formats_are_not_joined_and_some_cannot_be_rounded():
    forms = {path: form for path, form in rounded_formats(spec(CFG), "int8") if not path.endswith(".v")}
    layer = publish(weights(), CFG, "float32", formats=tuple(forms.items()))["layers"][0]
    assert {"q", "k", "v", "o"} == set(layer["attn"]) and "gate+up" in layer["mlp"]
    with refuses("quantization", UnsupportedError, naming="q4_1"):
        publish(weights(), CFG, "float32", formats=(("layers.0.attn.q", Format("q4_1")),))


@pytest.mark.parametrize(("asked", "held"), [(None, "gguf_int8"), ("gguf", "gguf"), ("none", "none")])
def test_a_gguf_file_on_a_cpu_has_int8_activations_by_default(tmp_path, monkeypatch, asked, held):
    (tmp_path / "model.gguf").touch()
    seen = []

    def load(path, dtype, placement, progress, check, quantization):
        seen.append(quantization)
        raise UnsupportedError("seen")

    monkeypatch.setattr(engine_llm, "load", load)
    with refuses(None, UnsupportedError, naming="seen"):
        LLM(tmp_path / "model.gguf", quantization=asked)
    assert seen == [held]


def test_weights_of_one_storage_have_the_activations_of_the_engine():
    """Blocks that were read with f32 activations can be published to an engine with int8 ones."""
    own = {path: Format("q4_1") for path, _ in rounded_formats(spec(CFG), "int8")}
    specs = with_formats(spec(CFG), own)
    leaves = tree_map(lambda leaf: abstract_weight(leaf, "float32", None), specs)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), leaves)
    rounds = tuple((path, replace(form, activations="int8")) for path, form in own.items())
    published = publish(params, CFG, "float32", formats=rounds)
    assert dict(formats_of(published)) == dict(rounds)


def test_a_placement_is_pickled_with_a_kept_program():
    place = Placement(make_mesh({"tensor": 2}, jax.devices()[2:4]), SERVE)
    again = pickle.loads(pickle.dumps(place))
    assert again == place and hash(again) == hash(place)


def test_specs_and_options():
    assert set(ROUNDED) | {"gguf", "gguf_int8", "none"} == set(QUANTIZATIONS)
    with refuses("quantization"):
        EngineOptions(quantization="int3")
    specs = with_formats(spec(CFG), rounded_formats(spec(CFG), "int8"))
    projections = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128
    scales = 16 * 8 + 64 + 2 * 128 + 64
    assert num_bytes(specs, "float32") == num_bytes(spec(CFG), "float32") - 3 * projections + 4 * scales
    assert np.dtype("int8") in {kind for _, kind in specs["layers"][0]["mlp"]["up"].arrays("float32").values()}
