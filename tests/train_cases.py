"""Tiny recipes, batches and models that the tests of training share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.training import Precision, Schedule
from dovetail.core.types import Batch
from dovetail.data.settings import Data, Source
from dovetail.train.settings import Pretrain

SHAPE = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
LATENT = dict(
    q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, moe_intermediate_size=16,
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
)  # fmt: skip
# config.json files, each the smallest that has what its name says
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": SHAPE | dict(model_type="llama", num_hidden_layers=2),
    "deep": SHAPE | dict(model_type="llama", num_hidden_layers=4),
    "moe": SHAPE | EXPERTS | dict(model_type="qwen3_moe", num_hidden_layers=2),
    # a local layer and a global one, twice over, and one left
    "local": SHAPE | dict(
        model_type="gemma3_text", num_hidden_layers=5, sliding_window=5, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    ),
    # a dense layer and then experts, chosen with a bias
    "latent": SHAPE | LATENT | dict(model_type="deepseek_v3", num_hidden_layers=3),
}  # fmt: skip


def write_model(folder: Path, name: str, **changes: Any) -> str:
    """A folder that a recipe's `model` may name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return str(folder)


def recipe(model: str = "a test", **changes: Any) -> Pretrain:
    """f32 throughout and a constant rate, unless it is said otherwise."""
    given: dict[str, Any] = dict(
        model=model, data=Data((Source("nowhere"),)), batch=8, length=24, steps=100,
        precision=Precision(compute="f32"), schedule=Schedule("constant"), remat="none", scan=False,
    )  # fmt: skip
    return Pretrain(**(given | changes))


def alone() -> Placement:
    """One device."""
    return Placement(make_mesh({}, jax.devices()[:1]), TRAIN)


def packed(rows: Sequence[Sequence[Sequence[int]]], length: int) -> Batch:
    """Rows of documents laid end to end; a document's last token has no target."""
    shape = (len(rows), length)
    tokens, targets, positions, segments = (np.zeros(shape, np.int32) for _ in range(4))
    mask = np.zeros(shape, np.float32)
    for row, documents in enumerate(rows):
        at = 0
        for number, document in enumerate(documents, start=1):
            here, count = slice(at, at + len(document)), len(document)
            tokens[row, here], targets[row, here] = document, [*document[1:], 0]
            positions[row, here], segments[row, here] = np.arange(count), number
            mask[row, at : at + count - 1] = 1.0
            at += count
    found: Any = (tokens, targets, positions, segments, mask)  # as the loader gives them, numpy's
    return Batch(*found)


def some_batch(seed: int, rows: int = 8, length: int = 24, vocab: int = 96) -> Batch:
    """Documents of random length that count upwards from a random word: what follows can be learnt."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(rows):
        documents, left = [], length - int(rng.integers(0, 4))
        while left > 1:
            count = min(left, int(rng.integers(2, 15)))
            documents.append(((rng.integers(0, vocab) + np.arange(count)) % vocab).tolist())
            left -= count
        found.append(documents)
    return packed(found, length)
