"""/v1/score over HTTP: with a reward model in an engine process of its own, and with scripted scores."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import numpy as np
import pytest
from data.conftest import small_tokenizer
from engine.engines import OPTIONS
from engine.test_score import CHAT, PROMPTS, judge, theirs
from serve.servers import MODEL, Script, running

from dovetail.engine.options import EngineOptions
from dovetail.serve.api.pooling import EmbeddingRequest, _embeddings
from dovetail.serve.remote.client import EngineClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scripted(tokenizer):
    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer) as found:
        yield found


def post(server, body: dict, path: str = "/v1/score") -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_number_per_text(scripted, tokenizer, path):
    answer = post(scripted, {"model": MODEL, "input": ["Hello", [5, 6, 7]][1:]}, path)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list", "data": [{"object": "score", "index": 0, "score": 1.5}], "model": MODEL,
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }  # fmt: skip
    both = post(scripted, {"input": ["Hello", "Hello there, you"]}).json()["data"]
    counts = [len(tokenizer.encode(text)) for text in ("Hello", "Hello there, you")]
    assert [(one["index"], one["score"]) for one in both] == [(i, count / 2) for i, count in enumerate(counts)]


def test_many_vectors_do_not_hold_the_event_loop(scripted):
    asked, turns = EmbeddingRequest(input=[[5]] * 500), 0

    async def main():
        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        answer = await _embeddings(scripted.app.state.service, asked, None)
        beside.cancel()
        return answer

    answer = msgspec.json.decode(msgspec.json.encode(scripted.run(main())))
    assert [(each["index"], each["embedding"]) for each in answer["data"]] == [(i, [1.0, 1.0]) for i in range(500)]
    assert turns >= 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": CHAT}, "input"),
        ({"input": ""}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [CHAT, [{"role": "user"}]]}, "messages.1.0.content"),
        ({"input": "a", "tools": []}, "tools"),
        ({"input": "a", "text_1": "b"}, "text_1"),
    ],
)
def test_bad_score_requests_are_refused(scripted, body, param):
    answer = post(scripted, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_reward_model(tmp_path):
    """It scores, and refuses to generate text."""
    own, tokenizer = judge(tmp_path), small_tokenizer()
    tokenizer.save(tmp_path)

    async def engine():
        return await EngineClient.start(tmp_path, EngineOptions(**OPTIONS | {"max_model_len": 128}))

    with running(engine, tokenizer) as server:
        scores = [one["score"] for one in post(server, {"input": PROMPTS}).json()["data"]]
        np.testing.assert_allclose(scores, theirs(own), atol=1e-4)
        ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
        judged = post(server, {"messages": [CHAT, CHAT]}).json()
        assert judged["usage"]["prompt_tokens"] == 2 * len(ids)
        np.testing.assert_allclose([one["score"] for one in judged["data"]], theirs(own, [ids]) * 2, atol=1e-4)
        answer = post(server, {"messages": CHAT[:1]}, "/v1/chat/completions")
        assert (
            answer.status_code == 400 and "a reward model does not generate text" in answer.json()["error"]["message"]
        )
        wrong = post(server, {"input": [[1000]]})
        assert wrong.status_code == 400 and "token ids from 0" in wrong.json()["error"]["message"]


def test_score_requires_a_reward_model(tokenizer):
    from reference_models import reference

    async def engine():
        return await EngineClient.start(reference("llama3.1")[1], EngineOptions(**OPTIONS))

    with running(engine, tokenizer) as server:
        answer = post(server, {"input": [[5, 6]]})
        assert answer.status_code == 400 and "the model is not a reward model" in answer.json()["error"]["message"]
