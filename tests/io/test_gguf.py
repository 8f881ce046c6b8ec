"""Tiny `.gguf` files, written as llama.cpp's converter does, give back the Hugging Face weights."""

import itertools
import json
import struct
import tracemalloc
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from refusals import refuses

from dovetail.core.errors import CheckpointError, MissingPackageError
from dovetail.io.gguf import GgufCheckpoint
from dovetail.io.gguf_file import QUANT_TYPES
from dovetail.io.hf import read_params, stored_formats
from dovetail.models.formats import formats_of
from dovetail.models.registry import parse_config
from dovetail.ops.quant.weight import is_quantized

VOCAB, HIDDEN, FF, LAYERS, HEADS, KV, DIM, EXPERTS = 40, 32, 64, 4, 4, 2, 16, 3

# --- what llama.cpp calls each weight: written out here, apart from the tables under test ---

ATTENTION = {f"self_attn.{p}_proj": f"attn_{q}" for p, q in zip("qkvo", ("q", "k", "v", "output"), strict=True)}
MLP = {f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
AROUND = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm"} | AFTER
BLOCKS = {
    "llama": ATTENTION | BEFORE | MLP,
    "mixtral": ATTENTION | BEFORE | {"block_sparse_moe.gate": "ffn_gate_inp"},
    "smollm3": ATTENTION | BEFORE | MLP,
    "granite": ATTENTION | BEFORE | MLP,
    "qwen2": ATTENTION | BEFORE | MLP,
    "qwen3": ATTENTION | BEFORE | MLP | QK_NORMS,
    "qwen3_moe": ATTENTION | BEFORE | QK_NORMS | {"mlp.gate": "ffn_gate_inp"},
    "gemma2": ATTENTION | AROUND | MLP,
    "gemma3_text": ATTENTION | AROUND | MLP | QK_NORMS,
    "olmo2": ATTENTION | AFTER | MLP | QK_NORMS,
}
EXPERT_NAMES = {
    "mixtral": {"w1": "gate", "w2": "down", "w3": "up"},
    "qwen3_moe": {"gate_proj": "gate", "down_proj": "down", "up_proj": "up"},
}
REORDERED = ("llama", "mixtral", "smollm3", "granite")
EXPERT_PREFIX = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
ARCH = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def shape_of(module: str, model_type: str) -> tuple[int, ...]:
    if "norm" in module:
        if "q_norm" in module or "k_norm" in module:
            whole = {"self_attn.q_norm": HEADS * DIM, "self_attn.k_norm": KV * DIM}[module]
            return (whole,) if model_type == "olmo2" else (DIM,)
        return (HIDDEN,)
    ends = {"q_proj": (HEADS * DIM, HIDDEN), "o_proj": (HIDDEN, HEADS * DIM), "down_proj": (HIDDEN, FF)}
    ends |= {"k_proj": (KV * DIM, HIDDEN), "v_proj": (KV * DIM, HIDDEN), "gate": (EXPERTS, HIDDEN)}
    return ends.get(module.split(".")[-1], (FF, HIDDEN))


def random_weights(model_type: str, tied: bool = False) -> dict[str, np.ndarray]:
    """HF-named. Multiples of 1/64: adding 1 to them and taking it away again is exact."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied and model_type != "gemma2":  # a gemma2 file never has a head of its own
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{m}.weight": shape_of(m, model_type) for m in BLOCKS[model_type]}
        if model_type == "qwen2":
            shapes |= {f"{prefix}.{m}.bias": shape_of(m, model_type)[:1] for m in list(ATTENTION)[:3]}
        for expert, (name, kind) in itertools.product(range(EXPERTS), EXPERT_NAMES.get(model_type, {}).items()):
            shape = (HIDDEN, FF) if kind == "down" else (FF, HIDDEN)
            shapes[f"{prefix}.{EXPERT_PREFIX[model_type]}.experts.{expert}.{name}.weight"] = shape
    return {name: (rng.integers(-64, 64, shape) / 64).astype(np.float32) for name, shape in shapes.items()}


def stored_weights(model_type: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return weights in llama.cpp's layout: renamed, q and k reordered, gemma's norms plus one, experts stacked."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer, (hf, own) in itertools.product(range(LAYERS), BLOCKS[model_type].items()):
        names[f"model.layers.{layer}.{hf}"] = f"blk.{layer}.{own}"
    stored = {}
    for name, value in weights.items():
        module, suffix = name.rsplit(".", 1)
        if "experts" in name:
            continue
        if model_type in REORDERED and module.endswith(("q_proj", "k_proj")):
            value = to_llama_cpp_order(value, HEADS if module.endswith("q_proj") else KV)
        if model_type.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        stored[f"{names[module]}.{suffix}"] = value
    for layer, (name, kind) in itertools.product(range(LAYERS), EXPERT_NAMES.get(model_type, {}).items()):
        prefix = f"model.layers.{layer}.{EXPERT_PREFIX[model_type]}.experts"
        experts = [weights[f"{prefix}.{e}.{name}.weight"] for e in range(EXPERTS)]
        stored[f"blk.{layer}.ffn_{kind}_exps.weight"] = np.stack(experts)
    return stored


def to_llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half is followed by row i of its second half."""
    size = len(rows) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def metadata(model_type: str) -> dict:
    arch = ARCH.get(model_type, model_type)
    values = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": DIM,
        "attention.value_length": DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0,
    }  # fmt: skip
    if model_type in EXPERT_NAMES:
        values |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if model_type == "qwen3_moe":
        values["expert_feed_forward_length"] = FF
    if model_type.startswith("gemma"):
        values["attention.sliding_window"] = 8
    named = {f"{arch}.{key}": value for key, value in values.items()}
    ids = {"bos": 1, "eos": 2, "padding": 0, "eot": 5}
    return named | {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()}


