"""Speculative decoding beside decoding without it: tokens per second, and tokens per step, in one process.

On a CPU, n-gram and suffix drafts of texts to edit:    python benchmarks/speculation.py edit
On a CPU, a trained drafter on prompts of its kind:     python benchmarks/speculation.py edit --draft FOLDER \\
                                                           --data PROMPTS.jsonl
On a GPU, drafts of a given acceptance (see Guess):    python benchmarks/speculation.py shape --model CONFIG_FOLDER
On a GPU, what a draft model costs:                    python benchmarks/speculation.py draft --model CONFIG_FOLDER \\
                                                           --draft CONFIG_FOLDER...
Rollouts of RL, without and with the suffix drafter:   python benchmarks/speculation.py rl
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.spec.draft_length import DraftLength
from dovetail.engine.spec.drafter import DeviceDrafter
from dovetail.engine.spec.speculator import Speculator

TEXTS = (
    "The harbour of Kelmar lies on the north coast of the island. Every morning the fishing boats leave before sunrise "
    "and return at noon with herring and cod. The market opens when the first boat arrives. Visitors buy fresh bread, "
    "smoked fish and wool from the farms in the hills. In the evening the lights of the lighthouse can be seen from "
    "the mainland, twenty miles away.",
    "The old library stands between the town hall and the river. It was built of grey stone two hundred years ago and "
    "holds forty thousand books. On Mondays the reading room is open to children, who sit on the carpet and listen to "
    "stories. On the other days students work at the long tables. The librarian closes the heavy door at eight and "
    "feeds the cat that lives in the cellar.",
)
EDITS = {  # what is asked, and a mistake to be made in the text first
    "rename": ("Write the following text again, but replace {0!r} by {1!r}. Keep everything else.", ()),
    "correct": (
        "Correct the spelling of the following text and write out the whole text again. Change nothing else.",
        (("morning", "mornnig"), ("fresh", "frech"), ("carpet", "carpett"), ("heavy", "hevy")),
    ),
}
NAMES = (("Kelmar", "Torvik"), ("river", "canal"))
TOKEN = 5


class Guess:
    """Propose the one token that requests allow, or with a probability of 1 - `accept` another one.

    So acceptance is what was asked for. With random weights nothing else would do: their logits nearly tie, and
    rounding decides between them.
    """

    runs_ahead = False

    def __init__(self, accept: float):
        self._accept, self._random = accept, random.Random(0)

    def propose(self, seq, most):
        """Return `most` tokens."""
        return tuple(TOKEN if self._random.random() < self._accept else TOKEN + 1 for _ in range(most))

    def finish(self, seq):
        """Learn nothing."""


class Fixed(DraftLength):
    """Speculate at every step with a fixed number of draft tokens."""

    def choose(self, rows):
        """Return the largest number."""
        return self.choices[-1]


def timed(llm: LLM, prompts, params) -> tuple[float, list]:
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start, outputs


def rate(llm: LLM, prompts, params, turns: int) -> tuple[float, float, list]:
    """Return the best tokens per second of some turns, the device steps of one of them, and its outputs."""
    best, outputs, steps = 0.0, [], 0
    for _ in range(turns):
        before = llm.engine.stats().steps
        seconds, outputs = timed(llm, prompts, params)
        steps = llm.engine.stats().steps - before
        best = max(best, sum(len(each.outputs[0].token_ids) for each in outputs) / seconds)
    return best, steps, outputs


def edit(args) -> None:
    """Answer prompts one by one, without and with each drafter: edits of texts, or the last prompts of a file."""
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.tokens)
    methods = {
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},  # earlier turns do not count
    }
    methods = {folder: {"model": folder} for folder in args.draft} or methods
    more = {"num_speculative_tokens": args.drafts} if args.drafts else {}
    engines = {"none": LLM(args.model, max_num_seqs=1, max_model_len=2048)}
    for method, keys in methods.items():
        engines[method] = LLM(args.model, max_num_seqs=1, max_model_len=2048, speculative_config={**keys, **more})
        runner = engines[method].runner
        runner.steps.all([runner.buckets.verify(1, each) for each in runner.buckets.drafts])
    tokenizer = engines["none"].tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode_chat(messages) for messages in _questions(args)]
    seconds, steps, outputs = defaultdict(float), defaultdict(int), {}
    for turn in range(1 + args.turns):  # the variants take turns; the first one warms up
        for name, llm in engines.items():
            for prompt in prompts:
                before = llm.engine.stats().steps
                took, outputs[name, tuple(prompt)] = timed(llm, [prompt], params)
                if turn:
                    seconds[name] += took
                    steps[name] += llm.engine.stats().steps - before
    for prompt in prompts[:2]:
        print(tokenizer.decode(outputs["none", tuple(prompt)][0].outputs[0].token_ids))
    count = args.turns * sum(len(outputs["none", tuple(prompt)][0].outputs[0].token_ids) for prompt in prompts)
    for name in engines:
        same = all(
            outputs[name, tuple(each)][0].outputs[0].token_ids == outputs["none", tuple(each)][0].outputs[0].token_ids
            for each in prompts
        )
        print(
            f"{name:8} {count / seconds[name]:7.1f} tok/s  {seconds['none'] / seconds[name]:5.2f}x  "
            f"{count / steps[name]:5.2f} tokens per step  same: {same}"
        )


def _questions(args) -> list[list[dict]]:
    if not args.data:
        return [[{"role": "user", "content": question}] for question, _ in edits()]
    with open(args.data) as file:
        return [json.loads(line)["messages"] for line in file][-args.prompts :]


def edits() -> list[tuple[str, str]]:
    """Return questions that ask for an edit of a text, each with the text."""
    found = []
    for text, names in zip(TEXTS, NAMES, strict=True):
        for asked, mistakes in EDITS.values():
            given = text
            for right, wrong in mistakes:
                given = given.replace(right, wrong)
            found.append((f"{asked.format(*names)}\n\n{given}", text))
    return found


def shape(args) -> None:
    config = {"num_speculative_tokens": args.drafts}
    llm = LLM(args.model, load_format="dummy", max_num_seqs=max(args.streams), max_model_len=2048,
              speculative_config=config)  # fmt: skip
    llm.engine.speculator, adaptive = None, llm.runner.buckets.drafts
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, allowed_token_ids=(TOKEN,))
    print(f"{args.model}, K={args.drafts}: tok/s without, with; speed-up; tokens per row and step; step ms; ratio")
    for streams in args.streams:
        rng = random.Random(streams)
        prompts = [[rng.randrange(1000) for _ in range(args.prompt)] for _ in range(streams)]
        llm.engine.speculator = None
        plain, _, _ = rate(llm, prompts, params, args.turns)
        for accept in args.accept:
            for choose in (Fixed((args.drafts,)), DraftLength(adaptive)):
                llm.engine.speculator = Speculator(Guess(accept), choose)
                fast, steps, _ = rate(llm, prompts, params, args.turns)
                per = args.tokens / steps
                print(
                    f"{streams:4} streams  accept {accept:.2f}  {type(choose).__name__:11} {plain:8.1f} {fast:8.1f}  "
                    f"{fast / plain:5.2f}x  {per:5.2f}  plain {1e3 * streams / plain:6.2f} "
                    f"verify {1e3 * streams * per / fast:6.2f} ms  {per * plain / fast:5.2f}",
                    flush=True,
                )


def step_ms(llm: LLM, prompts, params) -> float:
    """Return the time of a step without the prompts', which a run for one token measures."""
    counted = [llm.engine.stats().steps]
    first, _ = timed(llm, prompts, replace(params, max_tokens=1))
    counted.append(llm.engine.stats().steps)
    whole, _ = timed(llm, prompts, params)
    counted.append(llm.engine.stats().steps)
    return 1e3 * (whole - first) / (counted[2] - 2 * counted[1] + counted[0])


