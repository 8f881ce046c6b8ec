"""Started servers: `dovetail serve` in child processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

START_SECONDS = 600
STOP_SECONDS = 10
OPTIONS = ("--max-num-seqs", "4", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(2**30))


@contextmanager
def started(models: Sequence[str]) -> Iterator[dict[str, str]]:
    """Run `dovetail serve MODEL` for each model on a free port of loopback, and yield their URLs once all are ready."""
    processes: dict[str, subprocess.Popen] = {}
    urls: dict[str, str] = {}
    try:
        for model in dict.fromkeys(models):
            port = _free_port()
            print(f"starting {model} ...", flush=True)
            command = [sys.executable, "-m", "dovetail", "serve", model, "--port", str(port), *OPTIONS]
            processes[model], urls[model] = subprocess.Popen(command), f"http://127.0.0.1:{port}"
        for model, process in processes.items():
            _wait(process, urls[model], model)
        yield urls
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait(process: subprocess.Popen, url: str, model: str) -> None:
    """Wait until the server is ready; exit where it has ended."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"`dovetail serve {model}` ended with status {process.returncode}; its last lines say why.")
        try:
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(f"`dovetail serve {model}` was not ready after {START_SECONDS} seconds.")
