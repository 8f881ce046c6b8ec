"""Test published quantised checkpoints: tiny random ones in each layout, against the formulas of the layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from refusals import refuses
from safetensors.numpy import load_file, save_file

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.core.formats import ROUNDED
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import init
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.io.load import convert, load, save
from dovetail.models.formats import formats_of
from dovetail.models.publish import publish
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.ops.quant.weight import is_quantized

pytestmark = pytest.mark.slow

D, F, HEADS, KV, H = 192, 128, 4, 2, 32
LLAMA = dict(
    model_type="llama", vocab_size=64, hidden_size=D, intermediate_size=F, num_hidden_layers=1, hidden_act="silu",
    num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=H, max_position_embeddings=64, rms_norm_eps=1e-5,
    eos_token_id=2, tie_word_embeddings=False, dtype="float32",
)  # fmt: skip
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, np.ndarray]
Encoded = tuple[Tensors, np.ndarray]  # the stored tensors of a module by suffix, and its weight [O, I]
rng = np.random.default_rng(0)


def words(values: np.ndarray, bits: int = 4) -> np.ndarray:
    """Pack numbers [R, n] into int32 [R, n bits / 32], the first in the lowest bits."""
    each = values.reshape(len(values), -1, 32 // bits).astype(np.uint32)
    return np.bitwise_or.reduce(each << (bits * np.arange(32 // bits, dtype=np.uint32)), axis=-1).view(np.int32)


def codes(*shape: int, most: int = 16) -> np.ndarray:
    return rng.integers(0, most, shape)


def scales(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (rng.random(shape) * 0.02 + 0.001).astype(dtype)


def each(groups: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(groups.astype(np.float32), -(-size // groups.shape[1]), axis=1)[:, :size]


def ct_int4(O: int, size: int) -> Encoded:
    q, s = codes(O, size), scales(O, size // 32, dtype=ml_dtypes.bfloat16)
    tensors = {".weight_packed": words(q), ".weight_scale": s, ".weight_shape": np.array([O, size])}
    return tensors, (q - 8) * each(s, size)


def ct_uint4(O: int, size: int) -> Encoded:
    q, z, s = codes(O, size), codes(O, size // 32), scales(O, size // 32, dtype=np.float16)
    tensors = {".weight_packed": words(q), ".weight_scale": s, ".weight_shape": np.array([O, size])}
    return tensors | {".weight_zero_point": words(z.T).T}, (q - each(z, size)) * each(s, size)


def ct_int8_packed(O: int, size: int) -> Encoded:
    q, s = codes(O, size, most=256), scales(O, 1)
    return {".weight_packed": words(q, 8), ".weight_scale": s, ".weight_shape": np.array([O, size])}, (q - 128.0) * s


def ct_int8(O: int, size: int) -> Encoded:
    q, s = codes(O, size, most=255) - 127, scales(O, 1, dtype=ml_dtypes.bfloat16)
    return {".weight": q.astype(np.int8), ".weight_scale": s}, q * s.astype(np.float32)


def ct_fp8(*shape_of_scale: int) -> Callable[[int, int], Encoded]:
    def encode(O: int, size: int) -> Encoded:
        q = (rng.normal(size=(O, size)) * 50).astype(E4M3)
        s = scales(*(x or O for x in shape_of_scale))
        return {".weight": q, ".weight_scale": s, ".input_scale": scales(1)}, q.astype(np.float32) * s

    return encode


def fp8_blocks(O: int, size: int) -> Encoded:
    q, s = (rng.normal(size=(O, size)) * 50).astype(E4M3), scales(-(-O // 128), -(-size // 128))
    whole = np.repeat(np.repeat(s, 128, 0)[:O], 128, 1)[:, :size]
    return {".weight": q, ".weight_scale_inv": s}, q.astype(np.float32) * whole


def nvfp4(O: int, size: int) -> Encoded:
    q, s, top = codes(O, size), (scales(O, size // 16) * 1000).astype(E4M3), np.array([640.0], np.float32)
    tensors = {".weight_packed": (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8), ".weight_scale": s}
    tensors |= {".weight_global_scale": top, ".input_global_scale": top}
    return tensors, E2M1[q] * each(s, size) / top


def ct_mxfp4(O: int, size: int) -> Encoded:
    q, s = codes(O, size), rng.integers(115, 122, (O, size // 32)).astype(np.uint8)
    tensors = {".weight_packed": (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8), ".weight_scale": s}
    return tensors, E2M1[q] * 2.0 ** (each(s, size) - 127)


def gptq(added: int, symmetric: bool = False) -> Callable[[int, int], Encoded]:
    def encode(O: int, size: int) -> Encoded:
        q, s = codes(size, O), scales(size // 64, O, dtype=np.float16)
        z = np.full_like(codes(size // 64, O), 8 - added) if symmetric else codes(size // 64, O)
        tensors = {".qweight": words(q.T).T, ".qzeros": words(z), ".scales": s}
        tensors[".g_idx"] = np.arange(size, dtype=np.int32) // 64
        return tensors, ((q - np.repeat(z, 64, 0) - added) * np.repeat(s.astype(np.float32), 64, 0)).T

    return encode


def awq(O: int, size: int) -> Encoded:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble n holds this column of each eight
    q, z, s = codes(size, O), codes(size // 64, O), scales(size // 64, O, dtype=np.float16)

    def packed(x: np.ndarray) -> np.ndarray:
        return words(x.reshape(len(x), -1, 8)[:, :, order].reshape(x.shape))

    whole = (q - np.repeat(z, 64, 0)) * np.repeat(s.astype(np.float32), 64, 0)
    return {".qweight": packed(q), ".qzeros": packed(z), ".scales": s}, whole.T


def bitsandbytes_nf4(O: int, size: int) -> Encoded:
    from dovetail.ops.quant.unpack import NF4_VALUES

    q, blocks = codes(O * size), O * size // 64
    table, small, nested = rng.random(256).astype(np.float32), codes(blocks, most=256), scales(-(-blocks // 256))
    scale = table[small] * np.repeat(nested, 256)[:blocks] + np.float32(0.01)
    state = dict(quant_type="nf4", blocksize=64, shape=[O, size], nested_blocksize=256, nested_offset=0.01)
    tensors = {
        ".weight": (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None], ".weight.absmax": small.astype(np.uint8),
        ".weight.quant_map": NF4_VALUES, ".weight.nested_absmax": nested, ".weight.nested_quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }  # fmt: skip
    return tensors, (NF4_VALUES[q] * np.repeat(scale, 64)).reshape(O, size)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"])


PACK = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
GPTQ = dict(quant_method="gptq", bits=4, group_size=64, sym=False, desc_act=False)
# name: (quantization_config, encode, the format's name and group)
LAYOUTS: dict[str, tuple[dict, Callable[[int, int], Encoded], str, int]] = {
    "pack-quantized": (compressed("pack-quantized", **PACK), ct_int4, "int4", 32),
    "pack-quantized, asymmetric": (compressed("pack-quantized", **PACK | {"symmetric": False}), ct_uint4, "uint4", 32),
    "pack-quantized, 8 bits": (compressed("pack-quantized", **PACK | {"num_bits": 8}), ct_int8_packed, "int8", 0),
    "int-quantized": (compressed("int-quantized", num_bits=8, type="int"), ct_int8, "int8", 0),
    "float-quantized, channel": (compressed("float-quantized", num_bits=8, type="float"), ct_fp8(0, 1), "fp8", 0),
    "float-quantized, tensor": (compressed("float-quantized", num_bits=8, type="float"), ct_fp8(1), "fp8", 0),
    "nvfp4": (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), nvfp4, "nvfp4", 16),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float"), ct_mxfp4, "mxfp4", 32),
    "gptq": (GPTQ, gptq(1), "uint4", 64),
    "gptq, symmetric": (GPTQ | {"sym": True}, gptq(1, symmetric=True), "int4", 64),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(0), "uint4", 64),
    "awq": (dict(quant_method="awq", bits=4, group_size=64, version="gemm", zero_point=True), awq, "uint4", 64),
    "fp8 blocks": (dict(quant_method="fp8", weight_block_size=[128, 128]), fp8_blocks, "fp8", 128),
    "bitsandbytes": (dict(quant_method="bitsandbytes", load_in_4bit=True), bitsandbytes_nf4, "nf4", 64),
}


def write(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """Write a folder with quantised projections, of which o_proj is ignored; return the weights of the modules."""
    quantization, encode, _, _ = LAYOUTS[layout]
    cfg = parse_config(dict(LLAMA))
    save(folder, cfg, init(spec(cfg), jax.random.key(0), "float32"), None)
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight") and "o_proj" not in name]:
        module = name.removesuffix(".weight")
        parts, weights[name] = encode(*tensors.pop(name).shape)
        tensors |= {f"{module}{suffix}": np.ascontiguousarray(x) for suffix, x in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    amend(folder, quantization_config=quantization)
    return weights


def amend(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_each_layout(layout, tmp_path):
    weights = write(tmp_path / "m", layout)
    kept, plain = (load(tmp_path / "m", dtype="f32", quantization=how).params for how in (None, "none"))
    layer, whole = kept["layers"][0], plain["layers"][0]
    for part, name, stored in (("attn", "q", "self_attn.q_proj"), ("mlp", "down", "mlp.down_proj")):
        want = weights[f"model.layers.0.{stored}.weight"].astype(np.float32)
        got = layer[part][name]
        assert (got.format.name, got.format.group) == LAYOUTS[layout][2:]
        np.testing.assert_allclose(np.asarray(got.dense()).reshape(want.shape), want, rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(whole[part][name], got.dense())
    assert not is_quantized(layer["attn"]["o"]) and len(formats_of(kept)) == 6


def test_logits_are_those_of_the_unpacked_weights(tmp_path):
    """Compare the loaded model, the weights published for an engine, and both on two devices."""
    write(tmp_path / "m", "gptq")
    place = Placement(make_mesh({"tensor": 2}, jax.devices()[:2]), SERVE)
    plain, kept = (load(tmp_path / "m", dtype="f32", quantization=how) for how in ("none", None))
    want = plain.logits([3, 4, 5])
    np.testing.assert_allclose(kept.logits([3, 4, 5]), want, atol=1e-4)
    published = publish(kept.params, kept.config, "float32")
    assert published["layers"][0]["attn"]["q+k+v"].shape == (1, HEADS + 2 * KV, H, D)
    kept.params = published
    np.testing.assert_allclose(kept.logits([3, 4, 5]), want, atol=1e-4)
    split = load(tmp_path / "m", dtype="f32", placement=place)
    split.params = publish(split.params, split.config, "float32", place, take=True)
    down, joined = (split.params["layers"][0]["mlp"][name].arrays["codes"] for name in ("down", "gate+up"))
    assert down.sharding.shard_shape(down.shape) == (D, F // 2 // 2)  # 2 groups of 64 values
    assert joined.sharding.shard_shape(joined.shape) == (1, F, D // 2)
    np.testing.assert_allclose(split.logits([3, 4, 5]), want, atol=1e-4)


def write_gpt_oss(folder: Path) -> dict[str, np.ndarray]:
    """Write experts in mxfp4, rows of gate and up alternating; all else is plain. Return the experts' weights."""
    E, width, dim = 4, 32, 64
    cfg = parse_config(dict(
        model_type="gpt_oss", vocab_size=64, hidden_size=dim, intermediate_size=width, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=E, num_experts_per_tok=2, sliding_window=8,
        layer_types=["full_attention"], max_position_embeddings=64, rms_norm_eps=1e-5, eos_token_id=2, dtype="float32",
        tie_word_embeddings=False, hidden_act="silu", attention_bias=True, swiglu_limit=7.0,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ))  # fmt: skip
    save(folder, cfg, init(spec(cfg), jax.random.key(0), "float32"), None)
    tensors, at = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts."
    dense = {}
    for name, rows, size in (("gate_up_proj", 2 * width, dim), ("down_proj", dim, width)):
        del tensors[at + name]
        q, s = codes(E, rows, size), rng.integers(115, 122, (E, rows, size // 32)).astype(np.uint8)
        blocks = (q[..., ::2] | q[..., 1::2] << 4).astype(np.uint8)
        tensors[f"{at}{name}_blocks"] = blocks.reshape(E, rows, size // 32, 16)
        tensors[f"{at}{name}_scales"] = s
        dense[name] = E2M1[q] * 2.0 ** (np.repeat(s.astype(np.float32), 32, -1) - 127)
    save_file(tensors, folder / "model.safetensors")
    amend(folder, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]))
    return dense


def test_gpt_oss_as_published(tmp_path):
    dense = write_gpt_oss(tmp_path / "m")
    kept = load(tmp_path / "m", dtype="f32")
    experts = kept.params["layers"][0]["moe"]["experts"]
    np.testing.assert_array_equal(experts["gate"].dense(), dense["gate_up_proj"][:, ::2])
    np.testing.assert_array_equal(experts["up"].dense(), dense["gate_up_proj"][:, 1::2])
    np.testing.assert_array_equal(experts["down"].dense(), dense["down_proj"])
    plain = load(tmp_path / "m", dtype="f32", quantization="none")
    np.testing.assert_array_equal(plain.params["layers"][0]["moe"]["experts"]["up"], dense["gate_up_proj"][:, 1::2])
    np.testing.assert_allclose(kept.logits([3, 4, 5]), plain.logits([3, 4, 5]), atol=1e-4)


def test_random_weights_have_the_formats_of_the_published_ones(tmp_path):
    """`load_format=dummy` measures the model as it is served; it cannot where the tensors decide."""
    write_gpt_oss(tmp_path / "m")
    options = dict(load_format="dummy", dtype="f32", max_num_seqs=2, max_model_len=32, max_num_batched_tokens=16)
    found = [
        formats_of(each.runner.weights.params)
        for each in (LLM(tmp_path / "m", dtype="f32", max_num_seqs=2, max_model_len=32), LLM(tmp_path / "m", **options))
    ]
    assert found[0] == found[1] and len(found[0]) == 3
    assert not formats_of(LLM(tmp_path / "m", quantization="none", **options).runner.weights.params)
    amend(tmp_path / "m", quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    with refuses("quantization"):
        LLM(tmp_path / "m", **options)
    assert LLM(tmp_path / "m", quantization="none", **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout", ["pack-quantized, asymmetric", "gptq", "awq", "bitsandbytes", "fp8 blocks", "gpt-oss"]
)
def test_an_engine_gives_the_tokens_of_the_unpacked_weights(layout, tmp_path):
    """On one device, and under tensor parallelism."""
    if layout == "gpt-oss":
        write_gpt_oss(tmp_path / "m")
    else:
        write(tmp_path / "m", layout)
    options = dict(dtype="f32", max_num_seqs=2, max_model_len=32, block_size=8, max_num_batched_tokens=16)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def tokens(**more: Any) -> list[list[int]]:
        found = LLM(tmp_path / "m", **options, **more).generate([[3, 4, 5], [50, 60, 7, 8, 9]], sampling)
        return [list(each.outputs[0].token_ids) for each in found]

    assert tokens() == tokens(tensor_parallel_size=2) == tokens(quantization="none")


@pytest.mark.parametrize("scheme", ["int4", "gguf", "4bit"])
def test_rounding_on_load(scheme, tmp_path):
    cfg = parse_config(dict(LLAMA))
    save(tmp_path / "m", cfg, init(spec(cfg), jax.random.key(0), "float32"), None)
    if scheme not in ROUNDED:
        with refuses("quantization"):
            load(tmp_path / "m", quantization=scheme)
        return
    params = load(tmp_path / "m", dtype="f32", quantization=scheme).params
    assert len(formats_of(params)) == 7 and not is_quantized(params["embed"])
    down, o = params["layers"][0]["mlp"]["down"], params["layers"][0]["attn"]["o"]
    assert (down.format.group, params["layers"][0]["mlp"]["up"].format.group) == (128, 64)
    assert o.shape == (D, HEADS, H) and o.arrays["codes"].shape == (D, HEADS * H // 2)
    whole = load(tmp_path / "m", dtype="f32").params["layers"][0]["mlp"]["down"]
    assert 0 < np.abs(np.asarray(down.dense()) - whole).max() < np.abs(whole).max() / 7


def test_a_plain_copy(tmp_path):
    """`dovetail convert` writes the weights unpacked, and a config that does not speak of quantisation."""
    weights = write(tmp_path / "m", "awq")
    convert(tmp_path / "m", tmp_path / "plain", dtype="f32")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    stored = load_file(tmp_path / "plain/model.safetensors")
    for name, want in weights.items():
        np.testing.assert_allclose(stored[name], want, rtol=1e-6)


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "fp8", "int4", "int4_asym"])
def test_a_quantised_model_is_written_as_compressed_tensors(scheme, tmp_path):
    """Loaded again, every array is the same; transformers with compressed-tensors computes the same logits."""
    cfg = parse_config(dict(LLAMA))
    save(tmp_path / "m", cfg, init(spec(cfg), jax.random.key(0), "float32"), None)
    model = load(tmp_path / "m", dtype="f32", quantization=scheme)
    model.save(tmp_path / "out")
    again = load(tmp_path / "out", dtype="f32")
    assert len(formats_of(again.params)) == 7
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params))
    if scheme == "int4_asym":
        return  # compressed-tensors 0.20 loads its own zero points only outside of transformers (a shape mismatch)
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor([[3, 4, 5]])).logits[0].numpy()
    np.testing.assert_allclose(model.logits([3, 4, 5]), want, atol=1e-4 if scheme != "w8a8" else 1e-2)


