"""Load on a real server: many streaming clients for a while, each answer compared with the offline engine's, and what
HTTP costs beside the engine. Server, engine and clients are three processes; what counts is the time in which all
clients are busy, not the emptying of the last wave.

python benchmarks/serve_load.py --clients 64 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dovetail.engine.engine import Engine
from dovetail.engine.llm import LLM
from dovetail.engine.loop import EngineLoop
from dovetail.engine.request.outputs import OutputDelta
from dovetail.engine.request.params import SamplingParams

MODEL = "smollm2-135m"
SCHEME = "gguf"  # activations in f32: rounded, a text may depend on the batch
TOPICS = ("a lighthouse", "bread", "the moon", "rivers", "chess", "a violin", "glass", "bees", "maps", "winter", "iron")
PROMPTS = [f"Write {n} sentences about {topic}." for topic in TOPICS for n in range(2, 8)]
MAX_LEN, MAX_TOKENS = 256, 2048


class Mark(NamedTuple):
    """How things stood at one moment; the difference of two is a rate."""

    time: float
    tokens: int
    cpu: dict[str, float]  # seconds, by process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    args = parser.parse_args()
    expected, offline = _offline(args.clients, args.output, args.seconds)
    print(_summary("offline", *offline), flush=True)
    with _server(args.clients) as (port, pids):
        load = Load(port, pids, expected, args.output)
        asyncio.run(load.run(args.clients, args.seconds))
    served = load.marks[0], load.marks[-1]
    print(_summary("served", *served))
    print(f"served / offline: {_rate(*served) / _rate(*offline):.3f} by the clock")
    cpu = _cpu(*served)
    print(f"HTTP's share of HTTP and engine, in CPU time: {cpu['http'] / (cpu['http'] + cpu['engine']):.3f}")
    print(f"{load.answers} answers, {load.wrong} wrong, {len(load.errors)} errors {load.errors[:3]}")
    print("resident MiB:", load.memory[0], "->", load.memory[-1])


def _summary(name: str, start: Mark, end: Mark) -> str:
    each = ", ".join(f"{process} {seconds * 1e3:.2f}" for process, seconds in _cpu(start, end).items())
    return f"{name}: {_rate(start, end):.1f} tok/s over {end.time - start.time:.0f} s; CPU ms per token: {each}"


def _rate(start: Mark, end: Mark) -> float:
    return (end.tokens - start.tokens) / (end.time - start.time)


def _cpu(start: Mark, end: Mark) -> dict[str, float]:
    """Seconds per token, by process."""
    tokens = max(1, end.tokens - start.tokens)
    return {name: (end.cpu[name] - start.cpu[name]) / tokens for name in start.cpu}


# --- the engine alone -------------------------------------------------------------------------------------------------


def _offline(clients: int, output: int, seconds: float) -> tuple[dict[str, str], tuple[Mark, Mark]]:
    """Each prompt's answer; and two moments of a load like the server's, without a server: as many clients ask the
    engine in this process, each again when it has its answer."""
    llm = LLM(
        MODEL, quantization=SCHEME, max_num_seqs=clients, max_model_len=MAX_LEN, max_num_batched_tokens=MAX_TOKENS
    )
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    ids = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    answers = [out.outputs[0].text for out in llm.generate(ids, params, progress=False)]

    asked = itertools.count()

    def ask(engine: Engine, i: int) -> None:
        engine.add(f"{i}-{next(asked)}", ids[i % len(ids)], params)

    def on_updates(updates: list[OutputDelta]) -> None:
        """On the engine's thread: a client that has its answer asks again."""
        for update in updates:
            if update.output is not None:
                ask(llm.engine, int(update.request_id.partition("-")[0]) + 7)

    def mark() -> Mark:
        return Mark(time.perf_counter(), llm.stats().generated_tokens, {"engine": time.process_time()})

    loop = EngineLoop(llm.engine, on_updates)
    for i in range(clients):
        loop.submit(lambda engine, i=i: ask(engine, i)).result()
    time.sleep(_warm_up(seconds))
    start = mark()
    time.sleep(seconds)
    end = mark()
    loop.stop()
    return dict(zip(PROMPTS, answers, strict=True)), (start, end)


def _warm_up(seconds: float) -> float:
    """The first requests compile, and all begin at once."""
    return max(10.0, seconds / 2)


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def _server(clients: int) -> Iterator[tuple[int, dict[str, int]]]:
    """(its port, its processes)."""
    command = [sys.executable, "-m", "dovetail", "serve", MODEL, "--port", "0", "--max-model-len", str(MAX_LEN)]
    command += ["--quantization", SCHEME]
    command += ["--max-num-seqs", str(clients), "--max-num-batched-tokens", str(MAX_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", line := process.stdout.readline())) is None:
            assert line, "the server did not start"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield int(found[1]), {"http": process.pid, "engine": int(children[0])}
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@dataclass
class Load:
    """Clients in one light loop: sockets and lines, so that they cost little beside the server."""

    port: int
    pids: dict[str, int]
    expected: dict[str, str]
    output: int
    answers: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)

    async def run(self, clients: int, seconds: float) -> None:
        await self._until_ready()
        tasks = [asyncio.create_task(self._client(i)) for i in range(clients)]
        await asyncio.sleep(_warm_up(seconds))
        self.answers = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.marks.append(await self._mark())
            self.memory.append({name: _resident(pid) for name, pid in self.pids.items()})
            await asyncio.sleep(min(5.0, seconds / 4))
        self.marks.append(await self._mark())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, i: int) -> None:
        while True:
            prompt = PROMPTS[i % len(PROMPTS)]
            i += 7
            try:
                text = await self._ask(prompt)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.errors.append(repr(error))
                continue
            self.answers += 1
            self.wrong += text != self.expected[prompt]

    async def _ask(self, prompt: str) -> str:
        """The text of a streamed chat. One connection per request, as from separate clients."""
        body = dict(messages=[{"role": "user", "content": prompt}], max_tokens=self.output, temperature=0, stream=True)
        text, ended = "", False
        async for line in self._lines("POST", "/v1/chat/completions", json.dumps(body | {"ignore_eos": True})):
            if line == b"data: [DONE]":
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                text += event["choices"][0]["delta"].get("content", "")
        if not ended:
            raise ValueError("the stream ended early")
        return text

    async def _lines(self, method: str, path: str, body: str = ""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            data = body.encode()
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
            )
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"{status!r} {(await reader.read(1000))!r}")
            while line := await reader.readline():
                yield line.rstrip()
        finally:
            writer.close()

    async def _until_ready(self) -> None:
        for _ in range(600):
            try:
                return [None async for _ in self._lines("GET", "/health")].clear()
            except (OSError, ValueError):
                await asyncio.sleep(0.1)
        raise TimeoutError("the server does not answer")

    async def _mark(self) -> Mark:
        counted = [line async for line in self._lines("GET", "/metrics")]
        tokens = next(line for line in counted if line.startswith(b"vllm:generation_tokens_total{"))
        pids = {**self.pids, "clients": os.getpid()}
        return Mark(
            time.perf_counter(), int(float(tokens.split()[-1])), {name: _used(pid) for name, pid in pids.items()}
        )


def _used(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    main()
