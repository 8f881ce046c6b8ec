"""What adapters cost: 64 streams on the base alone, on an engine with room for 8 adapters, and with 8 mixed in a batch.

python benchmarks/adapters.py DIR [--adapters 8] [--rank 16] [--streams 64]      # DIR: a folder with a config.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

PROMPT, NEW = 128, 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    base = _best(_engine(args.config, args), args, None)
    print(f"base alone: {base:,.0f} tok/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        names = _save(args, Path(folder))
        llm = _engine(args.config, args, lora_modules={name: f"{folder}/{name}" for name in names})
    for what, chosen in (("the base beside them", [None]), (f"{len(names)} mixed", names)):
        rate = _best(llm, args, chosen)
        print(f"{what}: {rate:,.0f} tok/s, {rate / base:.3f} of the base alone", flush=True)


def _engine(config: str, args: argparse.Namespace, **more):
    import dovetail as dt

    return dt.LLM(
        config,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=args.streams,
        kv_cache_memory_bytes=2**33,
        warm_up=False,
        **more,
    )


def _save(args: argparse.Namespace, folder: Path) -> list[str]:
    """Random adapters of every projection, as a trainer would save them."""
    import jax
    import jax.numpy as jnp

    from dovetail.core.spec import init
    from dovetail.io.peft import save_adapter
    from dovetail.models.lora import Lora, lora_spec
    from dovetail.models.registry import read_config

    cfg, lora = read_config(args.config), Lora(args.rank, 2.0 * args.rank)
    names = [f"adapter-{i}" for i in range(args.adapters)]
    for i, name in enumerate(names):
        tree = init(lora_spec(cfg, lora), jax.random.key(i), jnp.float32)
        tree = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.01, tree)
        save_adapter(folder / name, cfg, tree, lora, args.config)
    return names


def _best(llm, args: argparse.Namespace, names: list | None) -> float:
    """Of a few runs: the first ones compile, or meet a machine that is busy otherwise."""
    import numpy as np

    import dovetail as dt

    params = dt.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    chosen = [names[i % len(names)] for i in range(args.streams)] if names else None
    rates = []
    for _ in range(args.repeat):
        ids = np.random.default_rng().integers(3, llm.config.vocab, (args.streams, PROMPT)).tolist()
        start = time.perf_counter()
        llm.generate(ids, params, progress=False, adapter=chosen)
        rates.append(args.streams * NEW / (time.perf_counter() - start))
    return max(rates)


if __name__ == "__main__":
    main()
