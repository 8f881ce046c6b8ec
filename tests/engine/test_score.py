"""Reward models: loading, scores equal to transformers', export, and refusal to generate."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from data.conftest import small_tokenizer
from engine.engines import OPTIONS
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import RequestError
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.io.load import convert, load, save
from dovetail.models.registry import parse_config

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [11, 9, 30, 44, 12, 3, 8, 100, 101, 4, 31, 32, 33, 34, 35, 36, 37], [7]]
CHAT = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "a fox"}]
SMALL = dict(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


def judge(folder: Path, config: str = "LlamaConfig", **changes):
    """(transformers' model for sequence classification with one label, the folder it is in)."""
    torch.manual_seed(0)
    kind = getattr(transformers, config)(**SMALL | {"num_labels": 1} | changes)
    model = transformers.AutoModelForSequenceClassification.from_config(kind).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return model


def theirs(model, prompts=PROMPTS) -> list[float]:
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits.item() for prompt in prompts]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a reward model with a tokenizer, and the model of transformers."""
    folder = tmp_path_factory.mktemp("judge")
    found = judge(folder)
    small_tokenizer().save(folder)
    return folder, found


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model[0], **OPTIONS | {"max_model_len": 128})


def test_scores_are_those_of_transformers(model, llm):
    scores = llm.score(PROMPTS)
    assert scores.dtype == np.float32 and scores.shape == (3,)
    np.testing.assert_allclose(scores, theirs(model[1]), atol=1e-4)
    np.testing.assert_allclose(llm.score(PROMPTS[0]), scores[:1], atol=1e-6)  # one prompt
    assert llm.score([]).shape == (0,)


@pytest.mark.parametrize(
    "config, changes",
    [
        ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
        pytest.param("Gemma2Config", dict(head_dim=16), marks=pytest.mark.thorough),
        pytest.param("Qwen2Config", dict(), marks=pytest.mark.thorough),
    ],
)
def test_other_families(config, changes, tmp_path):
    want = theirs(judge(tmp_path, config, **changes))
    np.testing.assert_allclose(LLM(tmp_path, **OPTIONS | {"max_model_len": 128}).score(PROMPTS), want, atol=1e-4)


def test_texts_and_conversations(model, llm):
    tokenizer = small_tokenizer()
    texts = ["a fox", "a dog [b]"]
    np.testing.assert_allclose(llm.score(texts), theirs(model[1], [tokenizer.encode(t) for t in texts]), atol=1e-4)
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    want = theirs(model[1], [ids])[0]
    np.testing.assert_allclose(llm.score(CHAT), [want], atol=1e-4)
    np.testing.assert_allclose(llm.score([CHAT, CHAT]), [want, want], atol=1e-4)
    with refuses(None, RequestError, naming="conversations"):
        llm.score("a fox", enable_thinking=False)


def test_a_reward_model_refuses_to_generate(llm):
    with refuses(None, RequestError, naming="LLM.score"):
        llm.generate(PROMPTS[:1])
    with refuses(None, RequestError):
        llm.chat(CHAT)
    assert llm.embed(PROMPTS[:1]).shape == (1, 32)
    with refuses("prompt", RequestError, naming="1000"):
        llm.score([[3], [1000]])


def test_score_requires_a_reward_model():
    with refuses(None, RequestError, naming="dovetail reward"):
        LLM(reference("llama3.1")[1], **OPTIONS).score(PROMPTS)


def test_weights_in_memory_and_new_ones(model, llm):
    loaded = load(model[0])
    with refuses(naming="LLM.score"):
        loaded.logits(PROMPTS[0])
    other = LLM.from_weights(loaded.config, loaded.params, EngineOptions(**OPTIONS | {"max_model_len": 128}))
    np.testing.assert_allclose(other.score(PROMPTS), llm.score(PROMPTS), atol=1e-6)
    other.update_weights({**loaded.params, "score": 2 * loaded.params["score"]})
    np.testing.assert_allclose(other.score(PROMPTS), 2 * llm.score(PROMPTS), atol=1e-5)


def test_a_reward_model_is_saved_to_a_folder(model, tmp_path):
    """Also where the padding is the end of text: transformers would take a text's own end for padding."""
    convert(model[0], tmp_path / "again")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").eval()
    np.testing.assert_allclose(theirs(again), theirs(model[1]), atol=1e-6)
    loaded = load(model[0])
    said = loaded.config.to_hf() | {"pad_token_id": 1}
    save(tmp_path / "padded", parse_config(said), jax.device_get(loaded.params), None)
    padded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "padded").eval()
    np.testing.assert_allclose(theirs(padded, [[5, 6, 1]]), theirs(model[1], [[5, 6, 1]]), atol=1e-6)


def test_several_labels_are_refused(tmp_path):
    judge(tmp_path, num_labels=3)
    with refuses(naming="3 labels"):
        load(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["id2label"], said["label2id"]
    with refuses(naming="2 labels"):
        parse_config(said)
