"""Prompts with an image in the engine: the vision tower alone, time to first token, and tokens per second.

    python benchmarks/images.py DIR --streams 1 16 64      # DIR: a folder with a config.json

The weights and the images are random, and no two requests have the same image.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

from dovetail.core.chips import chip_of
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.io.images.item import ImageItem, ImagePrompt, ImageSpan
from dovetail.ops.dispatch import compile_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--text", type=int, default=128, help="tokens of the prompt besides the image's")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    began = time.perf_counter()
    llm = LLM(args.config, load_format="dummy", max_model_len=2048, max_num_seqs=max(args.streams))
    print(f"ready after {time.perf_counter() - began:.1f} s; {llm.describe()}", flush=True)
    encoder(llm)
    rng = np.random.default_rng(0)
    for streams in args.streams:
        lines = []
        for _ in range(1 + args.turns):  # the first turn compiles
            first = timed(llm, [prompt(llm, args.text, rng) for _ in range(streams)], 1)
            whole = timed(llm, [prompt(llm, args.text, rng) for _ in range(streams)], args.tokens)
            lines.append((first, streams * args.tokens / whole))
        first, rate = min(x for x, _ in lines[1:]), max(x for _, x in lines[1:])
        print(f"{streams:3} streams: all first tokens after {first:.3f} s; {rate:,.0f} tok/s", flush=True)


def encoder(llm: LLM) -> None:
    """Time the vision tower alone, some items at a time."""
    cfg, params = llm.runner.cfg, llm.runner.params["vision"]
    tower = cfg.vision.tower
    chip = chip_of(jax.devices()[0])
    for count in (1, 4, 16):
        patches = np.random.default_rng(count).integers(0, 256, (count, tower.max_patches, tower.patch_dim), np.uint8)
        given = jax.device_put((patches, np.stack([item(tower, patches[0]).positions] * count)))
        options = compile_options(None, count * tower.max_patches)  # those of the engine
        run = jax.jit(tower).lower(params, *given).compile(compiler_options=options)
        run(params, *given).block_until_ready()
        start = time.perf_counter()
        for _ in range(5):
            out = run(params, *given)
        out.block_until_ready()
        seconds = (time.perf_counter() - start) / 5 / count
        rate = tower.flops(tower.max_patches) / seconds
        share = f", {rate / chip.device_bf16:.0%} of peak" if chip else ""
        print(f"encoder, {count:2} images: {1e3 * seconds:.2f} ms each, {rate / 1e12:.0f} TFLOP/s{share}", flush=True)


def item(tower, patches: np.ndarray) -> ImageItem:
    """Return the item of a square image."""
    side, square = int(tower.max_patches**0.5), int(tower.patches_per_feature**0.5)
    y, x = np.divmod(np.arange(side * side, dtype=np.int32), side)
    grid = (side // square, side // square)
    return ImageItem(patches, np.stack([x, y], axis=-1).astype(np.int32), grid, patches.tobytes()[:64])


def prompt(llm: LLM, text: int, rng: np.random.Generator) -> ImagePrompt:
    """Return a prompt with one image in the middle of random tokens."""
    vision = llm.runner.cfg.vision
    made = item(vision.tower, rng.integers(0, 256, (vision.tower.max_patches, vision.tower.patch_dim), np.uint8))
    words = [int(x) for x in rng.integers(10, 1000, text)]
    span = ImageSpan(text // 2, made)
    return ImagePrompt((*words[: text // 2], *[vision.image_token] * span.count, *words[text // 2 :]), (span,))


def timed(llm: LLM, prompts: list[ImagePrompt], tokens: int) -> float:
    """Return the seconds that all prompts take."""
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), progress=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
