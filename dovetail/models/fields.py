"""Reading a Hugging Face config.json so that no field is silently ignored.

A family reads the fields it honours through `Fields`; `done` refuses what is left over, unless it is known not to
change the numbers.
"""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import UserError

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
    """A config.json being read: remembers what was asked for."""

    def __init__(self, hf: dict[str, Any], where: str):
        self.hf, self.where = hf, where
        self._read: set[str] = set()

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The field, or the default when it is absent or null."""
        self._read.add(key)
        value = self.hf.get(key)
        if value is not None:
            self._check_kind(key, value, default)
            return value
        if default is _REQUIRED:
            raise UserError(f"{self.where}: the field '{key}' is missing")
        return default

    def _check_kind(self, key: str, value: Any, default: Any) -> None:
        """What must be given is a number; what has a default is of its kind, where that is a number or a dict."""
        wanted = (int, float) if default is _REQUIRED or isinstance(default, (bool, int, float)) else ()
        wanted = (dict,) if isinstance(default, dict) else wanted
        if wanted and not isinstance(value, wanted):
            raise UserError(f"{self.where}: {key}={value!r} should be a {'dict' if dict in wanted else 'number'}")

    def nullable(self, key: str, default: Any) -> Any:
        """A field whose null means 'off' and whose absence means the default."""
        return self.get(key, None if key in self.hf else default)

    def only(self, key: str, *supported: Any) -> None:
        """A field of which only some values are supported; absent means the first of them."""
        value = self.get(key, supported[0])
        if value not in supported:
            wanted = " or ".join(repr(s) for s in supported)
            raise UserError(f"{self.where}: {key}={value!r} is not supported (only {wanted})")

    def skip(self, *keys: str) -> None:
        """Fields that repeat what others say."""
        self._read.update(keys)

    def done(self) -> None:
        left = [k for k, v in self.hf.items() if k not in self._read and k not in HARMLESS and v is not None]
        if left:
            listed = ", ".join(f"{k}={str(self.hf[k])[:60]}" for k in sorted(left))
            raise UserError(
                f"{self.where}: not supported: {listed}. Such a field may change the model's numbers, so it is not "
                "ignored; remove it from config.json if you know that it does not"
            )
