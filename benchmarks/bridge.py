"""Compare three trainings of one Hugging Face model: torch.compile, the torch bridge, and our own implementation.

    python benchmarks/bridge.py                                   # on a GPU
    python benchmarks/bridge.py --tiny                            # on a CPU: small sizes, to see that all three run

All keep weights and AdamW's moments in f32, compute in bf16 and take the same batches of random tokens, without
activation checkpointing. PyTorch runs under torch.compile and autocast, with fused AdamW. The bridge is
`dovetail.interop.torch.train_step`. Each side runs in its own process, one after the other, because all would reserve
the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LR, WARM = 1e-4, 5


def batches(task: dict[str, Any]) -> list[np.ndarray]:
    """Return two batches of random tokens."""
    rng = np.random.default_rng(0)
    shape = (task["batch"], task["length"])
    return [rng.integers(0, task["sizes"]["vocab_size"], shape).astype(np.int32) for _ in range(2)]


def measure(task: dict[str, Any], step: Callable[[int], Any]) -> dict[str, Any]:
    """Return tokens per second of `step`, which takes a batch's number and returns the loss."""
    began = time.perf_counter()
    losses = [float(step(i % 2)) for i in range(WARM)]
    first = time.perf_counter() - began
    began = time.perf_counter()
    for i in range(task["steps"]):
        last = step(i % 2)
    losses.append(float(last))
    seconds = (time.perf_counter() - began) / task["steps"]
    tokens = round(task["batch"] * task["length"] / seconds)
    return {"tokens": tokens, "ms": 1e3 * seconds, "first": first, "losses": losses}


def hf_module(task: dict[str, Any]) -> Any:
    """Return transformers' Llama in train mode, with random weights in f32."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**task["sizes"], use_cache=False, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config).train()


def run_torch(task: dict[str, Any]) -> dict[str, Any]:
    """Train with torch.compile."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    module = hf_module(task).to(device)
    data = [torch.tensor(x, device=device, dtype=torch.long) for x in batches(task)]
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0, fused=device == "cuda")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def forward(tokens: Any) -> Any:
        with torch.autocast(device, dtype, enabled=device == "cuda"):
            return module(input_ids=tokens, labels=tokens).loss

    compiled = torch.compile(forward) if device == "cuda" else forward

    def step(i: int) -> Any:
        loss = compiled(data[i])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return measure(task, step)


def run_bridge(task: dict[str, Any]) -> dict[str, Any]:
    """Train the same module with `train_step`."""
    import jax
    import optax

    from dovetail.interop.torch import train_step

    compute = "bf16" if jax.default_backend() == "gpu" else "f32"
    step_of = train_step(
        hf_module(task), lambda module, tokens: module(input_ids=tokens, labels=tokens).loss,
        optax.adamw(LR, weight_decay=0.0), compute=compute,
    )  # fmt: skip
    data, held = [step_of.put(x) for x in batches(task)], [step_of.init()]

    def step(i: int) -> Any:
        held[0], metrics = step_of(held[0], data[i])
        return metrics["loss"]

    return measure(task, step)


def run_ours(task: dict[str, Any]) -> dict[str, Any]:
    """Train our implementation of the family with the same optimizer."""
    import jax
    import jax.numpy as jnp
    import optax

    from dovetail.core.spec import init
    from dovetail.core.types import Packed
    from dovetail.models.decoder import trunk
    from dovetail.models.registry import parse_config
    from dovetail.models.spec import spec
    from dovetail.ops.loss import cross_entropy

    T = task["length"]
    cfg = parse_config({**task["sizes"], "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    optimizer = optax.adamw(LR, weight_decay=0.0)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda x: x.astype(dtype), params)
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
        hidden, _ = trunk(own, cfg, tokens, positions, Packed(jnp.ones_like(tokens)))
        mask = jnp.broadcast_to((jnp.arange(T) < T - 1).astype(jnp.float32), tokens.shape)
        total, _ = cross_entropy(hidden, own["embed"], jnp.roll(tokens, -1, axis=1), mask, dtype=dtype)
        return total / mask.sum()

    def update(params: Any, moments: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return value, optax.apply_updates(params, updates), moments

    jitted = jax.jit(update, donate_argnums=(0, 1))
    params = init(spec(cfg), jax.random.key(0), jnp.float32)
    state, data = [params, optimizer.init(params)], [jax.device_put(x) for x in batches(task)]

    def step(i: int) -> Any:
        value, *state[:] = jitted(*state, data[i])
        return value

    return measure(task, step)


SIDES = {"torch": run_torch, "bridge": run_bridge, "ours": run_ours}


def main() -> None:
    """Run each side, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    task = {"batch": given.batch, "length": given.length, "steps": given.steps, "sizes": SIZES}
    if given.tiny:
        task |= {"batch": 2, "length": 64, "steps": 3, "sizes": SIZES | TINY}
    if given.side:
        print("RESULT " + json.dumps(SIDES[given.side](task)), flush=True)
        return
    print(f"{task['batch']} x {task['length']} tokens per step")
    print(f"{'side':8} {'tokens/s':>10} {'ms':>8} {'of torch':>9} {'first 5 steps':>14}   losses")
    base = None
    for side in SIDES:
        done = subprocess.run([sys.executable, __file__, "--side", side, *sys.argv[1:]], capture_output=True, text=True)
        lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = json.loads(lines[0])
        base = base or found["tokens"]
        losses = " ".join(f"{x:.4f}" for x in (found["losses"][0], found["losses"][1], found["losses"][-1]))
        print(
            f"{side:8} {found['tokens']:>10,} {found['ms']:>8.2f} {found['tokens'] / base:>9.2f}"
            f" {found['first']:>12.1f} s   {losses}",
            flush=True,
        )


if __name__ == "__main__":
    main()
