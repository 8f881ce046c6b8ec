"""What ten bodies that are far too long cost the others: /health, and the gaps of one stream, before and meanwhile.

python benchmarks/long_bodies.py [--model smollm2-135m] [--megabytes 4 15]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

TEXT = "The quick brown fox jumps over the lazy dog, and 7 others look on. "
# Clients usually have machines of their own: here they give way to the server.
SENDER = """
import json, os, sys, threading, httpx
os.nice(19)
url, text, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
body = json.dumps({"messages": [{"role": "user", "content": text * (count // len(text))}]}).encode()
def send():
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=300)
    print(answer.status_code, end=" ", flush=True)
threads = [threading.Thread(target=send) for _ in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 15])
    args = parser.parse_args()
    with served(args.model) as url:
        watch = Watch(url)
        time.sleep(10)
        watch.report("quiet", time.perf_counter() - 6)
        for size in args.megabytes:
            command = [sys.executable, "-c", SENDER, f"{url}/v1/chat/completions", TEXT, str(size * 10**6)]
            begun = time.perf_counter()
            answers = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            watch.report(f"ten of {size} MB ({', '.join(sorted(set(answers)))})", begun)
            time.sleep(2)
        watch.is_over = True


@contextmanager
def served(model: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [sys.executable, "-m", "dovetail", "serve", model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        until = time.monotonic() + 180
        while not answers(url):
            assert server.poll() is None and time.monotonic() < until, "the server did not start"
            time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


class Watch:
    """Two threads: one asks /health, one reads a stream."""

    def __init__(self, url: str):
        self.url, self.is_over = url, False
        self.healths: list[tuple[float, float]] = []  # (when, seconds)
        self.gaps: list[tuple[float, float]] = []
        for work in (self._ask, self._read):
            threading.Thread(target=work, daemon=True).start()

    def _ask(self) -> None:
        with httpx.Client(timeout=120) as client:
            while not self.is_over:
                begun = time.perf_counter()
                client.get(f"{self.url}/health")
                self.healths.append((begun, time.perf_counter() - begun))
                time.sleep(0.05)

    def _read(self) -> None:
        body = dict(prompt="Once upon a time", max_tokens=400, stream=True, ignore_eos=True, temperature=0)
        with httpx.Client(timeout=120) as client:
            while not self.is_over:
                with client.stream("POST", f"{self.url}/v1/completions", content=json.dumps(body), headers=JSON) as r:
                    last = None
                    for line in r.iter_lines():
                        now = time.perf_counter()
                        if line.startswith("data:"):
                            self.gaps += [(now, now - last)] if last else []
                            last = now

    def report(self, name: str, since: float) -> None:
        gaps, healths = (sorted(s for at, s in samples if at >= since) for samples in (self.gaps, self.healths))
        print(
            f"{name}: gap median {1e3 * gaps[len(gaps) // 2]:.0f}, longest {1e3 * gaps[-1]:.0f} ms; "
            f"/health longest {1e3 * healths[-1]:.0f} ms",
            flush=True,
        )


JSON = {"content-type": "application/json"}

if __name__ == "__main__":
    main()
