"""Images over HTTP: refusals name the field and disturb no neighbour; fetches are checked, cancelled and limited."""

from __future__ import annotations

import base64
import io
import struct
import threading
import time
import zlib

import httpx
import numpy as np
import pytest
from PIL import Image
from serve.images import SizeWriter, data_url, file_of, png
from serve.media.test_fetch import PUBLIC, Network, answer, redirect
from serve.servers import MODEL, Script, running

from dovetail.io.images.decode import MAX_BYTES
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.config import ServerLimits
from dovetail.serve.media.fetch import Fetcher

pytestmark = pytest.mark.slow
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
FIELD = "messages.0.content.1.image_url"


@pytest.fixture(scope="module")
def server(tokenizer, tmp_path_factory):
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    talker = Tokenizer(backend, bos=tokenizer.bos, eos=tokenizer.eos, add_bos=True, chat_template=TEMPLATE)
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(file_of(7, 5))

    async def engine():
        return Script(talker, delay=0.002)

    limits = ServerLimits(limit_mm_per_prompt='{"image": 2}')
    options = dict(allowed_media_domains=("a.com",), allowed_local_media_path=str(folder), tool_call_parser="hermes")
    with running(engine, talker, SizeWriter(), limits=limits, **options) as found:
        found.folder = folder
        found.network = Network(**{"a.com/a.png": answer(body=file_of(9, 8))})
        found.names = {"a.com": [PUBLIC]}

        async def resolve(host, port):
            return found.names[host].pop(0) if isinstance(found.names[host][0], list) else found.names[host]

        found.images = found.app.state.service.images
        found.images._sources._fetcher = Fetcher(["a.com"], MAX_BYTES, resolve, found.network)
        yield found


def chat(*urls: str, **more) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}],
    } | more


def asked(server, path: str, body: dict) -> str:
    """Return the text of the prompt that the engine was asked."""
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return server.engine.asked[-1][0]


def refused(server, body: dict, path: str = CHAT, param: str | None = FIELD) -> dict:
    reply = httpx.post(server.url + path, json=body, timeout=120)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text[:300]
    assert param is None or error["param"] == param, error
    assert "0x" not in error["message"] and "Traceback" not in error["message"]
    return error


