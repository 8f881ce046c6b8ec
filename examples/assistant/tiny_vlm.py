"""Make a tiny vision-language model of SmolVLM's shape with random weights, small enough to train on a laptop's CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.spec import init
from dovetail.io.chat import ChatTemplate
from dovetail.io.load import save
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from examples.tiny import TEMPLATE, word_tokenizer

SIDE, PATCH, SQUARE = 48, 16, 1  # pixels of a picture and of a patch; patches of a feature, in each direction
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
# It has one task: its template does not write the system message, and what surrounds the arguments of calls and results
# is one token. Short prompts and calls train faster.
TINY_TEMPLATE = TEMPLATE.replace("for message in messages", "for message in messages if message.role != 'system'")
PHRASES = (
    "system\nTools: log_meal search_food day_summary delete_entry",
    '<tool_call>{"name": "log_meal", "arguments": {"food": "', '", "amount": ', "}}</tool_call>",
    '<tool_call>{"name": "search_food", "arguments": {"query": "', '"}}</tool_call>',
    '<tool_call>{"name": "day_summary", "arguments": {}}</tool_call>',
    '{"id": ', ', "food": "', '", "grams": ', ', "kcal": ', ', "protein_g": ', ', "carbohydrate_g": ', ', "fat_g": ',
    ', "portion_g": ', '{"name": "',
)  # fmt: skip
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": False, "do_resize": True, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
}  # fmt: skip


def tiny_vlm(folder: Path, chats: Sequence[Mapping[str, Any]], width: int = 64, layers: int = 2) -> str:
    """Write a model whose tokens are the words of these chats, and return its folder."""
    template = ChatTemplate(TINY_TEMPLATE)
    texts = [template.render(chat["messages"], chat.get("tools")) for chat in chats]
    tokenizer = word_tokenizer(texts, IMAGE_TOKENS, TINY_TEMPLATE, PHRASES)
    shape = dict(num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=4)
    text = shape | {
        "model_type": "llama", "num_key_value_heads": 4, "vocab_size": tokenizer.vocab_size, "eos_token_id": 0,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    cfg = parse_config(
        {
            "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "text_config": text,
            "vision_config": shape | {"image_size": SIDE, "patch_size": PATCH}, "scale_factor": SQUARE,
            "image_token_id": tokenizer.id("<image>"), "tie_word_embeddings": True,
        },
        "here",
    )  # fmt: skip
    save(folder, cfg, init(spec(cfg), jax.random.key(0), jnp.float32, 0.1), tokenizer)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    return str(folder)