def write(path: Path, model_type: str, values: dict, tensors: dict, **options) -> Path:
    """`tensors`: arrays, or (packed bytes, quant type)."""
    writer = gguf.GGUFWriter(path, ARCH.get(model_type, model_type), **options)
    for key, value in values.items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(key, value)
    for name, value in tensors.items():
        packed, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path):
    """A tiny file of a family; `values` replaces metadata (None takes a key out) and `tensors` adds to the weights."""

    def make(model_type="llama", values=None, tensors=None, tied=False, **options) -> Path:
        stored = stored_weights(model_type, random_weights(model_type, tied)) | (tensors or {})
        kept = {key: value for key, value in (metadata(model_type) | (values or {})).items() if value is not None}
        return write(tmp_path / f"{model_type}.gguf", model_type, kept, stored, **options)

    return make


# --- weights ---


@pytest.mark.parametrize("model_type", BLOCKS)
def test_every_weight_comes_back_under_its_hf_name(tiny, model_type):
    weights = random_weights(model_type)
    checkpoint = GgufCheckpoint(tiny(model_type))
    assert checkpoint.config["model_type"] == model_type
    expected = {name: (value.shape, np.dtype(np.float32)) for name, value in weights.items()}
    assert checkpoint.tensors() == expected
    for name, value in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), value, err_msg=name)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize(
    "index", [(slice(3, 9),), (slice(0, 0),), (slice(2, 30), slice(8, 24)), (slice(None), slice(1, 5))]
)
def test_a_slice_is_a_slice_of_the_whole(tiny, model_type, index):
    checkpoint = GgufCheckpoint(tiny(model_type))
    for name, value in random_weights(model_type).items():
        cut = index[: value.ndim]
        np.testing.assert_array_equal(checkpoint.read(name, cut), value[cut], err_msg=name)


