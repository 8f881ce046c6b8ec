"""Exceptions inside `dovetail serve`, in real processes: HTTP 500, a logged traceback, the next request answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from xla_flags import flags

from dovetail.io.tokenizer import byte_tokenizer

pytestmark = pytest.mark.slow  # a server and its engine are started

PROGRAM, MESSAGE = Path(__file__).parents[1] / "faulty_server.py", "operands could not be broadcast"
BODY = {"prompt": "Hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CONFIG = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=320, hidden_size=16, intermediate_size=32,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
OPTIONS = (
    "--load-format", "dummy", "--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "16",
    "--kv-cache-memory-bytes", "1048576", "--port", "0", "--served-model-name", "dummy",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A `dovetail serve` process with its address, its log, and the file that names the function to fail."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(folder)
    found = SimpleNamespace(log=folder / "log", fault=folder / "fault")
    command = [sys.executable, str(PROGRAM), str(found.fault), "serve", str(folder), *OPTIONS]
    with open(found.log, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"XLA_FLAGS": flags(1)})
    try:
        found.url = f"{wait_for_address(found.log, process)}/v1/completions"
        found.text = ask(found).json()["choices"][0]["text"]
        yield found
    finally:
        process.terminate()
        process.wait(30)


def wait_for_address(log: Path, process: subprocess.Popen) -> str:
    end = time.monotonic() + 120
    while (found := re.search(r"ready at (http://\S+)", log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return found[1]


def ask(server) -> httpx.Response:
    return httpx.post(server.url, json=BODY, timeout=60)


@pytest.mark.parametrize("kind", ["RuntimeError", "ValueError"])
@pytest.mark.parametrize(
    "where", ["Prompts.encode", "Intake.request", "Scheduler.add", "Scheduler.schedule", "Scheduler.commit"]
)
def test_an_exception_is_a_500_and_the_next_request_is_answered(server, where, kind):
    before = len(server.log.read_text())
    server.fault.write_text(f"{where} {kind}")
    failed = ask(server)
    server.fault.unlink()
    error = failed.json()["error"]
    assert (failed.status_code, error["code"], error["param"]) == (500, "internal_error", None), failed.text
    assert error["request_id"] in error["message"] and MESSAGE not in failed.text
    answer = ask(server)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == server.text
    logged = server.log.read_text()[before:]
    assert "Traceback" in logged and f"{kind}: {MESSAGE}" in logged and error["request_id"] in logged
