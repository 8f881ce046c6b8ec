"""Share helpers for fine-tuning tests: a small model with its tokenizer, and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from data.conftest import small_tokenizer

from dovetail.core.spec import init
from dovetail.io.load import save
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "eos_token_id": 1, "hidden_act": "silu",
}  # fmt: skip
RUN: dict[str, Any] = dict(
    batch=8, length=48, show=False, optimizer={"lr": 1e-2}, precision={"compute": "f32"}, schedule={"name": "constant"},
)  # fmt: skip
LORA = {"r": 8, "lora_alpha": 16.0}


def model_folder(place: Path, seed: int = 0, **changes: Any) -> str:
    """Random weights, as large as those of trained models: adapters on weights of 0.02 would have nothing to turn."""
    folder = place / f"model-{seed}"
    if not folder.exists():
        cfg = parse_config(CONFIG | changes, "here")
        save(folder, cfg, init(spec(cfg), jax.random.key(seed), jnp.float32, 0.1), small_tokenizer())
    return str(folder)


def chats(count: int = 24) -> list[dict[str, Any]]:
    """The answer to a number is the same number in brackets."""
    return [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"<{i}>"}]}
        for i in range(count)
    ]


def pairs(count: int = 24) -> list[dict[str, Any]]:
    return [{"prompt": f"say {i}", "chosen": f" <{i}>", "rejected": f" no {i}"} for i in range(count)]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Without what the clock decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "seconds", "tokens_per_second", "goodput", "memory", "mfu_causal", "mfu_full")
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]
