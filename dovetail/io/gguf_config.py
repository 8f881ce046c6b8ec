"""Turn a `.gguf` file's metadata into the dict that Hugging Face keeps in `config.json`.

Numbers that llama.cpp has in its source instead of the file (gemma's layer pattern, SmolLM3's layers without rotary
positions) are written here. A setting that a family's config cannot express is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.core.errors import CheckpointError
from dovetail.io.gguf_file import GgufFile
from dovetail.io.gguf_tokenizer import special_ids

# GGUF architecture -> (model_type, class name); "llama" with experts is Mixtral.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
}
_MIXTRAL = ("mixtral", "MixtralForCausalLM")
# They change what the model computes, and only the families named have a place for them.
_RESERVED = {
    "attention.clamp_kqv": (),
    "attention.scale": ("gemma2", "gemma3_text", "granite"),
    "attn_logit_softcapping": ("gemma2", "gemma3_text"),
    "embedding_scale": ("granite",),
    "expert_shared_count": (),
    "final_logit_softcapping": ("gemma2", "gemma3_text"),
    "logit_scale": ("granite",),
    "residual_scale": ("granite",),
    "rope.dimension_sections": (),
}
# The largest models of these families scale queries by the width of a head's share of the model, not by head_dim;
# llama.cpp knows them by their depth.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Keys:
    """Look up the metadata of one architecture by the part of the key after its name."""

    def __init__(self, file: GgufFile, arch: str):
        self.file, self.arch = file, arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            raise CheckpointError(
                f"{self.file.path}: {self.arch}.{key} differs between layers, which is not supported."
            )
        return value

    def need(self, key: str, default: float | None = None, kind: type = int) -> Any:
        value = self.get(key, default)
        if not isinstance(value, kind) or value <= 0:
            raise CheckpointError(
                f"{self.file.path}: a positive {kind.__name__} was expected as {self.arch}.{key}, and {value!r} came; "
                f"convert the model again."
            )
        return value


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Return the config of the file in Hugging Face's format."""
    arch, model_type, class_name = _family(file)
    keys = _Keys(file, arch)
    _refuse_reserved(keys, model_type)
    config = {"model_type": model_type, "architectures": [class_name], **_common(keys)}
    config |= _rope(keys, config)
    config |= _biases(file, model_type)
    config |= special_ids(file.metadata)
    return config | (_EXTRAS[model_type](keys, config) if model_type in _EXTRAS else {})


def _family(file: GgufFile) -> tuple[str, str, str]:
    arch = file.metadata.get("general.architecture")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path} holds a GGUF of type {kind!r}; a whole model was expected.")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise CheckpointError(
            f"{file.path} is of architecture {arch!r}, which is not supported; these are: {', '.join(FAMILIES)}."
        )
    if arch == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        raise CheckpointError(
            f"{file.path} is OLMo 3 (olmo2 with a sliding window), which is not supported; OLMo 2 is."
        )
    mixtral = arch == "llama" and file.metadata.get("llama.expert_count")
    model_type, class_name = _MIXTRAL if mixtral else FAMILIES[arch]
    return arch, model_type, class_name


def _refuse_reserved(keys: _Keys, model_type: str) -> None:
    for key, families in _RESERVED.items():
        if model_type not in families and keys.file.metadata.get(f"{keys.arch}.{key}"):
            raise CheckpointError(
                f"{keys.file.path} sets {keys.arch}.{key}, which a {model_type} model has no place for."
            )


def _common(keys: _Keys) -> dict[str, Any]:
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{keys.file.path} has no tensor 'token_embd.weight'; it is not a whole language model.")
    layers = keys.need("block_count")
    if layers > len(keys.file.tensors):  # a damaged number would have us list billions of names
        raise CheckpointError(f"{keys.file.path} claims {layers} layers and has {len(keys.file.tensors)} tensors.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.need("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon", kind=float),
        "max_position_embeddings": keys.need("context_length"),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
    }


