"""Configs of models that see images: published ones are read, and what would change the numbers is refused by name."""

import copy

import pytest
from refusals import refuses

from dovetail.core.compute import compute_of
from dovetail.core.errors import UnsupportedError
from dovetail.core.spec import num_params
from dovetail.io.load import summary
from dovetail.models.config import scored
from dovetail.models.registry import parse_config
from dovetail.models.spec import VISION, flops_per_token, spec

# as on the hub: fields that transformers has defaults for are left out, and others are there that nothing reads
SMOLVLM = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        "_flash_attn_2_enabled": True, "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 576,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "neftune_noise_alpha": 0.0, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 4,
        "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_theta": 100000,
        "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "idefics3_vision",
        "num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
    "vocab_size": 49280,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
GEMMA4 = {  # E2B
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"},
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_id": 258883,
    "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880, "video_token_id": 258884,
    "vision_soft_tokens_per_image": 280,
    "model_type": "gemma4",
    "text_config": {
        "head_dim": 256, "hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
        "max_position_embeddings": 131072, "model_type": "gemma4_text", "num_attention_heads": 8,
        "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "sliding_window": 512,
        "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "final_logit_softcapping": 30.0,
    },
    "vision_config": {
        "default_output_length": 280, "global_head_dim": 64, "head_dim": 64, "hidden_size": 768,
        "intermediate_size": 3072, "model_type": "gemma4_vision", "num_attention_heads": 12, "num_hidden_layers": 16,
        "num_key_value_heads": 12, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False,
        "use_clipped_linears": True,
    },
}  # fmt: skip
QWEN3_VL = {  # 2B
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655, "video_token_id": 151656, "vision_end_token_id": 151653,
    "vision_start_token_id": 151652, "model_type": "qwen3_vl", "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
        "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl", "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN2_5_VL = {  # 3B: the text model's fields are beside the tower's
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "model_type": "qwen2_5_vl", "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}  # fmt: skip
# config, parameters in millions, those of the tower, image tokens of an item, TFLOP of an item
PUBLISHED = {
    "smolvlm-256m": (SMOLVLM, 256, 93.5, 64, 0.21),
    "gemma3-4b": (GEMMA3, 4300, 420, 256, 5.5),
    "gemma4-e2b": (GEMMA4 | {"audio_config": None}, 4800, 170, 280, 1.1),
    "qwen2.5-vl-3b": (QWEN2_5_VL, 3755, 669, 16384, 174),
    "qwen3-vl-2b": (QWEN3_VL, 2130, 406, 16384, 479),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    hf, parameters, tower_parameters, tokens, cost = PUBLISHED[name]
    cfg = parse_config(copy.deepcopy(hf))
    assert cfg.to_hf() == hf and parse_config(cfg.to_hf()) == cfg
    assert num_params(spec(cfg)) / 1e6 == pytest.approx(parameters, rel=0.02)
    assert num_params(spec(cfg)[VISION]) / 1e6 == pytest.approx(tower_parameters, rel=0.01)
    tower = cfg.vision.tower
    assert tower.max_patches // tower.patches_per_feature == tokens
    assert tower.flops(tower.max_patches) / 1e12 == pytest.approx(cost, rel=0.05)


def test_the_tower_does_not_count_as_work_of_a_token():
    cfg = parse_config(SMOLVLM)
    text = parse_config({**SMOLVLM["text_config"], **_without_training_options()})
    assert flops_per_token(cfg) == flops_per_token(text)
    rows = dict(summary(cfg, compute_of("bf16").dtype, compute_of("bf16")))
    assert rows["vision tower"].startswith("93.5M")


def _without_training_options() -> dict:
    lineage = ("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor")
    return dict.fromkeys((*lineage, "qk_layer_norms", "use_resampler"))


REFUSED = {
    "another activation": (SMOLVLM, ["vision_config", "hidden_act"], "quick_gelu"),
    "a field of another tower": (SMOLVLM, ["vision_config", "spatial_merge_size"], 2),
    "grey pictures": (SMOLVLM, ["vision_config", "num_channels"], 1),
    "dropout": (GEMMA3, ["vision_config", "attention_dropout"], 0.1),
    "a pooling head": (GEMMA3, ["vision_config", "vision_use_head"], True),
    "another tower": (GEMMA3, ["vision_config", "model_type"], "clip_vision_model"),
    "an outer field": (GEMMA3, ["audio_config"], {"hidden_size": 8}),
    "squares that do not fit": (SMOLVLM, ["scale_factor"], 5),
    "tokens that are no square": (GEMMA3, ["mm_tokens_per_image"], 250),
    "norms of q and k": (SMOLVLM, ["text_config", "qk_layer_norms"], True),
    "blocked positions": (QWEN3_VL, ["text_config", "rope_scaling", "mrope_interleaved"], False),
    "too few frequencies": (QWEN2_5_VL, ["rope_scaling", "mrope_section"], [16, 24, 20]),
    "windows that divide features": (QWEN2_5_VL, ["vision_config", "window_size"], 100),
    "a field of the text": (QWEN2_5_VL, ["attention_multiplier"], 2.0),
    "features of another width": (QWEN3_VL, ["vision_config", "out_hidden_size"], 64),
    "heads that do not fit": (GEMMA3, ["vision_config", "num_attention_heads"], 7),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_numbers_is_refused(case):
    hf, path, value = REFUSED[case]
    changed = inner = copy.deepcopy(hf)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with refuses(path[-1], naming=path[-1]):
        parse_config(changed)


def test_a_flat_config_is_read_as_a_nested_one():
    outer = ("architectures", "model_type", "vision_config", "image_token_id", "tie_word_embeddings")
    text = {key: value for key, value in QWEN2_5_VL.items() if key not in outer} | {"model_type": "qwen2_5_vl_text"}
    nested = {key: QWEN2_5_VL[key] for key in outer} | {"text_config": text, "vocab_size": 151936}
    one, other = (parse_config(copy.deepcopy(hf)) for hf in (QWEN2_5_VL, nested))
    assert (one.layers, one.vision, one.eos_ids, one.tied) == (other.layers, other.vision, other.eos_ids, other.tied)


def test_a_tower_for_sound_is_left_out():
    assert parse_config(copy.deepcopy(GEMMA4)).to_hf() == GEMMA4 | {"audio_config": None}


def test_a_model_with_images_is_not_given_a_score():
    with pytest.raises(UnsupportedError, match="images"):
        scored(parse_config(SMOLVLM))
