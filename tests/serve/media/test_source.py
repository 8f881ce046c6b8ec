"""Images as data: URLs and local files."""

from __future__ import annotations

import asyncio
import base64
import os

import numpy as np
import pytest
from refusals import refuses

from dovetail.io.images.item import ImageItem, ProcessedImage
from dovetail.serve.config import ServerConfig, ServerLimits
from dovetail.serve.media import source
from dovetail.serve.media.loader import ProcessedImages
from dovetail.serve.media.source import MediaSources

DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()


def sources(**config) -> MediaSources:
    return MediaSources(ServerConfig(names=("m",), **config))


@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:;base64,", "data:image/png;charset=x;BASE64,"])
def test_data_urls(head):
    assert asyncio.run(sources().fetch(head + TEXT)) is None
    assert sources().read(head + TEXT) == DATA


@pytest.mark.parametrize(
    "url", ["data:", "data:,", "data:image/png,abc", "data:image/png;base64", f"data:image/png;base64,{TEXT[:-1]}",
            f"data:image/png;base64,{TEXT}\n{TEXT}", "data:image/png;base64,é", f"data:image/png;base64,-_{TEXT}"]
)  # fmt: skip
def test_wrong_data_urls(url):
    with refuses(naming="data:"):
        sources().read(url)


def test_the_size_of_a_data_url_is_checked_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(source, "MAX_BYTES", len(DATA))
    assert sources().read(f"data:;base64,{TEXT}") == DATA
    monkeypatch.setattr(source, "MAX_BYTES", len(DATA) - 3)
    monkeypatch.setattr(source.base64, "b64decode", None)
    with refuses(code="image_file_too_large"):
        sources().read(f"data:;base64,{TEXT}")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own" / "a b").mkdir(parents=True)
    (tmp_path / "own" / "a b" / "x.png").write_bytes(DATA)
    (tmp_path / "own-secret.png").write_bytes(DATA)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "own" / "out.png").symlink_to(tmp_path / "own-secret.png")
    (tmp_path / "own" / "in.png").symlink_to(tmp_path / "own" / "a b" / "x.png")
    os.mkfifo(tmp_path / "own" / "pipe")
    return tmp_path


def test_local_files(folder, monkeypatch):
    allowed = sources(allowed_local_media_path=str(folder / "link"))
    for name in ("a%20b/x.png", "in.png", "a%20b/../in.png"):
        assert allowed.read(f"file://{folder}/own/{name}") == DATA
    assert allowed.read(f"file://localhost{folder}/link/in.png") == DATA
    monkeypatch.setattr(source, "MAX_BYTES", 10)
    with refuses(code="image_file_too_large"):
        allowed.read(f"file://{folder}/own/in.png")


@pytest.mark.parametrize(
    "path", ["own-secret.png", "own/out.png", "own/../own-secret.png", "own/%2e%2e/own-secret.png", "own/none.png",
             "own", "own/pipe", "own/in.png%00", "own/in.png?x"]
)  # fmt: skip
def test_other_files_are_refused(folder, path):
    with refuses(naming="file"):
        sources(allowed_local_media_path=str(folder / "own")).read(f"file://{folder}/{path}")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "FILE:/etc/passwd", "file://host/etc/passwd"])
def test_no_local_file_is_read_by_default(folder, url):
    with refuses(naming="--allowed-local-media-path"):
        sources().read(url)
    with refuses(naming="file"):
        sources(allowed_local_media_path=str(folder / "own")).read(url)


def processed(size: int) -> ProcessedImage:
    return ProcessedImage("", (ImageItem(np.zeros((size - 8, 1), np.uint8), np.zeros((1, 2), np.int32), (1, 1), b""),))


def test_the_image_that_was_not_used_for_longest_is_dropped():
    kept = ProcessedImages(300)
    for name in (b"a", b"b", b"c"):
        kept.put(name, processed(100))
    assert kept.get(b"a") is not None
    kept.put(b"d", processed(150))
    assert [kept.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, False, True]
    kept.put(b"e", processed(301))  # larger than all room
    assert kept.get(b"a") is not None and kept.get(b"e") is None


@pytest.mark.parametrize("given", ["4", "image=4", '{"image": -1}', '{"image": true}', '{"video": 1}', "{}"])
def test_the_limit_on_images_is_a_json_object(given):
    with refuses("limit_mm_per_prompt"):
        ServerLimits(limit_mm_per_prompt=given)
    assert ServerLimits(limit_mm_per_prompt='{"image": 0}').max_images == 0
