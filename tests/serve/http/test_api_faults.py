"""Lost clients and a killed engine, with a real engine process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
from engine.engines import OPTIONS
from later import later
from reference_models import reference
from serve.servers import hanging, running

from dovetail.engine.options import EngineOptions
from dovetail.serve.remote.client import EngineClient

openai = later("openai")

pytestmark = pytest.mark.slow  # the engine is started twice

LONG = dict(model="smollm2", prompt=[5, 6, 7, 8] * 4, max_tokens=200, temperature=0, extra_body={"ignore_eos": True})
BODY = {key: value for key, value in LONG.items() if key != "extra_body"} | dict(ignore_eos=True, stream=True)


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """Return a file: while it exists, the engine takes no step."""
    return tmp_path_factory.mktemp("faults") / "gate"


@pytest.fixture(scope="module")
def server(tokenizer, gate):
    """A server of this module, because its engine is killed."""

    async def engine():
        return await EngineClient.start(
            reference("llama3.1")[1], EngineOptions(**OPTIONS, max_decode_steps=1, seed=None)
        )

    with hanging(gate), running(engine, tokenizer) as server:
        server.drawn = drawn(server)
        yield server


def drawn(server) -> list[int]:
    """Return tokens sampled without a seed, as the first request of this engine."""
    body = dict(prompt=[5, 6, 7, 8], max_tokens=16, temperature=1.5, ignore_eos=True, return_token_ids=True)
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def stats(server):
    return server.run(server.engine.stats())


def is_at_rest(server) -> bool:
    now = stats(server)
    return (now.running, now.waiting, now.pages_used, len(server.app.state.service.inflight)) == (0, 0, 0, 0)


def test_the_pages_of_a_disconnected_client_are_free_one_step_later(server, gate):
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60, json=BODY) as stream:
        parts = stream.iter_bytes()  # referenced: when it is collected, it closes the stream
        next(parts)
        gate.touch()  # the engine is in a step now, or about to be
        time.sleep(0.1)
        before = stats(server)
        assert before.running == 1 and before.pages_used > 0
    until(lambda: not len(server.app.state.service.inflight), 5)
    time.sleep(0.1)
    assert stats(server).pages_used == before.pages_used, "it is in that step still"
    gate.unlink()
    until(lambda: is_at_rest(server), 10)
    assert stats(server).steps <= before.steps + 1
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^vllm:num_requests_running.* 0$", metrics, re.M)
    assert re.search(r"^vllm:kv_cache_usage_perc.* 0.0$", metrics, re.M)


async def vanish(server, kind: int) -> None:
    """Connect and disconnect: during the request, right after it, or at the first byte of the answer; by FIN or RST."""
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + body
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(request[: len(request) // 2] if kind % 4 == 0 else request)
    await writer.drain()
    if kind % 4 == 3:
        assert (await reader.read(100)).startswith(b"HTTP/1.1 200")
    if kind % 8 < 4:
        writer.transport.abort()
    else:
        writer.close()


def resources(server) -> dict[str, int]:
    """Return the counts that a leak would raise: files, tasks, memory in MiB."""
    pids = {"http": os.getpid(), "engine": server.engine.info.pid}
    files = {f"files of {name}": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}
    memory = {f"memory of {name}": _resident(pid) for name, pid in pids.items()}

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    return files | memory | {"tasks": server.run(tasks()), "streams": server.engine.num_open}


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_a_thousand_clients_that_connect_and_vanish_leave_nothing(server, client):
    async def crowd(count: int) -> None:
        many = asyncio.Semaphore(100)

        async def one(kind: int) -> None:
            async with many:
                await vanish(server, kind)

        await asyncio.gather(*map(one, range(count)))

    asyncio.run(crowd(64))
    until(lambda: is_at_rest(server), 20)
    before = resources(server)
    asyncio.run(crowd(1000))
    until(lambda: is_at_rest(server) and resources(server)["tasks"] <= before["tasks"], 20)
    after = resources(server)
    grown = {name: after[name] - before[name] for name in before}
    assert all(count <= (32 if name.startswith("memory") else 0) for name, count in grown.items()), grown
    assert client.completions.create(**LONG | dict(max_tokens=4)).choices[0].text


def test_a_client_that_does_not_read_delays_no_other(server, client):
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60, json=BODY) as slow:
        parts = slow.iter_bytes()
        next(parts)  # then it stops reading
        assert client.completions.create(**LONG | dict(max_tokens=16)).usage.completion_tokens == 16
    until(lambda: is_at_rest(server), 10)


def test_kill_9_of_the_engine(server, client):
    """Open streams end with an error, /health is 503, new requests are refused at once, and the supervisor restarts it:
    ready when it has its weights, and drawing other samples than before for requests without a seed."""
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    os.kill(server.engine.info.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    assert time.monotonic() - start < 60, "no stream hangs"
    assert httpx.get(f"{server.url}/health").status_code == 503
    with pytest.raises(openai.InternalServerError) as sent_away:
        client.completions.create(**LONG)
    assert time.monotonic() - start < 60 and sent_away.value.response.headers["retry-after"] == "5"
    not_yet = httpx.get(f"{server.url}/ready")
    assert not_yet.status_code == 503 and not_yet.headers["retry-after"] == "5"
    assert "started again" in not_yet.json()["error"]["message"]
    assert "vllm:num_requests_running" not in httpx.get(f"{server.url}/metrics").text
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 60)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert drawn(server) != server.drawn
    assert client.completions.create(**LONG | dict(max_tokens=4)).choices[0].text
