"""SmolLM2-135M-Instruct compared with transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from corners import corners
from later import later

from dovetail.io.load import convert

gguf_utils = later("transformers.modeling_gguf_pytorch_utils")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimised")]  # 135 M parameters, twice

PROMPTS = {
    "one word": "Hello",
    "question": "What is the capital of France, and why did it become the capital?",
    "code": "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n",
    "other languages": "Größe zählt nicht; 東京は日本の首都です。 Où est la bibliothèque? 🙂",
    "long": " ".join(f"On day {i} the ship sailed {i * 7 % 31} miles towards the north." for i in range(1, 13)),
}
CHATS = [
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "List ten animals and say one thing about each.",
]
NEW = 32


@pytest.fixture(scope="module")
def exported(smollm2_gguf, tmp_path_factory):
    return convert(smollm2_gguf, tmp_path_factory.mktemp("smollm2") / "hf", dtype="f32")


@pytest.fixture(scope="module")
def theirs(exported):
    return transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("kind", corners(["code", "other languages", "long"], ["long"]))
def test_logits(kind, smollm2, theirs):
    ids = smollm2.tokenizer.encode(PROMPTS[kind])
    assert len(ids) > 150 or kind != "long"
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    ours = smollm2.logits(ids)
    assert ours.shape == expected.shape and ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, atol=2e-4, rtol=0)


def test_the_exported_tokenizer(smollm2, exported):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for text in PROMPTS.values():
        assert tokenizer.encode(text) == smollm2.tokenizer.encode(text)
    chat = [{"role": "user", "content": CHATS[0]}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        smollm2.tokenizer.apply_chat(chat, add_generation_prompt=True)
    )


@pytest.mark.parametrize("question", corners(CHATS, []))
def test_greedy_tokens(question, smollm2, theirs):
    chat = [{"role": "user", "content": question}]
    ids = smollm2.tokenizer.encode_chat(chat, add_generation_prompt=True)
    ours = list(smollm2.generate(ids, NEW))
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    expected = out[0, len(ids) :].tolist()
    if expected[-1] in smollm2.config.eos_ids:
        expected.pop()
    assert ours == expected
    assert len(ours) == NEW, "choose a question with a longer answer"


@pytest.mark.thorough  # tests/io/test_gguf.py holds the tensors to transformers' as well
def test_transformers_reads_the_same_tensors_from_the_gguf(smollm2_gguf, theirs):
    """What from_pretrained(gguf_file=...) calls; itself it wants accelerate, which nothing else here does."""
    direct = gguf_utils.load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=theirs)["tensors"]
    exported = theirs.state_dict()
    assert set(direct) >= set(exported) - {"lm_head.weight"}
    differing = [key for key in direct if not torch.equal(direct[key].float(), exported[key])]
    assert not differing
