"""Adapters over HTTP with OpenAI's client and a real engine process.

They are listed, chosen by the model field, loaded, replaced, unloaded, and loaded again after the engine's death.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from engine.engines import OPTIONS
from engine.test_adapters import saved
from later import later
from reference_models import reference
from serve.servers import MODEL, hanging, openai_refuses, running

from dovetail.engine.options import EngineOptions
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.supervisor import RestartLimits
from dovetail.serve.remote.wire import LoadedAdapter

openai = later("openai")

pytestmark = pytest.mark.slow  # the engine is started twice

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("adapters")
    return {name: saved(at / name, "llama3.1", 4, seed) for seed, name in enumerate(("red", "green", "blue"))}


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """While this file exists, a step takes at least 30 ms."""
    return tmp_path_factory.mktemp("slow") / "hang.slow"


@pytest.fixture(scope="module")
def server(tokenizer, folders, slow):
    async def engine():
        given = dict(lora_modules={name: folders[name] for name in ("red", "green")}, max_loras=3)
        options = EngineOptions(**OPTIONS, **given, max_decode_steps=1, seed=None)
        return await EngineClient.start(reference("llama3.1")[1], options, limits=RestartLimits(backoff=0.05))

    with hanging(slow.with_suffix("")), running(engine, tokenizer, admin_key="boss") as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def tokens(client, model: str, **more) -> list[int]:
    asked = dict(prompt=PROMPT, max_tokens=8, temperature=0) | more
    answer = client.completions.create(model=model, **asked, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert answer.model == model
    return answer.choices[0].token_ids


def listed(client) -> dict[str, tuple[str | None, int]]:
    return {model.id: (model.parent, model.weights_version) for model in client.models.list()}


def post(server, path: str, status: int = 200, key: str = "boss", **body) -> dict:
    answer = httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def load_only(server, client, **paths: str) -> None:
    """Unload every adapter, then load these."""
    for name in set(listed(client)) - {MODEL}:
        post(server, "/v1/unload_lora_adapter", lora_name=name)
    for name, path in paths.items():
        post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


def test_each_adapter_is_a_model(client):
    assert listed(client) == {MODEL: (None, 0), "red": (MODEL, 1), "green": (MODEL, 2)}
    assert client.models.retrieve("red").root == MODEL
    answers = [tokens(client, name) for name in (MODEL, "red", "green")]
    assert len({tuple(each) for each in answers}) == 3
    assert [tokens(client, name) for name in (MODEL, "red", "green")] == answers, "their prefixes are their own"
    vectors = [client.embeddings.create(model=name, input=PROMPT).data[0].embedding for name in (MODEL, "red")]
    assert vectors[0] != vectors[1]
    with openai_refuses(openai.NotFoundError, "model", "model_not_found"):
        tokens(client, "blue")


def test_an_adapter_with_a_chat_template_is_asked_with_it(scripted, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    scripted.engine.info.adapters = {"red": LoadedAdapter(str(tmp_path), 1), "bare": LoadedAdapter("somewhere", 2)}
    message, url = dict(role="user", content="Hi"), f"{scripted.url}/v1"
    for route in ("chat/completions", "messages"):
        for name in ("red", "bare"):
            httpx.post(f"{url}/{route}", json=dict(model=name, messages=[message], max_tokens=4), timeout=60)
        assert scripted.engine.asked[-2][0] == "[user] Hi" != scripted.engine.asked[-1][0]
    counts = [
        httpx.post(f"{scripted.url}/tokenize", json=dict(model=name, messages=[message]), timeout=60).json()["count"]
        for name in ("red", "bare")
    ]
    assert counts == [len(prompt) for prompt in scripted.engine.prompts[-2:]]


def test_every_route_chooses_by_the_same_name(scripted):
    scripted.engine.info.adapters = {"red": LoadedAdapter("somewhere", 1)}
    message, url = dict(role="user", content="Hi"), f"{scripted.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        parts = client.chat.completions.create(model="red", messages=[message], stream=True)
        assert {part.model for part in parts} == {"red"}
        assert client.chat.completions.create(model="red", messages=[message]).model == "red"
        assert client.completions.create(model="red", prompt="Hi").model == "red"
        assert client.responses.create(model="red", input="Hi").model == "red"
    body = dict(model="red", messages=[message], max_tokens=4)
    assert httpx.post(f"{url}/messages", json=body, timeout=60).json()["model"] == "red"
    assert scripted.engine.adapters == ["red"] * 5


def test_loaded_replaced_and_unloaded(server, client, folders):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    post(server, load, 401, "none", lora_name="blue", lora_path=folders["blue"])
    assert post(server, load, lora_name="blue", lora_path=folders["blue"]) == {"weights_version": 3}
    blue = tokens(client, "blue")
    assert post(server, load, lora_name="blue", lora_path=folders["red"]) == {"weights_version": 4}
    assert tokens(client, "blue") == tokens(client, "red") != blue
    full = post(server, load, 400, lora_name="other", lora_path=folders["red"])["error"]["message"]
    assert "all 3 adapter slots are in use" in full
    assert post(server, load, 400, lora_name=MODEL, lora_path="x")["error"]["param"] == "lora_name"
    assert post(server, unload, lora_name="green") == {"status": "unloaded"}
    assert "'green' is not loaded" in post(server, unload, 400, lora_name="green")["error"]["message"]
    assert listed(client) == {MODEL: (None, 0), "red": (MODEL, 1), "blue": (MODEL, 4)}
    with pytest.raises(openai.NotFoundError):
        tokens(client, "green")


def test_a_long_request_may_use_an_adapter_loaded_later(server, client, folders):
    long = "a " * 100_000  # read by another process, which must know it too
    with openai_refuses(openai.BadRequestError, code="context_length_exceeded"):
        tokens(client, "blue", prompt=long)
    post(server, "/v1/load_lora_adapter", lora_name="late", lora_path=folders["green"])
    with openai_refuses(openai.BadRequestError, code="context_length_exceeded"):
        tokens(client, "late", prompt=long)


@contextmanager
def under_way(server, client, slow, model: str) -> Iterator[Future[list[int]]]:
    """Hold a running request: the engine is paused until the block ends."""
    slow.touch()
    asked = dict(model=model, prompt=PROMPT, max_tokens=200, temperature=0, stream=True)
    while True:
        stream = iter(client.completions.create(**asked, extra_body={"ignore_eos": True, "return_token_ids": True}))
        begun = list(next(stream).choices[0].token_ids)
        post(server, "/pause")
        if server.engine.num_open:
            break
        post(server, "/resume")  # it was done before the pause came
    slow.unlink()
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: [token for part in stream for token in part.choices[0].token_ids])
        assert not rest.done()
        try:
            yield pool.submit(lambda: begun + rest.result())
        finally:
            post(server, "/resume")


def test_a_busy_adapter_is_replaced_and_unloaded(server, client, folders, slow):
    """Running requests keep the old adapter; new ones get the new one, or a refusal."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    load_only(server, client, red=folders["red"])
    red, long = tokens(client, "red"), tokens(client, "red", max_tokens=200)
    with under_way(server, client, slow, "red") as before:
        post(server, load, lora_name="red", lora_path=folders["blue"])
        assert not before.done()
    assert before.result() == long and tokens(client, "red") != red

    post(server, load, lora_name="red", lora_path=folders["red"])
    with under_way(server, client, slow, "red") as before:
        post(server, load, lora_name="red", lora_path=folders["blue"])  # the request under way counts all the same
        busy = post(server, unload, 409, lora_name="red", wait=False)["error"]
        assert busy["code"] == "in_use" and "1 running" in busy["message"]
        with pytest.raises(openai.NotFoundError):
            tokens(client, "red")
        assert not before.done() and "red" not in listed(client)
    assert before.result() == long

    post(server, load, lora_name="red", lora_path=folders["red"])
    with under_way(server, client, slow, "red") as before, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(post, server, unload, lora_name="red")
        while "red" in listed(client):
            time.sleep(0.01)
        assert not waits.done() and not before.done()
        post(server, "/resume")
        assert waits.result() == {"status": "unloaded"} and before.result() == long


