"""Teach a small model arithmetic by rewards alone: python examples/rl.py [--steps 150]

First it learns the form from answers that are any number (SFT), so that it guesses; then GRPO pays for the right ones.
A few minutes on two cores. With --config DIR (a folder with config.json and a tokenizer) it is a model of that shape,
with random weights, in place of a tiny one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dovetail as dt

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "eos_token_id": 256, "hidden_act": "silu",
}  # fmt: skip
SUMS = [(a, b) for a in range(5) for b in range(5)]


def new_model(folder: Path, config: str) -> str:
    """A folder with random weights."""
    from dovetail.core.spec import init
    from dovetail.io.load import save
    from dovetail.io.tokenizer import Tokenizer, byte_tokenizer
    from dovetail.models.registry import parse_config, read_config
    from dovetail.models.spec import spec

    cfg = read_config(config) if config else parse_config(TINY, "examples/rl.py")
    tokenizer = Tokenizer.from_folder(config) if config else byte_tokenizer()
    save(folder, cfg, init(spec(cfg), jax.random.key(0), jnp.float32), tokenizer)
    return str(folder)


def guesses() -> list[dict[str, str]]:
    """The form of an answer, and any number for it."""
    rng = np.random.default_rng(0)
    return [{"prompt": f"{a}+{b}=", "completion": str(rng.integers(0, 9))} for a, b in SUMS for _ in range(20)]


def exact(prompts, completions, answer, **columns) -> list[float]:
    """The reward: 1 for the right number, and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def exact_match(model: str) -> float:
    """The share of right answers, sampled as the policy samples them."""
    llm = dt.LLM(model, max_model_len=32)
    asked = dt.SamplingParams(n=16, max_tokens=4, seed=1)
    answers = llm.generate([f"{a}+{b}=" for a, b in SUMS], asked, progress=False)
    right = [c.text.strip() == str(a + b) for (a, b), one in zip(SUMS, answers, strict=True) for c in one.outputs]
    return float(np.mean(right))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--form-steps", type=int, default=60)
    parser.add_argument("--config", default="")
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder = Path(args.run_dir or tempfile.mkdtemp())
    on_cpu = jax.default_backend() == "cpu"
    usual = dict(precision={"compute": "f32" if on_cpu else "bf16"}, schedule={"name": "constant"})
    lr = 1e-3 if not args.config else 1e-4
    dt.sft(
        model=new_model(folder / "new", args.config), data=guesses(), steps=args.form_steps, batch=8, length=128,
        packing=True,
        optimizer={"lr": lr}, run_dir=folder / "form", **usual,
    )  # fmt: skip
    taught = str(folder / "form" / "export" / f"step_{args.form_steps}")
    print(f"before: {exact_match(taught):.0%} of the answers are right")
    data = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    ended = dt.rl(
        model=taught, data=data, rewards=[exact], algo="grpo", prompts=25, num_generations=16,
        max_prompt_length=8, max_completion_length=4, steps=args.steps, optimizer={"lr": lr / 2},
        loss={"entropy_coef": 0.01}, run_dir=folder / "rl", **usual,
    )  # fmt: skip
    after = exact_match(str(ended.folder / "export" / f"step_{args.steps}"))
    print(f"after: {after:.0%} of the answers are right; {ended.folder / 'report.html'}")


if __name__ == "__main__":
    main()