def _head_dim(keys: _Keys, default: int) -> int:
    size = keys.need("attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = keys.get(key, size)
        if other != size:
            raise CheckpointError(
                f"{keys.file.path}: {keys.arch}.{key} is {other} and a head has {size} dimensions; they must be equal."
            )
    return size


def _biases(file: GgufFile, model_type: str) -> dict[str, Any]:
    if model_type == "qwen2":  # always has them on q, k and v: its config has no such key
        return {}
    biases = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if model_type in ("llama", "smollm3", "granite"):
        biases["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return biases


# --- rotary positions ---


def _rope(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    theta = keys.need("rope.freq_base", 10000.0, kind=float)
    scaling = _scaling_from_keys(keys)
    if "rope_freqs.weight" in keys.file.tensors:
        if scaling:
            raise CheckpointError(
                f"{keys.file.path} has both rope_freqs.weight and {scaling['rope_type']} rope scaling."
            )
        scaling = _scaling_from_factors(keys.file, theta, config["head_dim"])
    return {"rope_theta": theta, "rope_scaling": scaling}


def _scaling_from_keys(keys: _Keys) -> dict[str, Any] | None:
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or keys.get("rope.scaling.yarn_log_multiplier"):
        raise CheckpointError(
            f"{keys.file.path}: rope scaling {kind!r} (with its settings) is not supported; linear and plain yarn are."
        )
    optional = {
        "attention_factor": keys.get("rope.scaling.yarn_attn_factor", keys.get("rope.scaling.attn_factor")),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
        **{key: value for key, value in optional.items() if value is not None},
    }


def _scaling_from_factors(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the settings of Llama 3's scaling, of which GGUF has only the resulting divisor of each frequency."""
    stored = file.raw("rope_freqs.weight").view(np.float32)
    factor = round(float(stored.max(initial=1.0)), 4)
    if stored.shape != (head_dim // 2,) or not np.allclose(stored, _llama3_factors(theta, head_dim, factor), rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight is not Llama 3's scaling (low 1, high 4, original context 8192), the only "
            f"one supported; its largest factor is {factor}."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE} if factor != 1.0 else None


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return 1 for short wavelengths, `factor` for long ones, and an interpolation between them (in 1 / factor)."""
    low, high, context = (_LLAMA3_ROPE[key] for key in _LLAMA3_ROPE)
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / factor + share)


# --- what a family adds ---


def _mixtral(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "sliding_window": None,
    }


def _qwen3_moe(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp always divides by the sum of the chosen experts' weights
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(keys: _Keys, config: dict[str, Any], every: int, window: int | None) -> dict[str, Any]:
    """Add Gemma's layer pattern: every `every`-th layer is global, the others attend to the last `window` positions."""
    layers = config["num_hidden_layers"]
    scalar = config["head_dim"]
    if keys.get("attention.scale"):
        scalar = round(keys.get("attention.scale") ** -2, 2)
    elif layers == _GEMMA_27B_LAYERS[config["model_type"]]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    window = keys.get("attention.sliding_window", window)
    pattern = keys.get("attention.sliding_window_pattern", every)
    slides = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and each else "full_attention" for each in slides],
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gemma2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(keys, config, every=2, window=4096) | {
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    gemma = _gemma(keys, config, every=6, window=None)
    return gemma | {"sliding_window_pattern": 6, "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0)}


def _smollm3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    every, layers = 4, range(config["num_hidden_layers"])
    return {
        "no_rope_layer_interval": every,
        "no_rope_layers": [int((layer + 1) % every != 0) for layer in layers],  # 1 has rotary positions, 0 has none
        "use_sliding_window": False,
    }


def _granite(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    scales = {
        "attention_multiplier": keys.get("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.get("embedding_scale") or 1.0,
        "residual_multiplier": keys.get("residual_scale") or 1.0,
        "logits_scaling": keys.get("logit_scale") or 1.0,  # a divisor in both
    }
    return {key: float(str(np.float32(value))) for key, value in scales.items()}  # 0.22, not its f32's digits


_EXTRAS = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "smollm3": _smollm3,
    "granite": _granite,
}
