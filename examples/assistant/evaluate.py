"""Measure how often a model keeps the diary right: python -m examples.assistant.evaluate runs/assistant/after

The meals are not among those of training: half are described in words, half are shown in pictures. Answers are sampled
as the app samples them, at temperature 1; `--temperature 0` takes the most likely ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import dovetail as dt
from dovetail.tune.rl.turns import TurnParser
from examples.assistant.episode import Ask, record, success_rate

HELD_OUT = 500_000  # the first seed; those of training are smaller
MAX_TOKENS = 64


def asking(llm: dt.LLM, temperature: float) -> Ask:
    """Return a function that asks a model for the next message of many episodes at once."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    sampling = dt.SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=0)

    def ask(episodes, tools):
        parser = TurnParser(tokenizer, tokenizer.chat(tools).source)
        said = []
        for i, output in enumerate(llm.chat(episodes, sampling, tools)):
            before, tokens = (np.asarray(each) for each in (output.prompt_token_ids, output.outputs[0].token_ids))
            truncated = output.outputs[0].finish_reason == "length"
            said.append(parser.parse(before, tokens, tools, i, truncated).message)
        return said

    return ask


def evaluate(model: str | Path, meals: int = 200, temperature: float = 1.0) -> dict[str, float]:
    """Return the success rates of meals in words and of meals in pictures."""
    llm = dt.LLM(model, max_model_len=256, max_num_seqs=32, kv_cache_memory_bytes=2**26)
    ask, seeds = asking(llm, temperature), range(HELD_OUT, HELD_OUT + meals)
    return {
        kind: success_rate(ask, [record(seed, picture=kind == "pictures") for seed in seeds])
        for kind in ("words", "pictures")
    }


def main() -> None:
    """Print the success rates of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--meals", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    rates = evaluate(args.model, args.meals, args.temperature)
    print(", ".join(f"{rate:.0%} of the meals in {kind}" for kind, rate in rates.items()))


if __name__ == "__main__":
    main()