def draft(args) -> None:
    """Time a step without draft tokens, with some that the host knows, and with some of each draft model.

    The one token that requests allow is always accepted, so that all have the same number of steps.
    """
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, allowed_token_ids=(TOKEN,))
    print("streams: ms of a decode step and of a verify step; how many times as fast with 4 tokens per verify step")
    for folder in (None, *args.draft):
        config = {"num_speculative_tokens": args.drafts} | ({"model": folder} if folder else {})
        llm = LLM(args.model, load_format="dummy", max_num_seqs=max(args.streams), max_model_len=2048,
                  max_num_batched_tokens=2048, kv_cache_memory_bytes=8 * 2**30, speculative_config=config)  # fmt: skip
        drafter = Guess(1.0) if folder is None else DeviceDrafter()
        for streams in args.streams:
            rng = random.Random(streams)
            prompts = [[rng.randrange(1000) for _ in range(args.prompt)] for _ in range(streams)]
            times = []
            for speculator in (None, Speculator(drafter, Fixed((args.drafts,)))):
                llm.engine.speculator = speculator
                times.append(min(step_ms(llm, prompts, params) for _ in range(1 + args.turns)))
            plain, verify = times
            print(f"{folder or '-'}: {streams:3}  {plain:6.2f} {verify:6.2f}  {4 * plain / verify:5.2f}x", flush=True)
        del llm
        gc.collect()


