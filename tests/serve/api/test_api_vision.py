"""A server of a tiny SmolVLM, driven by the clients of OpenAI and Anthropic: its tokens are those of dt.LLM."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

import httpx
import numpy as np
import pytest
from engine.engines import GREEDY, OPTIONS
from engine.test_images import folder_to_chat_with
from later import later
from PIL import Image
from serve.images import data_url, file_of, png
from serve.servers import MODEL, openai_refuses, running

from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.serve.http.start import read_image_processor, read_tokenizer
from dovetail.serve.remote.client import EngineClient

anthropic = later("anthropic")
openai = later("openai")

pytestmark = pytest.mark.slow
SIZES = OPTIONS | dict(max_num_batched_tokens=64, max_decode_steps=1)
CACHE = 500_000  # bytes: about 25 images
TEXT = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_to_chat_with(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def server(folder):
    async def engine():
        return await EngineClient.start(folder, EngineOptions.of(SIZES))

    tokenizer = read_tokenizer(folder)
    options = dict(tool_call_parser="hermes", mm_processor_cache_gb=CACHE / 2**30)
    with running(engine, tokenizer, read_image_processor(folder, tokenizer), **options) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def part(url: str, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_served_tokens_are_those_of_the_offline_engine(folder, client):
    llm = LLM(folder, **SIZES)
    for seed in (0, 1):
        image = np.asarray(Image.open(io.BytesIO(file_of(60, 40, seed))))
        content = [{"type": "image", "image": image}, TEXT, {"type": "image", "image": 255 - image}]
        (offline,) = llm.chat([[{"role": "user", "content": content}]], GREEDY)
        inverse = data_url(_png(255 - image))
        answer = client.chat.completions.create(
            model=MODEL, temperature=0, max_tokens=GREEDY.max_tokens, extra_body={"return_token_ids": True},
            messages=[{"role": "user", "content": [part(png(width=60, height=40, seed=seed)), TEXT, part(inverse)]}],
        )  # fmt: skip
        assert answer.choices[0].token_ids == list(offline.outputs[0].token_ids)
        assert answer.usage.prompt_tokens == len(offline.prompt_token_ids)


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_detail_low_takes_fewer_tokens(client):
    def count(detail: str) -> int:
        messages = [{"role": "user", "content": [part(png(), detail=detail), TEXT]}]
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage.prompt_tokens

    assert count("low") < count("high") == count("auto")


def test_the_clients_stream_about_images(server, client):
    messages = [{"role": "user", "content": [TEXT, part(png())]}]
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    image = {"type": "input_image", "image_url": png(), "detail": "auto"}
    content = [{"type": "input_text", "text": "What?"}, image]
    made = client.responses.create(model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=4)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of()).decode()}
    turns = [{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(model=MODEL, messages=turns, max_tokens=4)
        counted = claude.messages.count_tokens(model=MODEL, messages=turns).input_tokens
    usage = message.usage
    assert (
        counted == usage.input_tokens + usage.cache_read_input_tokens == made.usage.input_tokens > 20
    )  # five tiles of four


def test_bad_images_through_the_client(client):
    for url, code in ((data_url(file_of()[:200]), "image_parse_error"), ("https://a.com/x.png", "invalid_image_url")):
        with openai_refuses(openai.BadRequestError, "messages.0.content.0.image_url", code):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part(url)]}])
    for text in ("<image>", "a<image>b"):
        with openai_refuses(openai.BadRequestError, "messages", "invalid_image"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])


def test_a_prompt_with_images_beyond_the_context_is_refused(server, client):
    most = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    messages = [{"role": "user", "content": [part(png(seed=seed)) for seed in range(most // 20 + 1)]}]
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.chat.completions.create(model=MODEL, messages=messages)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_memory_is_flat_over_many_images(server, client, count):
    """Processed images, features and pages; of 1,000 images also the memory of both processes, over the second half."""
    loader, pids = server.app.state.service.images, (os.getpid(), server.engine._supervisor.child.process.pid)
    sizes = []
    for i in range(0, count, 4):
        if i in (count // 2, count - 4):
            sizes.append([resident(pid) for pid in pids])
        images = [part(png(seed=10_000 * count + i + j)) for j in range(4)]
        messages = [{"role": "user", "content": [*images, TEXT]}]
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        assert 0 < loader._cache._bytes <= CACHE and len(loader._cache._images) <= CACHE // 17_000
    stats = server.run(server.engine.stats())
    assert stats.encoder_rows <= SIZES["max_num_batched_tokens"] and stats.pages_used == 0
    grown = [after - before for before, after in zip(*sizes, strict=True)]
    assert count < 1000 or max(grown) < 4 * 2**20, f"500 images with 9 MB of pixels: {grown}"


def resident(pid: int) -> int:
    """Return the bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
