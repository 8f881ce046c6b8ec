"""A model small enough to learn from rewards on a laptop's CPU: two layers, and a vocabulary made of a task's words.

It begins with random weights. Examples teach it first how answers look, and then by rewards what is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

import dovetail as dt
from dovetail.core.spec import init
from dovetail.io.chat import ChatTemplate
from dovetail.io.load import save
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

# A chat as Qwen writes it, but for the tools, of which the names must do.
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}{%- for part in message.content or [] %}
        {{- '<image>' if part.type == 'image' else part.text }}
    {%- endfor %}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ["<|im_end|>", "<|im_start|>"]
WORDS = Regex(r" ?[A-Za-z_]+| ?[0-9]+|\n| ?[^\sA-Za-z0-9_]+| ")


def tiny_model(
    folder: Path, chats: Sequence[Mapping[str, Any]], width: int = 64, layers: int = 2, context: int = 512
) -> str:
    """Random weights, and a tokenizer whose tokens are the words of these chats; where they are saved."""
    template = ChatTemplate(TEMPLATE)
    tokenizer = word_tokenizer([template.render(chat["messages"], chat.get("tools")) for chat in chats])
    cfg = parse_config(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
            "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": context,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 0,
            "hidden_act": "silu",
        },
        "here",
    )  # fmt: skip
    save(folder, cfg, init(spec(cfg), jax.random.key(0), jnp.float32, 0.1), tokenizer)  # about 1 / sqrt(width)
    return str(folder)


def word_tokenizer(
    texts: Sequence[str], special: Sequence[str] = (), template: str = TEMPLATE, phrases: Sequence[str] = ()
) -> Tokenizer:
    """Return a tokenizer whose tokens are the words of these texts.

    Args:
        texts: The texts.
        special: Special tokens besides those of the chat template.
        template: The chat template.
        phrases: Further tokens, of several words each.
    """
    backend = Backend(models.BPE())
    cut = pre_tokenizers.Split(WORDS, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=1, special_tokens=[*SPECIAL, *special], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return Tokenizer(backend, eos=SPECIAL[0], chat_template=template)


def imitate(model: str, lessons: Sequence[Mapping[str, Any]], run_dir: Path, steps: int, length: int = 128) -> str:
    """The model after some steps on chats, which it then writes alike; where it was saved."""
    taught = dt.sft(
        model=model, data=lessons, steps=steps, batch=8, length=length, packing=True, optimizer={"lr": 5e-3},
        run_dir=run_dir, precision={"compute": "f32"}, schedule={"name": "constant"}, checkpoint={"export_hf": steps},
    )  # fmt: skip
    return str(taught.folder / f"export/step_{steps}")


def first_and_last(run_dir: Path) -> tuple[float, float]:
    """The mean reward of the first eighth of a run's steps, and of the last."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    few = max(1, len(rewards) // 8)
    return sum(rewards[:few]) / few, sum(rewards[-few:]) / few