def test_a_reload_waits_for_a_free_slot(server, client, folders, slow):
    load = "/v1/load_lora_adapter"
    load_only(server, client, red=folders["red"], second=folders["red"], third=folders["red"])
    long, version = tokens(client, "red", max_tokens=200), listed(client)["red"][1]
    with under_way(server, client, slow, "red") as before, ThreadPoolExecutor(1) as pool:
        busy = post(server, load, 409, lora_name="red", lora_path=folders["blue"], wait=False)["error"]
        assert (busy["param"], busy["code"]) == ("wait", "in_use") and listed(client)["red"][1] == version
        waits = pool.submit(post, server, load, lora_name="red", lora_path=folders["blue"])
        while True:
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": "red", "prompt": PROMPT})
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
            if answer.json()["error"]["code"] == "adapter_replaced":
                break
        assert not waits.done() and not before.done()
        post(server, "/resume")
        assert waits.result()["weights_version"] > version and before.result() == long
    assert tokens(client, "red", max_tokens=200) != long


@pytest.mark.thorough
def test_adapters_are_loaded_again_after_an_engine_restart(server, client, folders):
    """An adapter whose files are gone is not loaded again."""
    load_only(server, client, red=folders["red"], blue=folders["red"], late=folders["green"])
    before, red = listed(client), tokens(client, "red")
    shutil.rmtree(folders["green"])
    os.kill(server.engine.info.pid, signal.SIGKILL)
    end = time.monotonic() + 90
    while server.engine.restarts == 0 or server.engine.trouble:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert listed(client) == {name: each for name, each in before.items() if name != "late"}
    assert tokens(client, "red") == tokens(client, "blue") == red
