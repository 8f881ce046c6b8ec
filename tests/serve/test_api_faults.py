"""What goes wrong in the world, against the real server with its real engine process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import openai
import pytest

pytestmark = pytest.mark.slow  # the engine is started twice

LONG = dict(model="smollm2", prompt="Once upon a time", max_tokens=400, temperature=0, extra_body={"ignore_eos": True})


@pytest.fixture(scope="module")
def server(smollm2_gguf, tokenizer):
    """One of our own: it is killed."""
    from serve.servers import running

    from dovetail.serve.client import EngineClient

    async def engine():
        return await EngineClient.start(
            smollm2_gguf, dict(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256)
        )

    with running(engine, tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def load(server) -> tuple[float, float]:
    """(sequences running, share of KV pages in use), as /metrics has them."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    return values["vllm:num_requests_running"], values["vllm:kv_cache_usage_perc"]


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_clients_that_connect_and_vanish_leave_nothing(server, client):
    body = {key: value for key, value in LONG.items() if key != "extra_body"} | dict(ignore_eos=True, stream=True)

    async def vanish(session: httpx.AsyncClient, many: asyncio.Semaphore) -> None:
        async with many, session.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                return

    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as session:
            many = asyncio.Semaphore(8)
            await asyncio.gather(*(vanish(session, many) for _ in range(40)))

    asyncio.run(main())
    until(lambda: load(server) == (0, 0), 10)
    assert client.completions.create(**LONG | dict(max_tokens=4)).choices[0].text


def test_a_reader_that_does_not_read_holds_up_nobody(server, client):
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", timeout=60,
        json={key: value for key, value in LONG.items() if key != "extra_body"} | dict(ignore_eos=True, stream=True),
    ) as slow:  # fmt: skip
        next(slow.iter_bytes())  # then it stops reading
        assert len(client.completions.create(**LONG | dict(max_tokens=16)).choices[0].text) > 10
    until(lambda: load(server)[0] == 0, 10)


def test_kill_9_of_the_engine(server, client):
    """Open streams end with an error, health is red, and the supervisor brings it back."""
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    os.kill(server.engine.info.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    assert time.monotonic() - start < 5, "no stream hangs"
    assert httpx.get(f"{server.url}/health").status_code == 503
    with pytest.raises(openai.InternalServerError):
        client.completions.create(**LONG)
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
    assert client.completions.create(**LONG | dict(max_tokens=4)).choices[0].text
