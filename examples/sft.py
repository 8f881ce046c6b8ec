"""Teach SmolLM2-135M an answer's form with a LoRA adapter: python examples/sft.py [--steps 30]

It sees 48 words, and is asked for words that it has not seen, before and after. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import dovetail as dt

MODEL = "smollm2-135m"
WORDS = """apple river stone cloud tiger piano lemon winter garden bottle rocket pencil mirror candle forest island
bridge button pepper castle monkey ladder jacket planet basket hammer silver copper engine saddle turtle violin
window pillow carpet dragon spider tunnel wagon marble velvet cactus helmet anchor falcon magnet parrot walnut
thunder blanket chicken diamond elephant feather giraffe horizon iceberg journey kitchen lantern""".split()
SEEN, UNSEEN = WORDS[:48], WORDS[48:]


def ask(word: str) -> str:
    return f"Word: {word}"


def form(word: str) -> str:
    return f"<<{word}|{word}>>"


def exact_match(model: str) -> float:
    """The share of words, none of them seen, that are answered in form."""
    llm = dt.LLM(model, dtype="f32", max_model_len=256, max_num_seqs=4)
    chats = [[{"role": "user", "content": ask(word)}] for word in UNSEEN]
    ids = [llm.tokenizer.encode_chat(chat) for chat in chats]
    answers = llm.generate(ids, dt.SamplingParams(temperature=0, max_tokens=16), progress=False)
    texts = [answer.outputs[0].text.strip() for answer in answers]
    print("  " + "  ".join(texts[:3]))
    return sum(text == form(word) for text, word in zip(texts, UNSEEN, strict=True)) / len(UNSEEN)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder = Path(args.run_dir or tempfile.mkdtemp())
    print(f"before: {exact_match(MODEL):.0%} of the answers are in form")
    lessons = [
        {"messages": [{"role": "user", "content": ask(word)}, {"role": "assistant", "content": form(word)}]}
        for word in SEEN
    ]
    ended = dt.sft(
        model=MODEL, data=lessons, lora={"r": 8, "lora_alpha": 16}, steps=args.steps, batch=2, length=128, packing=True,
        optimizer={"lr": 1e-3}, precision={"compute": "f32"}, run_dir=folder / "run",
    )  # fmt: skip
    merged = dt.merge(MODEL, ended.folder / f"export/step_{args.steps}", folder / "merged")
    print(f"after: {exact_match(str(merged)):.0%} of the answers are in form; {ended.folder / 'report.html'}")


if __name__ == "__main__":
    main()
