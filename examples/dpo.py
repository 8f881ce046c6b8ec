"""Turn a preference of SmolLM2-135M around with a LoRA adapter: python examples/dpo.py [--steps 12]

Of two answers to a greeting it learns to prefer the curt one. The margin and the share of pairs in the right order, on
pairs that it has not seen, are in the report. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import dovetail as dt

MODEL = "smollm2-135m"
NAMES = """Ann Bob Cleo Dan Eve Finn Gina Hugo Iris Jack Kira Liam Mona Nils Olga Paul Rosa Sven Tara Uwe Vera Will
Xena Yuri""".split()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder = Path(args.run_dir or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"Hello, I am {name}."}],
            "chosen": [{"role": "assistant", "content": f"Noted, {name}."}],
            "rejected": [{"role": "assistant", "content": f"Hello, {name}! How can I help you today?"}],
        }
        for name in NAMES
    ]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    ended = dt.dpo(
        model=MODEL, data={"path": str(data), "held_out": 0.2}, lora={"r": 8, "lora_alpha": 16}, steps=args.steps,
        batch=2, length=192, packing=True, optimizer={"lr": 3e-4}, preference={"beta": 0.1},
        precision={"compute": "f32"}, eval={"every": args.steps, "batches": 1}, run_dir=folder / "run",
    )  # fmt: skip
    share, margin = (ended.metrics[f"held_out_{name}"] for name in ("reward_accuracy", "reward_margin"))
    print(f"of unseen pairs {share:.0%} are in the right order, by {margin:.2f}; {ended.folder / 'report.html'}")


if __name__ == "__main__":
    main()
