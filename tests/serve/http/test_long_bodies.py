"""Requests with a long body: others do not wait for them, and they are answered as short ones are."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from serve.servers import MODEL, Script, running

from dovetail.serve.config import ServerLimits
from dovetail.serve.http.long_bodies import LONG

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
WORDS = "the quick brown fox jumps over a lazy dog "
PATIENCE = 15.0  # seconds: what a loaded machine may take; read on the event loop, ten such bodies took 80


@pytest.fixture(scope="module")
def server(tokenizer):
    async def engine():
        return Script(tokenizer, 0.01)

    limits = ServerLimits(body_timeout=600.0)  # ten bodies take turns, on a loaded machine for more than a minute
    with running(engine, tokenizer, limits=limits) as found:
        yield found


def padded(body: dict) -> bytes:
    """Return an equivalent body that is long."""
    return json.dumps(body).encode() + b" " * LONG


def post(server, path, body, **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | options.pop("headers", {})
    return httpx.post(server.url + path, content=content, headers=headers, timeout=600, **options)


def readers() -> list[int]:
    """Return the child processes that read long bodies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, parent = (
                (folder / "cmdline").read_bytes(),
                (folder / "stat").read_text().rpartition(")")[2].split()[1],
            )
        except OSError:
            continue
        if b"long_body_process" in line and int(parent) == os.getpid():
            found.append(int(folder.name))
    return sorted(found)


# --- others go on -----------------------------------------------------------------------------------------------------


def longest_waits(server, work) -> tuple[float, float]:
    """Return the longest time of /health and the longest pause of a stream while `work` runs."""
    done, healths, gaps = threading.Event(), [], []

    def ask():
        with httpx.Client(timeout=120) as client:
            while not done.is_set():
                begun = time.perf_counter()
                assert client.get(server.url + "/health").status_code == 200
                healths.append(time.perf_counter() - begun)
                time.sleep(0.02)

    def stream():
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=120) as answer:
            last = time.perf_counter()
            for _ in answer.iter_lines():
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                if done.is_set():
                    return

    server.engine.texts.append([server.engine.tokenizer.id("a")] * 100_000)
    threads = [threading.Thread(target=each) for each in (stream, ask)]
    for thread in threads:
        thread.start()
    while len(gaps) < 10:
        time.sleep(0.01)
    work()
    done.set()
    for thread in threads:
        thread.join()
    return max(healths), max(gaps)


