"""Define what a family consists of: a parser of its config.json, its tensor names, and helpers of parsers.

No field of a config.json is ignored silently: a family reads the fields that it honours through `Fields`, and `done`
refuses the rest, unless a field is known not to change the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.core.errors import UserError
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.towers.vision import Vision
from dovetail.ops.glu import Glu
from dovetail.ops.rope import Rope, longrope_magnitude, yarn_magnitude


@dataclass(frozen=True)
class Family:
    """Describe a family of models.

    Attributes:
        names: Its differences from the tensor names in models.spec. Projections of one input (q, k and v; gate and up)
            with
            the same name lie one after another in that tensor.
        experts: How checkpoints keep experts: 'each' in its own tensors, 'stacked' with gate above up, or 'interleaved'
            (stacked, [in, out], gate and up alternating).
        unused: A pattern of tensors in published checkpoints that the text model does not need.
    """

    model_types: tuple[str, ...]
    architecture: str  # the transformers class that an exported folder names
    parse: Callable[[Fields], ModelConfig]
    names: Mapping[str, str] = field(default_factory=dict)
    experts: str = "each"
    unused: tuple[str, ...] = ()


def _accept(f: Fields) -> None:
    """Read nothing."""


@dataclass(frozen=True)
class VisionFamily:
    """Describe a family of models that see images: a text model of `Family` with a tower (models.towers).

    Attributes:
        model_types: The outer `model_type`s of its configs.
        architecture: The transformers class that an exported folder names.
        parse: Called with the fields of the config, those of its `vision_config`, and the text model.
        text_prefix: What replaces `model.` in the stored names of the text model's tensors.
        aliases: (pattern, replacement) of other names that published checkpoints have for the tower's tensors.
        as_text: Maps a `text_config` to the config of a text model that a `Family` reads.
        read_text: Reads the fields of `text_config` that the text model's own family does not know.
        dropped: Fields that describe other towers, whose weights are not read: null in an exported folder.
        unused: A pattern of tensors in published checkpoints that the model does not need.
        flat: Whether the fields of the text model are beside `vision_config` in configs without `text_config`.
    """

    model_types: tuple[str, ...]
    architecture: str
    parse: Callable[[Fields, Fields, ModelConfig], Vision]
    text_prefix: str
    aliases: tuple[tuple[str, str], ...] = ()
    as_text: Callable[[dict[str, Any]], dict[str, Any]] = dict
    read_text: Callable[[Fields], None] = _accept
    dropped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    flat: bool = False


def finish(f: Fields, layers: list[Layer], eos: Any = (), dropout: bool = False, **more: Any) -> ModelConfig:
    """Read the fields that all families share, check that no field was left unread, and return the model.

    Args:
        f: The fields.
        layers: The layers.
        eos: The tokens that end an answer if the config names none.
        dropout: Whether published configs have attention dropout, which only training would use and ours does not.
        more: Further fields of ModelConfig.
    """
    eos = f.get("eos_token_id", eos)
    config = ModelConfig(
        family=f.hf["model_type"],
        vocab=f.get("vocab_size"),
        dim=f.get("hidden_size"),
        layers=tuple(layers),
        max_len=f.get("max_position_embeddings"),
        norm_eps=f.get("rms_norm_eps", 1e-6),
        tied=f.get("tie_word_embeddings", False),
        bos_id=f.get("bos_token_id", None),
        eos_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        source=json.dumps(f.hf, sort_keys=True),
    )
    if not dropout:
        f.only("attention_dropout", 0.0)
    f.skip("attention_dropout", "num_hidden_layers")
    f.skip("num_nextn_predict_layers", "mtp_num_hidden_layers")  # read by models.mtp
    f.done()
    return replace(config, **more)


def read_glu(f: Fields, key: str = "hidden_act", default: str = "silu") -> Glu:
    """Return the activation of gated units."""
    kinds = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    name = f.get(key, default)
    if name not in kinds:
        raise UserError(f"{f.where}: {key}={name!r} is not supported (only {', '.join(kinds)})", param=key)
    return Glu(kinds[name])


def read_heads(f: Fields, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """Return heads, key heads and head dim.

    The arguments are the family's defaults if they do not follow from other fields.
    """
    heads = f.get("num_attention_heads")
    dim = f.get("head_dim", head_dim) or f.get("hidden_size") // heads
    return dict(heads=heads, kv_heads=f.get("num_key_value_heads", kv_heads or heads), head_dim=dim)


def read_windows(f: Fields, default_types: list[str]) -> list[int | None]:
    """Return the sliding window of each layer, from layer_types or the family's own pattern."""
    types = f.get("layer_types", default_types)
    n, window = f.get("num_hidden_layers"), f.get("sliding_window", None)
    known = {"full_attention", "sliding_attention"}
    if len(types) != n or not set(types) <= known:
        raise UserError(f"{f.where}: layer_types must be {n} of {sorted(known)}; got {types}", param="layer_types")
    if "sliding_attention" in types and not window:
        raise UserError(
            f"{f.where}: layer_types has sliding_attention but sliding_window is not set", param="sliding_window"
        )
    return [window if t == "sliding_attention" else None for t in types]


ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
        "mscale", "mscale_all_dim",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}  # fmt: skip