def test_formats_that_compressed_tensors_does_not_have_are_not_written(tmp_path):
    cfg = parse_config(dict(LLAMA))
    save(tmp_path / "m", cfg, init(spec(cfg), jax.random.key(0), "float32"), None)
    with refuses("quantization", UnsupportedError, naming="nf4"):
        load(tmp_path / "m", quantization="nf4").save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "changes", "what"),
    [
        ("gptq", {"quant_method": "hqq"}, "hqq"),
        ("gptq", {"bits": 3}, "3 bits"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("pack-quantized", {"format": "marlin-24"}, "marlin-24"),
        ("pack-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(layout, changes, what, tmp_path):
    write(tmp_path / "m", layout)
    amend(tmp_path / "m", quantization_config=LAYOUTS[layout][0] | changes)
    with refuses("quantization_config", UnsupportedError, naming=what):
        load(tmp_path / "m")


def test_groups_that_are_not_neighbours_are_refused(tmp_path):
    write(tmp_path / "m", "gptq")
    tensors = load_file(tmp_path / "m/model.safetensors")
    index = next(name for name in tensors if name.endswith("q_proj.g_idx"))
    save_file(tensors | {index: tensors[index][::-1].copy()}, tmp_path / "m/model.safetensors")
    with refuses("quantization_config", UnsupportedError, naming="desc_act"):
        load(tmp_path / "m")
    tensors.pop(index.replace("g_idx", "scales"))
    save_file(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(CheckpointError):
        load(tmp_path / "m")
