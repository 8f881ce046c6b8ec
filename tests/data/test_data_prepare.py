"""Test the token cache: made once, found again, made again after a change, and never left half-written."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from refusals import refuses
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from dovetail.data import encoder as encoders
from dovetail.data import tokenise
from dovetail.data.settings import Data, Source
from dovetail.io.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


def tokenizer(bos=False, eos="</s>") -> Tokenizer:
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, bos="<s>", eos=eos, unk="<unk>")


def data(path, **settings):
    return Data((Source(str(path)),), **({"tokenizer": "bytes"} | settings))


def ids(store):
    return [store.read(i, 0, 1 << 30).tolist() for i in range(len(store))]


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def no_work(monkeypatch):
    """Make tokenisation fail, so that later calls must use the cache."""

    def fail(*args):
        raise AssertionError("tokenised again")

    return lambda: monkeypatch.setattr(tokenise, "tokenise", fail)


def test_bytes_end_with_eos_and_empty_documents_are_dropped(tmp_path):
    texts = ["hé", "", "x"]
    (store,) = tokenise.prepare(data(write(tmp_path / "a.jsonl", texts)), directory=tmp_path / "cache")
    assert ids(store) == [[*"hé".encode(), 256], [ord("x"), 256]]
    assert (store.meta.documents, store.meta.empty, store.meta.tokens, store.meta.text_bytes) == (2, 1, 6, 4)
    assert store.meta.dtype == "uint16"


@pytest.mark.parametrize(
    ("bos", "expected"), [(False, [[3, 4, 2], [5, 2]]), (True, [[1, 3, 4, 2], [1, 5, 2]])], ids=["plain", "bos"]
)
def test_a_models_tokenizer_with_bos_where_it_adds_one(tmp_path, bos, expected):
    path = write(tmp_path / "a.jsonl", ["a b", "c </s>"])  # an end that the text spells out is not doubled
    (store,) = tokenise.prepare(data(path, tokenizer=""), tokenizer(bos), tmp_path / "cache")
    assert ids(store) == expected


def test_a_tokenizer_by_its_folder(tmp_path):
    tokenizer().save(tmp_path / "model")
    (store,) = tokenise.prepare(
        data(write(tmp_path / "a.jsonl", ["a b"]), tokenizer=str(tmp_path / "model")), directory=tmp_path / "cache"
    )
    assert ids(store) == [[3, 4, 2]]
    assert encoders.beside_model("no-folder", "", str(tmp_path / "model")) is not None
    assert encoders.beside_model("no-folder", str(tmp_path)) is None


def test_a_very_long_text_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "LONGEST_TEXT", 20)
    text = "a b c a b\nb a b c\n" * 30 + "c" + " a" * 50
    (tmp_path / "a.txt").write_text(text)
    (store,) = tokenise.prepare(data(tmp_path / "a.txt", tokenizer=""), tokenizer(True), tmp_path / "cache")
    assert ids(store) == [[1, *({"a": 3, "b": 4, "c": 5}[word] for word in text.split()), 2]]


def test_large_vocabularies_take_four_bytes(tmp_path):
    words = {"<unk>": 0, "</s>": 1, "a": 70_000}
    big = Tokenizer(Backend(models.WordLevel(words, unk_token="<unk>")), eos="</s>", unk="<unk>")
    path = write(tmp_path / "a.jsonl", ["a"])
    (store,) = tokenise.prepare(data(path, tokenizer=""), big, tmp_path / "cache")
    assert (store.meta.dtype, ids(store)) == ("uint32", [[70_000, 1]])


def test_processes_make_the_same_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "SMALLEST_PART", 5_000)
    path = write(tmp_path / "a.jsonl", [f"{i} " * (i % 37) for i in range(700)])
    seen = []
    one, two = (
        tokenise.prepare(data(path), None, tmp_path / str(n), lambda *step: seen.append(step), n)[0] for n in (1, 2)
    )
    assert len(one.meta.parts) > 3
    assert one.meta == two.meta
    assert ids(one) == ids(two)
    assert seen[-1][1] == seen[-1][2] == path.stat().st_size // len(one.meta.parts) * len(one.meta.parts)
    assert "tokens" in seen[-1][0]


def test_an_error_in_a_worker_process_is_raised_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "SMALLEST_PART", 5_000)
    path = write(tmp_path / "a.jsonl", ["x" * 99] * 200)
    path.write_text(path.read_text() + "oops\n")
    with refuses(naming="a.jsonl line 201: "):
        tokenise.prepare(data(path), directory=tmp_path / "cache", processes=2)
    assert not [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")]


def test_an_unchanged_corpus_is_cached_after_a_move_too(tmp_path, no_work):
    folder = tmp_path / "texts"
    folder.mkdir()
    write(folder / "a.jsonl", ["a"])
    (first,) = tokenise.prepare(data(folder), directory=tmp_path / "cache")
    no_work()
    assert tokenise.prepare(data(folder), directory=tmp_path / "cache")[0].folder == first.folder
    (tmp_path / "other").mkdir()
    moved = folder.rename(tmp_path / "other" / "texts")
    assert tokenise.prepare(data(moved), directory=tmp_path / "cache")[0].folder == first.folder


def test_changes_of_file_key_or_tokenizer_make_another_cache(tmp_path):
    path, cache = write(tmp_path / "a.jsonl", ["aa"]), tmp_path / "cache"
    folders = [tokenise.prepare(data(path), directory=cache)[0].folder]
    write(path, ["bb"])  # the same size
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    folders.append(tokenise.prepare(data(path), directory=cache)[0].folder)
    assert ids(tokenise.prepare(data(path), directory=cache)[0]) == [[98, 98, 256]]
    folders.append(tokenise.prepare(data(path, tokenizer=""), tokenizer(), cache)[0].folder)
    folders.append(tokenise.prepare(data(path, tokenizer=""), tokenizer(bos=True), cache)[0].folder)
    path.write_text('{"text": "a", "body": "b"}\n')
    folders.append(tokenise.prepare(data(path), directory=cache)[0].folder)
    other = Data((Source(str(path), text_key="body"),), tokenizer="bytes")
    folders.append(tokenise.prepare(other, directory=cache)[0].folder)
    assert len(set(folders)) == len(folders)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, real = write(tmp_path / "a.jsonl", ["a"]), tokenise.tokenise

    def meddle(*args):
        real(*args)
        write(path, ["a", "b"])

    monkeypatch.setattr(tokenise, "tokenise", meddle)
    with refuses(naming="changed while it was being read"):
        tokenise.prepare(data(path), directory=tmp_path / "cache")


KILLED = """
import sys
from dovetail.data import tokenise
from dovetail.data.settings import Data, Source
tokenise.SMALLEST_PART = 50_000
tokenise.prepare(Data((Source("fables:4000"),), "bytes"), directory=sys.argv[1], processes=int(sys.argv[2]))
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_preparation_leaves_no_cache_and_resumes(tmp_path, processes, monkeypatch):
    monkeypatch.setattr(tokenise, "SMALLEST_PART", 50_000)
    fables = data("fables:4000")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(processes)])
    end = time.monotonic() + 30
    while not (done := list(tmp_path.glob(".*.partial/*.npz"))):
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
    tokens = {path: path.with_suffix(".bin").stat().st_mtime_ns for path in done}
    (store,) = tokenise.prepare(fables, directory=tmp_path, processes=1)
    assert {path: (store.folder / f"{path.stem}.bin").stat().st_mtime_ns for path in tokens} == tokens, "made again"
    (clean,) = tokenise.prepare(fables, directory=tmp_path / "clean", processes=1)
    assert np.array_equal(store.offsets, clean.offsets)
    assert ids(store) == ids(clean)
    assert sorted(p.name for p in store.folder.iterdir()) == sorted(p.name for p in clean.folder.iterdir())


def test_two_processes_make_the_same_cache_once(tmp_path):
    code = KILLED.replace("fables:4000", "fables:2000")
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "1"]) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert [p.name.partition("-")[0] for p in tmp_path.iterdir()] == ["fables"]


@pytest.mark.parametrize(
    ("settings", "given", "param", "naming"),
    [
        ({"tokenizer": ""}, None, "data.tokenizer", "the model has no tokenizer"),
        ({"tokenizer": ""}, tokenizer(eos=None), "data.tokenizer", "end-of-text token"),
        ({"tokenizer": "no-such-model"}, None, "model", "'no-such-model'"),
    ],
)
def test_unusable_tokenizers_are_refused(tmp_path, settings, given, param, naming):
    with refuses(param, naming=naming):
        tokenise.prepare(data(write(tmp_path / "a.jsonl", ["a"]), **settings), given, tmp_path / "cache")


def test_a_corpus_without_text_is_refused(tmp_path):
    with refuses("text_key", naming="a.jsonl"):
        tokenise.prepare(data(write(tmp_path / "a.jsonl", ["", ""])), directory=tmp_path / "cache")
