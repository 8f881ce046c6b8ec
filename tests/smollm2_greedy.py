"""Prompts of mixed lengths for SmolLM2-135M-Instruct, and transformers' greedy continuations."""

from __future__ import annotations

from pathlib import Path

from dovetail.io.load import convert

TEXT = (
    "The lighthouse stood at the end of a long stone pier, and every evening the keeper climbed its stairs to light "
    "the lamp. He had done so for thirty years, through storms and through calm, and he knew each of the ships by the "
    "sound of its engine. One night, when the fog lay so thick that he could not see his own hands, he heard a sound "
    "that he did not know. def fibonacci(n: int) -> int: return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2). "
    "Photosynthesis is the process by which green plants turn light, water and carbon dioxide into sugar and oxygen. "
    "In 1969 the first people walked on the moon; they stayed for less than a day and brought back 21 kg of rock. "
)
NEW = 8


def mixed_prompts(tokenizer) -> list[list[int]]:
    """Return 16 prompts of 3 to 30 tokens, and one of 100, which is more than a chunk."""
    ids = tokenizer.encode(TEXT * 4)
    lengths = [100 - i // 8 if i % 16 == 5 else 3 + i * 17 % 28 for i in range(16)]
    return [ids[7 * i : 7 * i + length] for i, length in enumerate(lengths)]


def greedy_tokens(gguf: Path, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return NEW tokens of transformers for each prompt."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        convert(gguf, folder / "hf", dtype="f32"), dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    # Prompts of about the same length together, padded on the left: one by one they would take minutes.
    ordered = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[list[int]] = [[] for _ in prompts]
    for some in (ordered[:8], ordered[8:15], ordered[15:]):
        for i, tokens in zip(some, _generate(model, [prompts[i] for i in some]), strict=True):
            found[i] = tokens
    return found


def _generate(model, prompts: list[list[int]]) -> list[list[int]]:
    import torch

    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return out[:, most:].tolist()
