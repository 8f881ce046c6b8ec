"""What goes wrong in the world, against the real server with its real engine process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest
from engine.engines import OPTIONS
from reference_models import reference
from serve.servers import hanging, running

from dovetail.serve.client import EngineClient

pytestmark = pytest.mark.slow  # the engine is started twice

LONG = dict(model="smollm2", prompt=[5, 6, 7, 8] * 4, max_tokens=200, temperature=0, extra_body={"ignore_eos": True})
BODY = {key: value for key, value in LONG.items() if key != "extra_body"} | dict(ignore_eos=True, stream=True)


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """While this file is there, the engine takes no step."""
    return tmp_path_factory.mktemp("faults") / "gate"


@pytest.fixture(scope="module")
def server(tokenizer, gate):
    """One of our own: it is killed."""

    async def engine():
        return await EngineClient.start(reference("llama3.1")[1], OPTIONS | dict(multi_step=False))

    with hanging(gate), running(engine, tokenizer) as server:
        yield server


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


def test_who_disconnects_has_no_pages_a_step_later(server, gate):
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60, json=BODY) as stream:
        parts = stream.iter_bytes()  # to be kept: it closes the stream with itself
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
    """Connect and go away: amid the request, right after it, or with the first of the answer; by a FIN or an RST."""
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


def held(server) -> dict[str, int]:
    """What a leak would show in: files, tasks, memory in MiB."""
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
    before = held(server)
    asyncio.run(crowd(1000))
    until(lambda: is_at_rest(server) and held(server)["tasks"] <= before["tasks"], 20)
    after = held(server)
    grown = {name: after[name] - before[name] for name in before}
    assert all(count <= (32 if name.startswith("memory") else 0) for name, count in grown.items()), grown
    assert client.completions.create(**LONG | dict(max_tokens=4)).choices[0].text


def test_a_reader_that_does_not_read_holds_up_nobody(server, client):
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60, json=BODY) as slow:
        parts = slow.iter_bytes()
        next(parts)  # then it stops reading
        assert client.completions.create(**LONG | dict(max_tokens=16)).usage.completion_tokens == 16
    until(lambda: is_at_rest(server), 10)


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
