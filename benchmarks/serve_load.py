"""Load on a real server: many streaming clients for a while, each answer compared with the offline engine's.

python benchmarks/serve_load.py --clients 64 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from dovetail.engine.llm import LLM
from dovetail.engine.params import SamplingParams
from dovetail.io.hub import resolve
from dovetail.serve.app import make_app
from dovetail.serve.client import EngineClient
from dovetail.serve.config import ServerConfig
from dovetail.serve.server import Server, listening_socket, read_tokenizer

MODEL, OUTPUT = "smollm2-135m", 32
TOPICS = ("a lighthouse", "bread", "the moon", "rivers", "chess", "a violin", "glass", "bees", "maps", "winter", "iron")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    options = dict(max_num_seqs=args.clients, max_model_len=256, max_num_batched_tokens=2048)
    prompts = [f"Write {n} sentences about {topic}." for topic in TOPICS for n in range(2, 8)]
    expected, offline = _offline(prompts, options, args.clients)
    print(f"offline: {offline:.1f} tok/s", flush=True)
    asyncio.run(_load(prompts, expected, options, args, offline))


def _offline(prompts: list[str], options: dict[str, Any], clients: int) -> tuple[dict[str, str], float]:
    """Each prompt's answer, and tokens per second with as many at once as there will be clients."""
    llm = LLM(MODEL, **options)
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    ids = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    answers = [output.completions[0].text for output in llm.generate(ids, params, progress=False)]
    many = [ids[i % len(ids)] for i in range(4 * clients)]
    start = time.perf_counter()
    llm.generate(many, params, progress=False)
    return dict(zip(prompts, answers, strict=True)), len(many) * OUTPUT / (time.perf_counter() - start)


async def _load(prompts, expected, options, args, offline: float) -> None:
    import openai

    path = resolve(MODEL, None)
    engine = await EngineClient.start(path, options)
    app = make_app(engine, read_tokenizer(path), ServerConfig(names=(MODEL,), port=0))
    sock = listening_socket("127.0.0.1", 0)
    server = Server(app, app.state.service.config)
    serving = asyncio.create_task(server.serve([sock]))
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", api_key="none", max_retries=0)
    tokens, wrong, errors, memory = 0, 0, [], []
    end = 0.0

    async def one(i: int) -> None:
        nonlocal tokens, wrong
        while time.perf_counter() < end:
            prompt, text = prompts[i % len(prompts)], ""
            i += 7
            try:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=OUTPUT, temperature=0,
                    stream=True, extra_body={"ignore_eos": True},
                )  # fmt: skip
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            except Exception as error:
                errors.append(repr(error))
                continue
            tokens += OUTPUT
            wrong += text != expected[prompt]

    async def watch() -> None:
        while True:
            memory.append([_resident(pid) for pid in ("self", engine.info.pid)])
            await asyncio.sleep(5)

    for seconds in (args.seconds / 3, args.seconds):  # the first compiles
        tokens, start = 0, time.perf_counter()
        end = start + seconds
        memory.clear()
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(i) for i in range(args.clients)))
        watching.cancel()
        rate = tokens / (time.perf_counter() - start)
    print(f"served: {rate:.1f} tok/s, {rate / offline:.3f} of offline; {wrong} wrong answers, {len(errors)} errors")
    print("resident MiB (HTTP and clients, engine):", memory[0], "->", memory[-1], errors[:3])
    server.should_exit = True
    await serving


def _resident(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


if __name__ == "__main__":
    main()
