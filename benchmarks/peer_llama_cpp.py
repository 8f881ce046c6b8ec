"""Compare decoding of a .gguf file on a CPU with llama.cpp, taking turns in one process.

    pip install llama-cpp-python   # builds for this CPU
    python benchmarks/peer_llama_cpp.py MODEL.gguf --streams 1 8 16

Each run is a batch of random prompts of 128 tokens and 64 sampled tokens for each; tokens per second are sampled tokens
over the whole time, prompts included, and the best of `--rounds`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time

import numpy as np

import dovetail as dt

PROMPT, SAMPLED = 128, 64


class Theirs:
    """Decode greedily in batches of sequences with llama.cpp's own functions."""

    def __init__(self, path: str, streams: int, threads: int):
        import llama_cpp

        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        self.log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.log, ctypes.c_void_p(0))
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = streams * 256, streams * PROMPT, streams
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(streams * PROMPT, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """Run one step of (token, position, sequence, whether logits are wanted) and return the greedy tokens."""
        batch, lib = self.batch, self.lib
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert lib.llama_decode(self.context, batch) == 0
        asked = [i for i, row in enumerate(rows) if row[3]]
        found = (np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, i), (self.vocab,)) for i in asked)
        return np.asarray([logits.argmax() for logits in found])

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the tokens after each prompt."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        last = self._decode(
            [(t, i, s, i == PROMPT - 1) for s, prompt in enumerate(prompts) for i, t in enumerate(prompt)]
        )
        found = [last]
        for step in range(SAMPLED - 1):
            last = self._decode([(int(t), PROMPT + step, s, True) for s, t in enumerate(last)])
            found.append(last)
        return np.stack(found, 1).tolist()


def main() -> None:
    """Print the tokens per second of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", nargs="+", default=["gguf", "gguf_int8"])
    args = parser.parse_args()
    most, rng = max(args.streams), np.random.default_rng(0)
    ours = {
        name: dt.LLM(args.model, quantization=name, max_model_len=256, max_num_seqs=most) for name in args.quantization
    }
    sampling = dt.SamplingParams(temperature=0, max_tokens=SAMPLED, ignore_eos=True)
    for streams in args.streams:
        theirs = Theirs(args.model, streams, os.cpu_count() or 1)
        runs = {"llama.cpp": theirs.run} | {
            name: lambda p, llm=llm: llm.generate(p, sampling) for name, llm in ours.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds + 1):  # the first compiles
            prompts = rng.integers(1000, 40000, (streams, PROMPT)).tolist()
            for name, run in runs.items():
                start = time.perf_counter()
                run(prompts)
                seconds[name].append(time.perf_counter() - start)
        speeds = {name: streams * SAMPLED / min(taken[1:]) for name, taken in seconds.items()}
        print(
            f"{streams} streams:", ", ".join(f"{name} {speed:.1f} tok/s" for name, speed in speeds.items()), flush=True
        )


if __name__ == "__main__":
    main()
