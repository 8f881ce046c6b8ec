"""A started server: `dovetail serve` as a child process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

START_SECONDS = 600
STOP_SECONDS = 10


@contextmanager
def started(model: str) -> Iterator[str]:
    """Run `dovetail serve MODEL` on a free port of loopback, and yield its URL once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dovetail", "serve", model, "--port", str(port), "--max-num-seqs", "4"]
    print(f"starting {model} ...", flush=True)
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, model)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: subprocess.Popen, url: str, model: str) -> None:
    """Wait until the server is ready; exit where it has ended."""
    for _ in range(2 * START_SECONDS):
        if process.poll() is not None:
            sys.exit(f"`dovetail serve {model}` ended with status {process.returncode}; its last lines say why.")
        try:
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(f"`dovetail serve {model}` was not ready after {START_SECONDS} seconds.")