OPTIONAL_FACTOR = ("proportional", "longrope")


def rope_dict(f: Fields, theta: float, layer_type: str | None = None) -> dict[str, Any]:
    """Return the rope parameters of `rope_parameters` (flat or per layer type), or `rope_theta` and `rope_scaling`."""
    found = dict(f.get("rope_scaling", {}) or f.get("rope_parameters", {}))
    if layer_type and layer_type in found:
        found = dict(found[layer_type])
    found.setdefault("rope_theta", f.get("rope_theta", theta))
    found.setdefault("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    return found


def read_rope(
    f: Fields, dim: int, params: dict[str, Any], interleaved: bool = False, partial: float | None = None
) -> Rope:
    """Return a Rope for heads of `dim` dims from such a dict; refuse an unsupported kind or key by name.

    `partial` is the share of a head that is rotated if the config does not say; None for a family that rotates all of
    it.
    """
    p = {k: v for k, v in params.items() if v is not None}
    kind, theta = p.pop("rope_type"), p.pop("rope_theta")
    if kind not in ROPE_KEYS:
        raise UserError(
            f"{f.where}: rope type {kind!r} is not supported (only {', '.join(ROPE_KEYS)})", param="rope_parameters"
        )
    share = p.pop("partial_rotary_factor", 1.0 if partial is None else f.get("partial_rotary_factor", partial))
    unknown = set(p) - ROPE_KEYS[kind] - {"original_max_position_embeddings"}
    if unknown or (share != 1.0 and kind != "proportional" and partial is None):
        what = ", ".join(sorted(unknown)) or f"partial_rotary_factor={share}"
        raise UserError(f"{f.where}: rope type {kind!r} does not support {what}", param="rope_parameters")
    if "factor" in ROPE_KEYS[kind] and kind not in OPTIONAL_FACTOR and "factor" not in p:
        raise UserError(f"{f.where}: rope type {kind!r} needs a 'factor'", param="rope_parameters")
    if kind != "proportional":  # whose table has all dims, some of which stand still
        dim, share = int(dim * share), 1.0
    factor = p.get("factor", 1.0)
    rope = Rope(
        theta=theta, dim=dim, kind=kind, factor=factor, share=share, interleaved=interleaved,
        original_len=p.get("original_max_position_embeddings", f.get("max_position_embeddings")),
        low_freq=p.get("low_freq_factor", 1.0), high_freq=p.get("high_freq_factor", 4.0),
        beta_fast=p.get("beta_fast", 32.0), beta_slow=p.get("beta_slow", 1.0), truncate=p.get("truncate", True),
        magnitude=_magnitude(p, factor) if kind == "yarn" else 1.0,
    )  # fmt: skip
    return _longrope(f, rope, p) if kind == "longrope" else rope


def _magnitude(p: dict[str, Any], factor: float) -> float:
    if "attention_factor" in p:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_magnitude(factor, p["mscale"]) / yarn_magnitude(factor, p["mscale_all_dim"])
    return yarn_magnitude(factor)


def _longrope(f: Fields, rope: Rope, p: dict[str, Any]) -> Rope:
    """Return the rope with LongRoPE's factors: the long ones if the model's context is longer than the original."""
    for key in ("short_factor", "long_factor"):
        if not isinstance(p.get(key), list) or len(p[key]) != rope.dim // 2:
            given = f"{len(p[key])}" if isinstance(p.get(key), list) else p.get(key)
            raise UserError(
                f"{f.where}: rope type 'longrope' needs {rope.dim // 2} numbers as {key!r}; got {given}",
                param="rope_parameters",
            )
    length = f.get("max_position_embeddings")
    original = f.get("original_max_position_embeddings", rope.original_len)  # beside the dict it has the last word
    magnitude = p.get("attention_factor") or longrope_magnitude(p.get("factor", length / original), original)
    return replace(
        rope, original_len=original, magnitude=magnitude, short_factors=tuple(p["short_factor"]),
        long_factors=tuple(p["long_factor"]), is_long=length > original,
    )  # fmt: skip


_REQUIRED = object()

# Bookkeeping, defaults of generation, switches of transformers' own code path, training-only losses: none of them
# changes what `forward` computes.
HARMLESS = frozenset(
    """
architectures model_type transformers_version dtype torch_dtype _name_or_path name_or_path auto_map use_cache
bos_token_id eos_token_id pad_token_id decoder_start_token_id sep_token_id unk_token_id initializer_range
pretraining_tp output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux output_attentions output_hidden_states
return_dict return_dict_in_generate is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size
tie_encoder_decoder torchscript use_bfloat16 pruned_heads chunk_size_feed_forward finetuning_task id2label label2id
num_labels problem_type task_specific_params tokenizer_class prefix temperature top_k top_p typical_p
repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_beams
num_beam_groups diversity_penalty num_return_sequences do_sample early_stopping max_length min_length
forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
remove_invalid_values output_scores tf_legacy_loss attn_implementation _attn_implementation
_attn_implementation_autoset transformers.js_config unsloth_fixed unsloth_version is_llama_config cache_implementation
_sliding_window_pattern ep_size initial_context_length num_mtp_layers
""".split()
)


class Fields:
    """Read a config.json and record which fields were read."""

    def __init__(self, hf: dict[str, Any], where: str):
        self.hf, self.where = hf, where
        self._read: set[str] = set()

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the field, or the default if it is absent or null."""
        self._read.add(key)
        value = self.hf.get(key)
        if value is not None:
            self._check_kind(key, value, default)
            return value
        if default is _REQUIRED:
            raise UserError(f"{self.where}: the field '{key}' is missing", param=key)
        return default

    def _check_kind(self, key: str, value: Any, default: Any) -> None:
        """Refuse a value that is not a number if it is required, or not of its default's kind (a number or a dict)."""
        wanted = (int, float) if default is _REQUIRED or isinstance(default, (bool, int, float)) else ()
        wanted = (dict,) if isinstance(default, dict) else wanted
        if wanted and not isinstance(value, wanted):
            kind = "dict" if dict in wanted else "number"
            raise UserError(f"{self.where}: {key}={value!r} should be a {kind}", param=key)

    def nullable(self, key: str, default: Any) -> Any:
        """Return a field whose null means 'off' and whose absence means the default."""
        return self.get(key, None if key in self.hf else default)

    def only(self, key: str, *supported: Any) -> None:
        """Refuse unsupported values of a field; absent means the first supported one."""
        value = self.get(key, supported[0])
        if value not in supported:
            wanted = " or ".join(repr(s) for s in supported)
            raise UserError(f"{self.where}: {key}={value!r} is not supported (only {wanted})", param=key)

    def skip(self, *keys: str) -> None:
        """Mark fields as read that repeat others."""
        self._read.update(keys)

    def done(self) -> None:
        """Refuse fields that were not read."""
        left = [k for k, v in self.hf.items() if k not in self._read and k not in HARMLESS and v is not None]
        if left:
            listed = ", ".join(f"{k}={str(self.hf[k])[:60]}" for k in sorted(left))
            raise UserError(
                f"{self.where}: not supported: {listed}. Such a field may change the model's numbers, so it is not "
                "ignored; remove it if you know that it does not",
                param=min(left),
            )