@pytest.mark.parametrize("kind", QUANT_TYPES)
def test_quantised_weights_equal_the_gguf_packages_own_numbers(tiny, kind):
    width, quant = 256, Quant[kind]
    packed = pack(np.random.default_rng(1).normal(size=(HEADS * DIM, width)).astype(np.float32), quant)
    expected = gguf.quants.dequantize(packed, quant)
    stored = {"blk.0.attn_v.weight": (packed, quant), "blk.0.attn_q.weight": (packed, quant)}
    checkpoint = GgufCheckpoint(tiny("llama", tensors=stored))
    value, query = "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.q_proj.weight"

    plain = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
    assert checkpoint.tensors()[value] == (expected.shape, np.dtype(plain.get(kind, np.float32)))
    assert checkpoint.read(value).dtype == checkpoint.tensors()[value][1]
    np.testing.assert_array_equal(checkpoint.read(value).astype(np.float32), expected)
    cut = (slice(5, 40), slice(100, 200))
    np.testing.assert_array_equal(checkpoint.read(value, cut).astype(np.float32), expected[cut])
    # Row order is undone on the packed rows: the result must be the same as undoing it on the numbers.
    np.testing.assert_array_equal(to_llama_cpp_order(checkpoint.read(query).astype(np.float32), HEADS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_blocks_are_kept_as_they_lie_in_the_file(tiny, model_type):
    """Rows in Hugging Face's order, experts one by one; vectors, routers and plain tensors are arrays."""
    stored = stored_weights(model_type, random_weights(model_type))
    kept = [n for n, x in stored.items() if x.ndim > 1 and "inp" not in n and ".0." not in n]
    source = GgufCheckpoint(tiny(model_type, tensors={n: (pack(stored[n], Quant.Q4_1), Quant.Q4_1) for n in kept}))
    cfg = parse_config(source.config)
    formats = stored_formats(source, cfg, "x")
    ours, plain = (read_params(source, cfg, "float32", "x", formats=each) for each in (formats, ()))
    assert len(formats_of(ours)) == 2 + 7 * (LAYERS - 1) and not formats_of(plain)
    unpacked = jax.tree.map(lambda w: w.dense() if is_quantized(w) else w, ours, is_leaf=is_quantized)
    for got, want in zip(jax.tree.leaves(unpacked), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def pack(values: np.ndarray, quant: Quant) -> np.ndarray:
    try:
        return gguf.quants.quantize(values, quant)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[quant]
        random = np.random.default_rng(2).integers(0, 256, (len(values), values.shape[1] // block * size), np.uint8)
        return random & 0xBF  # a clear bit 6 keeps every float16 scale finite


def test_reading_needs_little_more_than_the_tensor_itself(tiny):
    rows, width = 4096, 2048
    packed = np.zeros((rows, width // 32 * 18), np.uint8)
    checkpoint = GgufCheckpoint(tiny("llama", tensors={"blk.0.ffn_up.weight": (packed, Quant.Q4_0)}))
    tracemalloc.start()
    checkpoint.read("model.layers.0.mlp.up_proj.weight", (slice(0, 64),))
    small = tracemalloc.get_traced_memory()[1]
    checkpoint.read("model.layers.0.mlp.up_proj.weight")
    whole = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert small < 64 * width * 4 * 4
    assert whole < rows * width * 4 * 3


def test_a_tied_model_has_no_head_of_its_own(tiny):
    checkpoint = GgufCheckpoint(tiny("qwen3", tied=True))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensors()
    assert GgufCheckpoint(tiny("qwen3")).config["tie_word_embeddings"] is False


def test_llama_biases_are_put_in_order_too(tiny):
    bias = np.arange(HEADS * DIM, dtype=np.float32)
    stored = {"blk.0.attn_q.bias": to_llama_cpp_order(bias, HEADS), "blk.0.attn_output.bias": bias[:HIDDEN]}
    checkpoint = GgufCheckpoint(tiny("llama", tensors=stored))
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), bias)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias", (slice(3, 7),)), bias[3:7])
    assert checkpoint.config["attention_bias"] is True


def test_reading_a_name_or_shape_that_is_not_there(tiny):
    checkpoint = GgufCheckpoint(tiny())
    with refuses(None, CheckpointError, naming="'nope'"):
        checkpoint.read("nope")
    with refuses(None, CheckpointError, naming="(32,)"):
        checkpoint.read("model.norm.weight", (slice(None), slice(None)))


# --- config ---


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BLOCKS)
def test_transformers_takes_the_config_for_the_model_it_describes(tiny, model_type):
    """A model that transformers builds from our config has exactly these weights and shapes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint = GgufCheckpoint(tiny(model_type))
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(checkpoint.config)))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    ours = {name: shape for name, (shape, _) in checkpoint.tensors().items()}
    if model_type in EXPERT_NAMES:  # transformers stacks experts once loaded
        theirs = {name: shape for name, shape in theirs.items() if "experts" not in name and ".gate" not in name}
        ours = {name: shape for name, shape in ours.items() if "experts" not in name and ".gate" not in name}
    if config.tie_word_embeddings:  # one weight under two names, and the file has it once
        del theirs["lm_head.weight"]
    assert ours == theirs
    assert type(model).__name__ == checkpoint.config["architectures"][0]


def test_config_of_a_llama(tiny):
    config = GgufCheckpoint(tiny()).config
    assert config == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "head_dim": DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "rope_theta": 500000.0, "rope_scaling": None, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0,
    }  # fmt: skip


def test_config_has_the_numbers_that_only_llama_cpps_source_has(tiny):
    gemma2 = GgufCheckpoint(tiny("gemma2")).config
    assert gemma2["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"]) == (50.0, 30.0)
    assert gemma2["query_pre_attn_scalar"] == DIM
    gemma3 = GgufCheckpoint(tiny("gemma3_text")).config
    assert gemma3["layer_types"] == ["sliding_attention"] * LAYERS and gemma3["sliding_window"] == 8
    assert gemma3["rope_local_base_freq"] == 10000.0
    everywhere = GgufCheckpoint(tiny("gemma3_text", {"gemma3.attention.sliding_window": None})).config
    assert everywhere["layer_types"] == ["full_attention"] * LAYERS
    assert GgufCheckpoint(tiny("smollm3")).config["no_rope_layers"] == [1, 1, 1, 0]
    scales = {"attention.scale": 0.0078125, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 10.0}
    granite = GgufCheckpoint(tiny("granite", {f"granite.{key}": value for key, value in scales.items()})).config
    assert (granite["attention_multiplier"], granite["embedding_multiplier"]) == (0.0078125, 12.0)
    assert (granite["residual_multiplier"], granite["logits_scaling"]) == (0.22, 10.0)
    assert GgufCheckpoint(tiny("granite")).config["attention_multiplier"] == DIM**-0.5
    moe = GgufCheckpoint(tiny("qwen3_moe")).config
    assert (moe["num_experts"], moe["num_experts_per_tok"], moe["norm_topk_prob"]) == (EXPERTS, 2, True)
    assert GgufCheckpoint(tiny("mixtral")).config["num_local_experts"] == EXPERTS


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_found_behind_its_factors(tiny, factor):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    theta = {"rope_theta": 500000.0}
    shared = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 131072}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**shared, rope_parameters=scaling | theta), torch.device("cpu")
    )
    plain = 1.0 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    factors = (plain / scaled.numpy()).astype(np.float32)

    lengths = {"llama.attention.key_length": 128, "llama.attention.value_length": 128}
    config = GgufCheckpoint(tiny("llama", lengths, {"rope_freqs.weight": factors})).config
    assert config["rope_scaling"] == scaling
    with refuses(None, CheckpointError, naming="rope_freqs.weight"):
        GgufCheckpoint(tiny("llama", lengths, {"rope_freqs.weight": factors**1.1}))


def test_rope_scaling_from_the_metadata(tiny):
    linear = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    assert GgufCheckpoint(tiny("gemma3_text", linear)).config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    config = GgufCheckpoint(tiny("qwen2", {f"qwen2.rope.scaling.{key}": value for key, value in yarn.items()})).config
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with refuses(None, CheckpointError, naming="'longrope'"):
        GgufCheckpoint(tiny("llama", {"llama.rope.scaling.type": "longrope"}))


# --- refusals; each names the file ---


@pytest.mark.parametrize(
    ("values", "naming"),
    [
        ({"general.type": "adapter"}, "'adapter'"),
        ({"llama.attention.head_count": [4, 4, 2, 4]}, "llama.attention.head_count"),
        ({"llama.block_count": None}, "llama.block_count, and None"),
        ({"llama.block_count": 4.0}, "llama.block_count, and 4.0"),
        ({"llama.block_count": 1 << 31}, "2147483648 layers"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.logit_scale": 4.0}, "llama.logit_scale"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"general.alignment": 24}, "general.alignment"),
    ],
)
def test_metadata_that_is_refused(tiny, values, naming):
    path = tiny("llama", values)
    with refuses(None, CheckpointError, naming=naming) as error:
        GgufCheckpoint(path)
    assert str(path) in str(error.value)


def test_an_unknown_architecture_lists_the_known(tmp_path):
    path = write(tmp_path / "a.gguf", "mamba", {}, {})
    with pytest.raises(
        CheckpointError, match=r"'mamba', which is not supported; these are: llama, qwen2, qwen3, qwen3moe, "
    ):
        GgufCheckpoint(path)


def test_olmo3_is_refused_and_not_read_as_olmo2(tiny):
    with refuses(None, CheckpointError, naming="OLMo 3"):
        GgufCheckpoint(tiny("olmo2", {"olmo2.attention.sliding_window": 4096}))


def test_a_tensor_without_a_place_is_named(tiny):
    with refuses(None, CheckpointError, naming="'blk.0.attn_sinks.weight'"):
        GgufCheckpoint(tiny(tensors={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}))


@pytest.mark.parametrize("kind", [Quant.TQ2_0, Quant.IQ2_XXS, Quant.I8])
def test_an_unsupported_quant_type_is_named_with_its_tensor(tiny, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = {"blk.0.attn_v.weight": (np.zeros((4, 256 // block * size), np.uint8), kind)}
    with refuses(None, CheckpointError, naming=f"'blk.0.attn_v.weight' is stored as {kind.name}"):
        GgufCheckpoint(tiny(tensors=stored))


@pytest.mark.parametrize(
    ("content", "naming"),
    [
        (b"", "it is empty"),
        (b"GG", "b'GG'"),
        (b"PK\3\4" + bytes(100), "b'PK"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4) + bytes(64), "UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"ab", 77) + bytes(64), "type 77"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 1, 0, 2, b"ab", 9) + bytes(64), "'ab' has 9"),
        (b"GGUF" + struct.pack("<IQQQ2sIQIQ", 3, 1, 0, 2, b"ab", 1, 32, 99, 0), "'ab' is stored as number 99"),
        (
            b"GGUF" + struct.pack("<IQQQ2sIQIQ", 3, 1, 0, 2, b"ab", 1, 31, 8, 0),
            "31 values; Q8_0 needs a multiple of 32",
        ),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path, content, naming):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with refuses(None, CheckpointError, naming=naming) as error:
        GgufCheckpoint(path)
    assert str(path) in str(error.value)


def test_a_big_endian_file_is_refused(tiny):
    with refuses(None, CheckpointError, naming="big-endian"):
        GgufCheckpoint(tiny(endianess=gguf.GGUFEndian.BIG))


def test_a_file_cut_anywhere_is_truncated_and_nothing_else(tiny, tmp_path):
    whole = tiny("llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = len(whole) - sum(value.nbytes for value in random_weights("llama").values())
    for size in [*range(4, header, 53), header + 5, len(whole) - 200]:
        cut.write_bytes(whole[:size])
        with refuses(None, CheckpointError, naming="truncated"):
            GgufCheckpoint(cut)


def test_without_the_gguf_package_the_error_names_the_install_command(tiny, monkeypatch):
    path = tiny()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(None, MissingPackageError, naming="pip install gguf"):
        GgufCheckpoint(path)


# --- the real thing ---


@pytest.mark.thorough  # each kind of block is held to gguf's own reader above, and test_smollm2 to its logits
def test_smollm2_equals_what_transformers_reads(smollm2_gguf):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = GgufCheckpoint(smollm2_gguf)
    config = AutoConfig.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(smollm2_gguf, return_tensors=True, model_to_load=model)["tensors"]
    assert theirs.keys() == checkpoint.tensors().keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(checkpoint.read(name), value.numpy(), err_msg=name)