def rl(args) -> None:
    """Run one RL recipe without and with the suffix drafter, in turns, and compare the time of their rollouts.

    Both have the same completions. The first turn compiles the steps and is not counted; neither is the first step of
    a run.
    """
    variants = {"none": {}, "suffix": {"kind": "suffix", "num_speculative_tokens": args.drafts, "refresh": 2}}
    steps: dict[str, list[dict]] = {name: [] for name in variants}
    for turn in range(1 + args.turns):
        written = {}
        for name, speculation in variants.items():
            with tempfile.TemporaryDirectory() as place:
                lines, written[name] = rl_run(args, speculation, Path(place))
            seconds = " ".join(f"{line['rollout_seconds']:.2f}" for line in lines)
            lengths = " ".join(f"{line['accepted_length']:.2f}" for line in lines if "accepted_length" in line)
            print(f"turn {turn} {name:8} rollouts of {seconds} s, accepted length {lengths or 1}", flush=True)
            steps[name] += lines[1:] if turn else []
        print(f"turn {turn} same completions: {written['none'] == written['suffix']}", flush=True)
    plain, drafted = (sum(line["rollout_seconds"] for line in lines) for lines in steps.values())
    saved = sum(line.get("seconds_saved", 0.0) for line in steps["suffix"])
    print(f"{len(steps['none'])} rollouts each: {plain:.1f} s without and {drafted:.1f} s with draft tokens, "
          f"{1 - drafted / plain:.0%} less; seconds_saved says {saved:.1f} s")  # fmt: skip


def rl_run(args, speculation: dict, place: Path) -> tuple[list[dict], list[str]]:
    """Return the metrics of the steps of a run, and its completions."""
    from dovetail.tune.rl.rl import rl

    data = [{"prompt": [{"role": "user", "content": question}], "text": text} for question, text in edits()]
    rl(
        model=args.model, data=data, rewards=[repeated], run_dir=place, show=False, show_every=0, prompts=1,
        num_generations=args.generations, max_prompt_length=192, max_completion_length=args.tokens, steps=args.steps,
        lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}, checkpoint={"every": 0}, optimizer={"lr": 1e-5},
        precision={"compute": args.compute}, speculation=speculation,
        sampling={"temperature": args.temperature},
    )  # fmt: skip
    files = (place / name for name in ("metrics.jsonl", "completions.jsonl"))
    steps, completions = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    return steps, [line["completion"] for line in completions]


def repeated(prompts, completions, text, **columns) -> list[float]:
    """Return the share of the text's words that a completion has."""
    said = [{*each[-1]["content"].split()} for each in completions]
    return [len(words & {*wanted.split()}) / len({*wanted.split()}) for words, wanted in zip(said, text, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("edit", "shape", "draft", "rl"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafts", type=int, help="draft tokens; by default 7, or what a draft model proposes")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="rl: steps of a run")
    parser.add_argument("--compute", default="f32", help="rl: the precision of products")
    parser.add_argument("--generations", type=int, default=4, help="rl: completions of a prompt")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--accept", type=float, nargs="+", default=[0.75, 0.0])
    parser.add_argument("--draft", nargs="+", default=[], help="draft models: folders")
    parser.add_argument("--data", help="a .jsonl file with messages, of which the last --prompts are answered")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--temperature", type=float, help="by default 0, and 0.3 for rl: a policy that has learnt")
    args = parser.parse_args()
    if args.temperature is None:
        args.temperature = 0.3 if args.what == "rl" else 0.0
    args.drafts = args.drafts or (None if args.what == "edit" else 7)
    {"edit": edit, "shape": shape, "draft": draft, "rl": rl}[args.what](args)


if __name__ == "__main__":
    main()
