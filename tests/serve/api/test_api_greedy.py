"""Greedy answers of SmolLM2 over HTTP equal transformers' tokens."""

import pytest
from later import later
from smollm2_greedy import NEW, greedy_tokens, mixed_prompts

openai = later("openai")

pytestmark = pytest.mark.slow


def test_16_prompts_together(whole_model, tokenizer, smollm2_gguf, tmp_path):
    """More prompts than the engine's 4 sequences, and one longer than its 32 tokens per step."""
    prompts = mixed_prompts(tokenizer)
    assert min(map(len, prompts)) == 3 and max(map(len, prompts)) == 100
    with openai.OpenAI(base_url=f"{whole_model.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="smollm2", prompt=prompts, max_tokens=NEW, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
    found = [choice.token_ids for choice in answer.choices]
    assert found == greedy_tokens(smollm2_gguf, tmp_path, prompts)