def saved(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def huge_png() -> bytes:
    """A PNG whose header says 100,000 x 100,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + b"\0" * 64


FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
WHOLE = file_of(64, 64)
BAD = {
    "truncated": data_url(WHOLE[: len(WHOLE) // 2]),
    "a header alone": data_url(WHOLE[:20]),
    "polyglot with ZIP": data_url(WHOLE + b"PK\x05\x06" + bytes(18)),
    "polyglot with PDF": data_url(b"%PDF-1.7\n" + WHOLE),
    "a bomb": data_url(huge_png()),
    "animated": data_url(saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:])),
    "SVG": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "TIFF": data_url(saved(FRAMES[0], "TIFF"), "image/tiff"),
    "text": data_url(b"Hello"),
    "empty": "data:image/png;base64,",
    "not base64": "data:image/png;base64,%%%",
    "no URL": "",
    "a path": "/etc/passwd",
    "a local file": "file:///etc/passwd",
    "outside the folder": "file:///etc/hostname",
    "another host": "https://b.com/a.png",
    "loopback": "http://127.0.0.1:8000/health",
    "the clouds' metadata": "http://169.254.169.254/latest/meta-data",
    "user name": "http://a.com\\@b.com/",
    "redirect to loopback": "http://a.com/loopback",
    "redirect to link-local": "http://a.com/metadata",
    "missing": "http://a.com/none.png",
    "50 MB of base64": "data:image/png;base64," + "A" * 50_000_000,
}


def test_bad_images_are_refused_by_their_field_while_a_neighbour_streams(server):
    pages = {"loopback": "http://127.0.0.1/", "metadata": "http://169.254.169.254/", "none.png": "http://a.com/gone"}
    server.network.pages |= {f"a.com/{name}": redirect(to) for name, to in pages.items()}
    server.network.pages["a.com/gone"] = answer(404)
    server.engine.texts, neighbour = ["one two three " * 60], []

    def stream() -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as reply:
            neighbour.extend(line for line in reply.iter_lines() if line)

    thread = threading.Thread(target=stream)
    thread.start()
    while not neighbour:
        time.sleep(0.01)
    for name, url in BAD.items():
        assert refused(server, chat(url)), name
    assert not {ip for ip, _ in server.network.dialled} - {PUBLIC}
    thread.join(60)
    assert neighbour[-1] == "data: [DONE]" and len(neighbour) > 100


def test_names_that_change_their_address(server):
    server.network.pages["a.com/again"] = redirect("http://a.com/a.png")
    server.names = {"a.com": [[PUBLIC], ["127.0.0.1"]]}
    try:
        assert "public" in refused(server, chat("http://a.com/again"))["message"]
    finally:
        server.names = {"a.com": [PUBLIC]}
    assert "size 9 x 8" in asked(server, CHAT, chat("http://a.com/again"))
    assert not {ip for ip, _ in server.network.dialled} - {PUBLIC}


def test_pictures_of_every_kind_are_read(server):
    gray = Image.fromarray(np.full((4, 6), 30_000, np.uint16))
    clear = saved(Image.new("P", (6, 4)), "PNG", transparency=0)
    turned = Image.new("RGB", (4, 6))
    turned.getexif()[0x0112] = 6
    files = [
        saved(Image.new("CMYK", (6, 4)), "JPEG"), saved(gray, "PNG"), clear, saved(FRAMES[0].resize((6, 4)), "GIF"),
        saved(turned, "JPEG", exif=turned.getexif()), saved(Image.new("RGB", (6, 4)), "WEBP"),
    ]  # fmt: skip
    for file in files:
        assert "size 6 x 4" in asked(server, CHAT, chat(data_url(file)))
    assert "size 7 x 5" in asked(server, CHAT, chat(f"file://{server.folder}/a.png"))


def test_images_are_in_order_and_limited(server):
    found = asked(server, CHAT, chat(png(width=3), png(width=4)))
    assert found.index("What?") < found.index("size 3 x 30") < found.index("size 4 x 30")
    error = refused(server, chat(png(), png(), png()), param="messages.0.content.3.image_url")
    assert "--limit-mm-per-prompt" in error["message"]


def test_an_image_that_is_sent_again_is_not_processed_again(server, monkeypatch):
    process, seen = SizeWriter.__call__, []
    monkeypatch.setattr(SizeWriter, "__call__", lambda self, image, param: seen.append(param) or process(self, image))
    for _ in range(2):
        assert "size 40 x 30" in asked(server, CHAT, chat(png(seed=5), png(seed=5)))
    asked(server, CHAT, chat(png(seed=6)))
    assert 2 <= len(seen) <= 3  # the two of the first request may have been processed at the same time


def test_a_client_that_leaves_ends_its_fetch(server):
    server.network.pages["a.com/slow"] = b"forever"
    before = server.network.closed
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=chat("http://a.com/slow"), timeout=0.5)
    end = time.monotonic() + 5
    while server.network.closed == before and time.monotonic() < end:
        time.sleep(0.02)
    assert server.network.closed == before + 1


def test_images_of_the_other_apis(server):
    data = base64.b64encode(file_of(3, 2)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image, text = {"type": "image", "source": source}, {"type": "text", "text": "a plot"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "draw", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text, image], "is_error": True}
    messages = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [call]}]
    found = asked(server, MESSAGES, {"messages": [*messages, {"role": "user", "content": [result]}], "max_tokens": 4})
    assert found.index("error") < found.index("a plot") < found.index("size 3 x 2")
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [part]}
    called = {"type": "function_call", "call_id": "a", "name": "draw", "arguments": "{}"}
    assert "size 3 x 2" in asked(server, RESPONSES, {"input": [{"role": "user", "content": [part]}]})
    assert "size 3 x 2" in asked(server, RESPONSES, {"input": [called, output]})


def test_where_images_are_refused(server):
    bad = "data:image/png;base64,AAAA"
    part = {"type": "input_image", "image_url": bad}
    user = {"role": "user", "content": [part]}
    refused(server, {"input": [user]}, RESPONSES, "input.0.content.0.image_url")
    refused(server, {"input": [user | {"role": "assistant"}]}, RESPONSES, "input.0.content")
    block = {"type": "image", "source": {"type": "url", "url": bad}}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 4}
    assert "messages.0.content.0.source" in refused(server, body, MESSAGES, None)["message"]
    system = chat(png())["messages"][0] | {"role": "system"}
    refused(server, {"messages": [system]})
    refused(server, {"messages": [chat(bad)["messages"][0]]}, "/tokenize")


def test_text_models_refuse_images_by_name(scripted):
    refused(scripted, chat(png()))
    models = httpx.get(f"{scripted.url}/v1/models").json()["data"]
    assert models[0]["input_modalities"] == ["text"]


def test_models_say_that_they_take_images(server):
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert models[0]["input_modalities"] == ["text", "image"]
