"""Distil SmolLM2-135M into every third of its own layers: python examples/distill.py [--steps 20]

The student begins with ten of the teacher's thirty layers and learns the teacher's distribution of each next word.
Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import dovetail as dt
from dovetail.io.load import save
from dovetail.models.registry import parse_config

MODEL, EVERY = "smollm2-135m", 3
THINGS = "water, the sun, a tree, music, a river, snow, bread, the moon, glass, sand, wind, iron, salt, a song".split(
    ", "
)


def student(folder: Path) -> str:
    teacher = dt.load(MODEL, dtype="f32")
    hf = teacher.config.to_hf()
    layers = teacher.params["layers"][::EVERY]
    cfg = parse_config(hf | {"num_hidden_layers": len(layers)}, "the student")
    save(folder, cfg, {**teacher.params, "layers": layers}, teacher.tokenizer)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder = Path(args.run_dir or tempfile.mkdtemp())
    lessons = [{"prompt": f"What is {x}?", "completion": f" {x.capitalize()} is something we know."} for x in THINGS]
    ended = dt.distill(
        model=student(folder / "student"), teacher=MODEL, data=lessons, steps=args.steps, batch=2, length=96,
        packing=True, distillation={"alpha": 0.9}, optimizer={"lr": 3e-4}, precision={"compute": "f32"},
        run_dir=folder / "run",
    )  # fmt: skip
    print(f"divergence from the teacher: {ended.metrics['divergence']:.3f}; {ended.folder / 'report.html'}")


if __name__ == "__main__":
    main()
