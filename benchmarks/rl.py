"""Seconds of a step of reinforcement learning, split into rollout, rewards, training and handing over the weights.

    python benchmarks/rl.py DIR [key=value ...]

DIR: a model's folder, or one with config.json and tokenizer files alone: then its weights are random. By default 8
prompts x 64 answers of 256 tokens and one update per step; the answers do not end before. The rollout is held against
the engine alone, which samples the same once more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from dovetail.core.overrides import parsed, split

STEPS, WARM = 12, 4  # steps in all, and those before what is counted
RECIPE = {
    "algo": "grpo", "prompts": 8, "num_generations": 64, "max_prompt_length": 64, "max_completion_length": 256,
    "steps": STEPS, "show_every": 0, "checkpoint": {"every": 0}, "optimizer": {"lr": 1e-6},
}  # fmt: skip


def even(prompts, completions, completion_ids, **columns):
    """The share of even tokens: something to learn for weights of any kind."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def with_weights(folder: Path, place: Path) -> str:
    """The folder, or a copy of it with random weights."""
    import jax
    import jax.numpy as jnp

    from dovetail.core.spec import init
    from dovetail.io.load import save
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.models.registry import read_config
    from dovetail.models.spec import spec

    if list(folder.glob("*.safetensors")):
        return str(folder)
    cfg = read_config(folder)
    save(place, cfg, init(spec(cfg), jax.random.key(0), jnp.bfloat16), Tokenizer.from_folder(folder))
    return str(place)


def offline(model: str, recipe: dict) -> float:
    """Seconds of the same rollout by an engine that has the device for itself."""
    from dovetail import LLM, SamplingParams

    llm = LLM(model, max_model_len=recipe["max_prompt_length"] + recipe["max_completion_length"] + 1, max_num_seqs=512)
    prompts = [f"Tell me about the number {i}." for i in range(recipe["prompts"])]
    params = SamplingParams(
        n=recipe["num_generations"], max_tokens=recipe["max_completion_length"], logprobs=0, ignore_eos=True
    )
    took = []
    for _ in range(6):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        took.append(time.perf_counter() - start)
    llm.sleep(2)
    return statistics.median(took[1:])  # as the rollouts are counted


def main(folder: str, *overrides: str) -> None:
    from dovetail.tune.rl.rl import rl

    recipe = dict(RECIPE)
    for text in overrides:
        path, value = split(text)
        recipe[path[0]] = {".".join(path[1:]): parsed(value)} if path[1:] else parsed(value)
    with tempfile.TemporaryDirectory() as place:
        model = with_weights(Path(folder), Path(place) / "model")
        data = [{"prompt": f"Tell me about the number {i}."} for i in range(256)]
        start = time.perf_counter()
        rl(model=model, data=data, rewards=[even], run_dir=Path(place) / "run", show=False, **recipe)
        print(f"{STEPS} steps in {time.perf_counter() - start:.1f} s with the start")
        lines = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
        _report(lines, offline(model, recipe))


def _report(lines: list[dict], alone: float) -> None:
    for line in lines:
        told = {key: line.get(key) for key in ("step", "seconds", "rollout_seconds", "reward_seconds", "sync_seconds")}
        told |= {key: line.get(key) for key in ("reward", "gap", "gap_max", "completion_length", "filled", "memory")}
        print("  ".join(f"{k} {v:.4g}" for k, v in told.items() if v is not None))
    counted = lines[WARM:]
    middle = {key: statistics.median(line[key] for line in counted) for key in
              ("seconds", "rollout_seconds", "reward_seconds", "sync_seconds")}  # fmt: skip
    middle["train"] = middle["seconds"] - sum(middle[key] for key in list(middle)[1:])
    print("median:", "  ".join(f"{key.removesuffix('_seconds')} {value:.3f} s" for key, value in middle.items()))
    print(f"the engine alone {alone:.3f} s: the rollout runs at {alone / middle['rollout_seconds']:.0%} of it")


if __name__ == "__main__":
    main(*sys.argv[1:])