def test_ten_long_prompts_delay_neither_health_nor_streams(server):
    text = WORDS * (3_000_000 // len(WORDS))
    bodies = [json.dumps({"model": MODEL, "prompt": text}).encode()] * 5
    bodies += [json.dumps({"model": MODEL, "prompt": [[]] * 300_000}).encode()] * 5
    answers = []

    def send():
        threads = [threading.Thread(target=lambda b=b: answers.append(post(server, COMPLETIONS, b))) for b in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    health, gap = longest_waits(server, send)
    assert [answer.status_code for answer in answers] == [400] * 10
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert sorted(codes) == ["context_length_exceeded"] * 5 + ["invalid_value"] * 5
    assert health < PATIENCE, f"/health took {health:.1f} s"
    assert gap < PATIENCE, f"a stream stood still for {gap:.1f} s"


# --- answered as short ones are ---------------------------------------------------------------------------------------

LONG_TEXT = WORDS * 4000
TOO_LONG = {
    COMPLETIONS: {"prompt": LONG_TEXT},
    CHAT: {"messages": [{"role": "user", "content": LONG_TEXT}]},
    "/v1/responses": {"input": LONG_TEXT},
    MESSAGES: {"max_tokens": 4, "messages": [{"role": "user", "content": LONG_TEXT}]},
    "/v1/embeddings": {"input": ["short", LONG_TEXT]},
}


@pytest.mark.parametrize("path", TOO_LONG)
def test_a_too_long_prompt_is_refused_on_every_route(server, path):
    answer = post(server, path, TOO_LONG[path])
    error = answer.json()["error"]
    assert answer.status_code == 400 and len(answer.content) < 500
    if path != MESSAGES:
        assert error["code"] == "context_length_exceeded"


def test_tokens_of_long_texts(server, tokenizer):
    answer = post(server, "/tokenize", {"prompt": LONG_TEXT})
    ids = tokenizer.encode(LONG_TEXT)
    assert answer.status_code == 200 and answer.json()["tokens"] == ids and answer.json()["max_model_len"] == 512
    back = post(server, "/detokenize", padded({"tokens": ids[:5000]}))
    assert back.json() == {"prompt": tokenizer.decode(ids[:5000], skip_special=False)}
    talk = {"messages": [{"role": "user", "content": LONG_TEXT}]}
    counted = post(server, f"{MESSAGES}/count_tokens", talk).json()["input_tokens"]
    assert counted == len(tokenizer.encode_chat(talk["messages"]))


def test_a_text_far_too_long_is_not_tokenized(server):
    answer = post(server, "/tokenize", {"prompt": "a" * 4_200_000})
    assert answer.status_code == 400 and "in parts" in answer.json()["error"]["message"]


VALID = {
    COMPLETIONS: {"prompt": "Once upon", "max_tokens": 5},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    "/v1/embeddings": {"input": ["one", "one and two"]},
}


@pytest.mark.parametrize("path", VALID)
def test_a_valid_one_is_answered_by_the_engine(server, path):
    short, long = post(server, path, VALID[path]), post(server, path, padded(VALID[path]))
    assert short.status_code == long.status_code == 200
    changes = ("id", "created")
    assert {k: v for k, v in short.json().items() if k not in changes} == {
        k: v for k, v in long.json().items() if k not in changes
    }


BAD = {
    "an unknown field": (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "temprature": 1}),
    "a wrong type": (COMPLETIONS, {"prompt": "Hi", "max_tokens": "5"}),
    "another model": (COMPLETIONS, {"model": "other", "prompt": "Hi"}),
    "no such route": ("/v1/nothing", {}),
    "no messages": (CHAT, {}),
    "no tokens of ours": ("/detokenize", {"tokens": [10**9]}),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_long_request_gets_the_same_error(server, case):
    path, body = BAD[case]
    short, long = post(server, path, body), post(server, path, padded(body))
    assert short.status_code == long.status_code >= 400
    assert short.json() == long.json() and short.headers["content-type"] == long.headers["content-type"]


def test_bodies_that_are_not_text(server):
    half = post(server, CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}' + b" " * LONG)
    assert half.status_code == 400 and "surrogate" in half.text
    assert post(server, CHAT, b"{" + b" " * LONG).json()["error"]["code"] == "json_invalid"
    assert post(server, CHAT, b"[" * LONG * 2).status_code == 400


def test_authentication_precedes_reading_a_long_body(tokenizer):
    async def engine():
        return Script(tokenizer)

    others = set(readers())  # of the module's server; it may end meanwhile, after 30 idle seconds
    with running(engine, tokenizer, api_keys=("key",), limits=ServerLimits(max_body_mb=2 * LONG / 2**20)) as server:
        body = padded(VALID[COMPLETIONS])
        assert post(server, COMPLETIONS, body).status_code == 401
        key = {"authorization": "Bearer key"}
        assert post(server, COMPLETIONS, body + b" " * LONG, headers=key).status_code == 413
        chunks = httpx.post(server.url + COMPLETIONS, content=iter([body, body]), headers=key, timeout=60)
        assert chunks.status_code == 413 and not set(readers()) - others
        assert post(server, COMPLETIONS, body, headers=key).status_code == 200
        assert len(set(readers()) - others) == 1
    assert not set(readers()) - others  # it ends with the server


# --- failures ---------------------------------------------------------------------------------------------------


def test_a_reader_that_dies_is_started_again(server):
    body = padded(VALID[COMPLETIONS])
    assert post(server, COMPLETIONS, body).status_code == 200
    (pid,) = readers()
    os.kill(pid, signal.SIGSTOP)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(server, COMPLETIONS, body)))
    thread.start()
    time.sleep(0.3)
    assert httpx.get(server.url + "/health", timeout=10).status_code == 200  # it waits alone
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert answers[0].status_code == 503 and "retry-after" in answers[0].headers
    assert post(server, COMPLETIONS, body).status_code == 200


def test_the_body_of_a_client_that_leaves_is_no_longer_read(server):
    body = padded(VALID[COMPLETIONS])
    assert post(server, COMPLETIONS, body).status_code == 200
    (pid,) = readers()
    os.kill(pid, signal.SIGSTOP)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
    assert post(server, COMPLETIONS, body).status_code == 200  # by another: the first is gone
    assert pid not in readers()
