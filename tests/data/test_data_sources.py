"""Test that every format returns the documents written into it, and that unreadable files are refused."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from refusals import refuses

from dovetail.core.errors import FileError, MissingFileError, UserError
from dovetail.data import corpus, sources
from dovetail.data.readers import documents as texts_of
from dovetail.data.settings import Source
from dovetail.data.sources import find, split

TEXTS = ["One.", "Zwei: schöne Grüße\nauf zwei Zeilen", "三 🦊", '{"not": json', "", "last " * 50]


def documents(path, largest=1 << 20, **settings):
    source = Source(str(path), **settings)
    spans = split(find(source), source, largest)
    return [text for span in spans for text, _ in texts_of(span, source.text_key)]


def write_jsonl(path, texts, key="text"):
    lines = "".join(json.dumps({"id": i, key: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


def write_parquet(path, texts, key="text"):
    pq.write_table(pa.table({"id": list(range(len(texts))), key: texts}), path, row_group_size=2)


def write_array_record(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_hf(folder, texts, key="text"):
    """As `datasets.Dataset.save_to_disk` lays it out, in two shards."""
    folder.mkdir()
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (texts[:3], texts[3:]), strict=True):
        table = pa.table({key: part})
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_text_files_are_one_document_each_in_the_order_of_their_names(tmp_path):
    for i, text in reversed(list(enumerate(TEXTS))):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / ".hidden.txt").write_text("not this")
    assert documents(tmp_path) == TEXTS
    assert documents(tmp_path / "1.txt") == TEXTS[1:2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson"])
def test_jsonl(tmp_path, name):
    write_jsonl(tmp_path / name, TEXTS)
    assert documents(tmp_path / name) == documents(tmp_path) == TEXTS


@pytest.mark.parametrize("largest", [1, 7, 64, 100, 1000])
def test_a_large_jsonl_file_is_cut_between_lines(tmp_path, largest):
    write_jsonl(tmp_path / "a.jsonl", TEXTS * 3)
    assert documents(tmp_path / "a.jsonl", largest) == TEXTS * 3


def test_jsonl_with_another_key_blank_lines_and_no_last_newline(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n\n{"body": null}\n{"body": "y"}')
    assert documents(tmp_path / "a.jsonl", text_key="body") == ["x", "", "y"]


@pytest.mark.parametrize("largest", [1, 1 << 20])
def test_parquet_by_row_groups(tmp_path, largest):
    write_parquet(tmp_path / "a.parquet", [*TEXTS, None])
    assert documents(tmp_path, largest) == [*TEXTS, ""]


@pytest.mark.parametrize("largest", [1, 1 << 20])
def test_array_record_of_text_and_of_json(tmp_path, largest):
    as_json = [json.dumps({"text": text}).encode() for text in TEXTS]
    write_array_record(tmp_path / "a.array_record-00000-of-00002", [text.encode() for text in TEXTS])
    write_array_record(tmp_path / "a.array_record-00001-of-00002", as_json)
    assert documents(tmp_path, largest) == TEXTS * 2


def test_hugging_face_dataset_on_disk(tmp_path):
    write_hf(tmp_path / "train", TEXTS)
    assert documents(tmp_path / "train") == documents(tmp_path / "train", format="hf") == TEXTS


def test_arrow_file_format(tmp_path):
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    assert documents(tmp_path / "a.arrow") == TEXTS


def test_a_pattern_and_a_given_format_choose_among_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "code.py").write_text("x = 1")
    assert documents(tmp_path / "*.jsonl") == ["a"]
    assert documents(tmp_path, format="jsonl") == ["a"]
    assert documents(tmp_path / "*.py", format="text") == ["x = 1"]


def test_the_built_in_corpus_is_deterministic_and_varied():
    texts = documents("fables:300")
    assert texts == documents("fables", format="corpus")[:300]
    assert len(set(texts)) > 290
    assert texts[0].startswith("Clara carried a map to the town. She passed the gate, then the quarry, then the tower.")
    assert all(text.isascii() and "  " not in text and "None" not in text for text in texts)
    whole = "".join(corpus.documents("fables", 0, corpus.DOCUMENTS))
    assert 2e6 < len(whole) < 4e6
    for have, gone, left in re.findall(r"(\d+) - (\d+) = (\d+)", whole):
        assert int(have) - int(gone) == int(left) > 0


# --- what goes wrong --------------------------------------------------------------------------------------------------


def lines(*lines):
    return ("a.jsonl", b"".join(line + b"\n" for line in lines))


BROKEN = {
    "not JSON": (
        lines(b'{"text": "x"}', b"", b"{oops"),
        "a.jsonl line 3: ",
    ),
    "no object": (lines(b"[1]"), "line 1: expected a JSON object with the key 'text', got list"),
    "half a pair": (lines(b'{"text": "a\\ud800b"}'), "line 1: "),
    "not UTF-8 lines": (lines(b'{"text": "a"}', b'{"text": "\xff"}'), "line 2: expected UTF-8, got byte 0xff"),
    "not UTF-8 text": (("a.txt", b"one\ntwo \xe9"), "a.txt line 2: expected UTF-8, got byte 0xe9"),
}
INCOMPLETE = {
    "a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9],
    "a.parquet": b"PAR1 torn",
    "a.arrow": b"ARROW torn",
    "a.array_record": b"torn" * 99,
}


@pytest.mark.parametrize("case", BROKEN)
def test_unreadable_records_are_refused_with_file_and_line(case, tmp_path):
    (name, content), naming = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with refuses(naming=naming):
        documents(tmp_path / name)


@pytest.mark.parametrize(("record", "naming"), [(b'{"body": "x"}', "line 1: "), (b'{"text": 5}', "got int")])
def test_records_without_text_under_the_key_are_refused(record, naming, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(record)
    with refuses("text_key", naming=naming):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_files_are_refused(name, tmp_path):
    (tmp_path / name).write_bytes(INCOMPLETE[name])
    with refuses(None, FileError, naming=name):
        documents(tmp_path / name)


def test_files_of_another_or_an_unknown_format_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    with refuses("format", MissingFileError, naming="a.bin"):
        documents(tmp_path / "a.bin")
    (tmp_path / "a.txt").write_bytes(b"Hello")
    with refuses(naming="set format to the format of the file"):
        documents(tmp_path / "a.txt", format="jsonl")


def test_line_numbers_are_right_in_a_split_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 50 + b"oops\n" + b'{"text": "x"}\n' * 9)
    with refuses(naming="line 51"):
        documents(tmp_path / "a.jsonl", 100)


def test_missing_columns_and_columns_without_text_are_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS, key="body")
    with refuses("text_key", naming="got 'id', 'body'"):
        documents(tmp_path)
    with refuses("text_key", naming="got int64"):
        documents(tmp_path, text_key="id")
    write_hf(tmp_path / "hf", TEXTS, key="body")
    with refuses("text_key", naming="got 'body'"):
        documents(tmp_path / "hf")


def test_incomplete_hugging_face_folders_are_refused(tmp_path):
    write_hf(tmp_path / "train", TEXTS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with refuses("path", naming="(train, test)"):
        documents(tmp_path)
    (tmp_path / "train" / "data-00001-of-00002.arrow").unlink()
    with refuses(None, MissingFileError, naming="data-00001-of-00002.arrow"):
        documents(tmp_path / "train")


def test_several_formats_in_a_folder_are_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("about")
    with refuses("format", naming="(jsonl, text)"):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("path", "settings", "kind", "naming"),
    [
        ("nowhere", {}, MissingFileError, "'nowhere'"),
        ("gs://bucket/x", {}, UserError, "mount the bucket"),
        ("fable", {"format": "corpus"}, UserError, "did you mean 'fables'"),
        ("fables:some", {}, UserError, "'fables:some'"),
        ("fables:0", {}, UserError, "'fables:0'"),
    ],
)
def test_paths_without_data_are_refused(path, settings, kind, naming):
    with refuses("path", kind, naming=naming):
        documents(path, **settings)


def test_datasets_of_the_hub_are_read_by_split_and_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "fetch_dataset", lambda hub_id, patterns: tmp_path / hub_id)
    files = (
        "org/one/README.md", "org/one/train.jsonl", "org/one/test.jsonl", "org/all/part.jsonl",
        "org/many/main/train-0.jsonl", "org/many/main/test-0.jsonl", "org/many/other/train-0.jsonl",
    )  # fmt: skip
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, [name]) if name.endswith(".jsonl") else path.write_text("about it")
    many = "hf://datasets/org/many"
    wanted = {
        "org/one": ["train.jsonl"], "org/all": ["part.jsonl"], "hf://datasets/org/one/test.jsonl": ["test.jsonl"],
        f"{many}/main": ["main/train-0.jsonl"], f"{many}/*/test-*": ["main/test-0.jsonl"],
    }  # fmt: skip
    for path, ends in wanted.items():
        texts = documents(path)
        assert len(texts) == len(ends) and all(map(str.endswith, texts, ends)), path
    with refuses("path", naming="hf://datasets/org/many/main"):
        documents("org/many")
    with refuses("path", MissingFileError, naming="test.jsonl, train.jsonl"):
        documents("hf://datasets/org/one/no*")


def test_a_dataset_that_is_not_cached_is_refused_with_the_pull_command(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refuses(None, FileError, naming="`dovetail pull org/absent --dataset`"):
        find(Source("org/absent"))
    with refuses("path", MissingFileError, naming="'org/absent.jsonl'"):
        find(Source("org/absent.jsonl"))
