"""Test rows of examples: the loss mask, and that rows depend only on (data, seed, step) on any number of hosts."""

import dataclasses
import json
import tracemalloc
from itertools import islice

import jax
import numpy as np
import pytest
from data.conftest import CHATML
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.data.example_encoder import ExampleEncoder, example_encoder
from dovetail.data.example_rows import open_examples
from dovetail.data.examples import example
from dovetail.data.records import from_list
from dovetail.data.settings import Keys, TuningData, TuningSource
from dovetail.train.rows import Rows

pytestmark = pytest.mark.slow

LENGTH, BATCH = 96, 4


def turn(i, words=1):
    return [{"role": "user", "content": f"who {i}"}, {"role": "assistant", "content": "fox " * words + str(i)}]


def chats(count=40):
    return [{"messages": turn(i, i % 9 + 1)} for i in range(count)]


def pairs(count=20):
    return [{"prompt": turn(i)[:1], "chosen": "fox " * (i % 5 + 1), "rejected": "dog " * 4} for i in range(count)]


@pytest.fixture
def opened(tokenizer):
    def call(records, kind="sft", length=LENGTH, batch=BATCH, columns=(), hosts=(0, 1), packing=True, **settings):
        data = TuningData(**settings)
        return open_examples(data, length, batch, tokenizer, kind, *hosts, columns, records, packing=packing)

    return call


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def segments(batch):
    """(row, number, places) of each document of a batch, in order."""
    for row in range(len(batch.tokens)):
        ids = batch.segment_ids[row]
        for segment in range(1, ids.max() + 1):
            found = np.flatnonzero(ids == segment)
            yield row, segment, slice(found[0], found[-1] + 1)


def epoch(rows):
    return [rows.batch(step) for step in range(rows.steps_per_epoch)]


# --- what a row holds -------------------------------------------------------------------------------------------------


def test_the_loss_is_on_the_assistants_tokens_and_the_end_of_its_turn(opened, tokenizer):
    rows, held_out, stats = opened(chats(3), batch=1)
    assert held_out is None and stats.records == stats.documents == 3
    batch = rows.batch(0)
    for row, _, where in segments(batch):
        text = tokenizer.decode(batch.targets[row, where][batch.loss_mask[row, where] > 0], skip_special=False)
        assert text.startswith("fox ") and text.endswith("<|im_end|>") and "who" not in text
        assert (batch.positions[row, where] == np.arange(where.stop - where.start)).all()
        assert batch.loss_mask[row, where.stop - 1] == 0
    assert stats.trained == sum(b.loss_mask.sum() for b in epoch(rows))
    assert (batch.loss_mask[batch.segment_ids == 0] == 0).all()
    assert batch.columns == {} and batch.loss_mask.dtype == np.float32 and batch.tokens.dtype == np.int32


def test_every_document_comes_once_an_epoch_whole_and_in_another_order(opened):
    rows, _, stats = opened(chats(), batch=1, columns=("document",))
    orders = []
    for number in range(2):
        start = number * rows.rows_per_epoch
        seen = []
        for step in range(start, start + rows.rows_per_epoch):
            batch = rows.batch(step)
            assert rows.documents(step) == batch.segment_ids.max()
            for row, _, where in segments(batch):
                (document,) = set(batch.columns["document"][row, where])
                assert np.array_equal(batch.tokens[row, where], rows.examples.read(document - 1, 0, LENGTH))
                seen.append(document)
        assert sorted(seen) == list(range(1, stats.documents + 1))
        orders.append(seen)
    assert orders[0] != orders[1]
    assert (batch.columns["document"][batch.segment_ids == 0] == 0).all()
    assert rows.padding[0] < 0.3


def test_a_pair_is_two_segments_side_by_side(opened):
    rows, _, stats = opened(pairs(), "preference", columns=("document",))
    assert stats.documents == 40
    before = -1
    for batch in epoch(rows):
        for row, segment, where in segments(batch):
            document = batch.columns["document"][row, where.start] - 1
            assert document % 2 == (segment - 1) % 2, "the chosen one is the odd segment"
            if segment % 2 == 0:
                assert document == before + 1
            before = document


def test_labels_are_on_every_token(opened):
    records = [{"prompt": "who", "completion": f"fox {i}", "label": i % 3 == 0} for i in range(12)]
    rows, _, _ = opened(records, "unpaired", columns=("document",))
    for batch in epoch(rows):
        for row, _, where in segments(batch):
            document, mismatched = divmod(batch.columns["document"][row, where.start] - 1, 2)
            label = 0 if mismatched else 1 if document % 3 == 0 else -1
            assert (batch.columns["label"][row, where] == label).all()
        assert batch.columns["label"].dtype == np.float32
        assert (batch.columns["label"][batch.segment_ids == 0] == 0).all()


def test_beside_an_unpaired_example_is_its_prompt_with_the_completion_of_another(opened, tokenizer):
    """TRL's rotation where prompts differ; two completions of one prompt are not taken for each other's."""
    prompts, answers = ["who", "the", "the", "lazy"], [" fox", " dog", " dog fox", " dog dog"]
    records = [{"prompt": p, "completion": a, "label": True} for p, a in zip(prompts, answers, strict=True)]
    rows, _, stats = opened(records, "unpaired")
    text, trained = [], []
    for document in range(8):
        ids, mask = rows.examples.read(document, 0, LENGTH), rows.examples.trained(document)
        assert ids[-1] == tokenizer.eos_id
        text.append(tokenizer.decode(ids[:-1].tolist()))
        trained.append(tokenizer.decode(ids[mask][:-1].tolist()))
    assert text[::2] == [p + a for p, a in zip(prompts, answers, strict=True)] and trained[::2] == answers
    others = [" dog dog", " fox", " fox", " dog fox"]
    assert text[1::2] == [p + a for p, a in zip(prompts, others, strict=True)] and trained[1::2] == others
    assert stats.documents == 4


@pytest.mark.parametrize(("prompt", "answer"), [(4, 20), (20, 4), (22, 22)])
def test_a_long_unpaired_example_leaves_room_for_the_mismatched_one(opened, prompt, answer):
    records = [{"prompt": f"{word} " * prompt, "completion": " dog" * answer, "label": True} for word in ("fox", "the")]
    rows, _, _ = opened(records, "unpaired")
    sizes = np.diff(rows.examples.offsets).reshape(-1, 2)
    assert (sizes.sum(1) <= LENGTH).all() and (sizes[:, 0] <= LENGTH * 3 // 4).all()
    assert all(rows.examples.trained(document)[1:].any() for document in range(len(rows.examples)))


def test_columns_from_arrays(opened):
    rows, _, _ = opened(pairs(), "preference", columns=("document",))
    count, sizes = len(rows.examples), np.diff(rows.examples.offsets)
    per_document = np.random.default_rng(0).normal(size=count)
    per_token = [np.arange(size) * 0.5 + i for i, size in enumerate(sizes)]
    more = rows.with_column("reference", per_document).with_column("teacher", np.concatenate(per_token))
    assert sorted(rows.batch(0).columns) == ["document"], "the rows it came from stay as they were"
    batch = more.batch(3)
    for row, _, where in segments(batch):
        document = batch.columns["document"][row, where.start] - 1
        assert np.allclose(batch.columns["reference"][row, where], per_document[document])
        assert np.allclose(batch.columns["teacher"][row, where], per_token[document])
    assert batch.columns["reference"].dtype == np.float32
    with pytest.raises(AssertionError, match="column 'reference': expected 40 or"):
        rows.with_column("reference", np.zeros(3))


def test_iterating_over_every_document(opened):
    rows, held_out, stats = opened(pairs(), "preference", held_out=0.3)
    for one in (rows, held_out):
        found = np.concatenate([batch.columns["document"].ravel() for batch in epoch(one.every_document())])
        assert set(found) == set(range(stats.documents + 1))


# --- a function of (data, seed, step) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_hosts_together_read_what_one_reads_alone_from_any_step_on(opened, kind):
    records = chats() if kind == "sft" else pairs()
    alone, _, _ = opened(records, kind, columns=("document",))
    several = [opened(records, kind, columns=("document",), hosts=(i, 2))[0] for i in range(2)]
    for step in (0, 5, 31):
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *(rows.batch(step) for rows in several))
        assert same(joined, alone.batch(step))
    ahead = alone.iterate(7)
    assert all(same(found, alone.batch(step)) for step, found in enumerate(islice(ahead, 3), 7))
    ahead.close()
    other, _, _ = opened(records, kind, columns=("document",), seed=1)
    assert not same(other.batch(0), alone.batch(0))


def test_fingerprints_depend_on_the_examples_and_not_on_the_file(tokenizer, tmp_path):
    """A file written another way has the same ones; one more example, or another label, does not."""

    def found(records, kind, spaces=True):
        separators = None if spaces else (",", ":")
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(r, separators=separators) + "\n" for r in records))
        data = TuningData(path=str(tmp_path / "a.jsonl"))
        return open_examples(data, LENGTH, BATCH, tokenizer, kind)[0].fingerprints

    before = found(chats(4), "sft")
    assert list(before) == [f"data {tmp_path / 'a.jsonl'}"]
    assert before == found(chats(4), "sft", spaces=False) != found(chats(5), "sft")
    rated = [{"prompt": "fox", "completion": " dog", "label": label} for label in (True, False)]
    assert found(rated, "unpaired") != found([rated[0], rated[0]], "unpaired")


def test_rows_satisfy_the_trainers_protocol(opened):
    rows: Rows = opened(chats())[0]
    assert rows.documents(0) >= 1


def test_held_out_records_are_set_apart(opened):
    train, held_out, stats = opened(chats(60), columns=("document",), held_out=0.2)
    assert held_out is not None
    one, other = (
        {int(d) for batch in epoch(rows) for d in np.unique(batch.columns["document"]) if d}
        for rows in (train, held_out)
    )
    assert not one & other and len(one | other) == stats.documents and 4 < len(other) < 24
    again = opened(chats(60), columns=("document",), held_out=0.2, seed=5)[1]
    assert other == {int(d) for batch in epoch(again) for d in np.unique(batch.columns["document"]) if d}
    _, rows, _ = opened(chats(60), held_out=2)
    assert rows is not None and 1 <= rows.rows_per_epoch <= 4
    with refuses("data.held_out", RecipeError, naming="held_out=50"):
        opened(chats(3), held_out=50)


def test_the_turns_of_a_conversation_are_held_out_together(opened, make_tokenizer):
    """Answers begin with newlines that would merge with the prompt's, so each turn becomes a separate document."""
    messages = [{"role": r, "content": c} for r, c in [("user", "who"), ("assistant", "\n\nfox")] * 3]
    settings = TuningData(held_out=0.3)
    records = [{"messages": messages} for _ in range(20)]
    train, held_out, stats = open_examples(settings, LENGTH, 1, make_tokenizer(), "sft", 0, 1, ["document"], records)
    assert stats.split == 20 and stats.documents == 60
    for rows in (train, held_out):
        found = [(int(d) - 1) // 3 for batch in epoch(rows) for d in np.unique(batch.columns["document"]) if d]
        assert all(found.count(record) == 3 for record in found)


def test_sources_keep_their_weights(tokenizer, tmp_path):
    for name, word in (("a", "fox"), ("b", "dog")):
        lines = [json.dumps({"prompt": "who", "completion": word}) for _ in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = tuple(TuningSource(str(tmp_path / f"{name}.jsonl"), weight) for name, weight in (("a", 3.0), ("b", 1.0)))
    rows, _, stats = open_examples(TuningData(sources=sources), 32, 8, tokenizer, "sft")
    texts = [tokenizer.decode(row) for row in rows.batch(0).tokens]
    assert (
        stats.records == 60 and sum("fox" in text for text in texts) == 6 and sum("dog" in text for text in texts) == 2
    )


# --- too long ---------------------------------------------------------------------------------------------------------


def long_chat(exchanges, words=1):
    system = {"role": "system", "content": "be"}
    return {"messages": [system, *(m for i in range(exchanges) for m in turn(i, words))]}


def texts(rows, tokenizer):
    return [tokenizer.decode(rows.examples.read(i, 0, LENGTH), skip_special=False) for i in range(len(rows.examples))]


def test_the_oldest_turns_are_cut_after_the_system_message(opened, tokenizer):
    rows, _, stats = opened([long_chat(12), *chats(3)])
    text = texts(rows, tokenizer)[0]
    assert stats.shortened == 1 and stats.cut == stats.left_out == 0 and "1 shortened by turns" in str(stats)
    assert text.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nwho ") and text.endswith(
        "fox 11<|im_end|>\n"
    )
    kept = [i for i in range(12) if f"who {i}<" in text]
    assert kept == list(range(kept[0], 12)) and kept[0] > 0, "whole exchanges, the newest ones"
    one_more = opened([long_chat(12 - kept[0] + 1)])[2]
    assert one_more.shortened == 1, "no more were lost than had to be"


@pytest.mark.parametrize(("overlong", "outcome"), [("turns", "cut"), ("cut", "cut"), ("skip", "left_out")])
def test_a_single_exchange_that_is_too_long_is_cut(opened, tokenizer, overlong, outcome):
    rows, _, stats = opened([long_chat(2, words=200), *chats(3)], overlong=overlong)
    assert getattr(stats, outcome) == 1 and stats.records == 4
    assert stats.documents == (4 if outcome == "cut" else 3)
    if outcome == "cut":
        text = texts(rows, tokenizer)[0]
        assert len(rows.examples.read(0, 0, 999)) == LENGTH and text.endswith("fox")
        assert ("who 1" in text) == (overlong == "turns"), "the last exchange remains, or the first"


def test_a_prompt_that_fills_the_row_is_left_out(opened):
    long = {"prompt": "who " * 200, "completion": "fox"}
    _, _, stats = opened([long, {"prompt": "who", "completion": "fox"}])
    assert stats.left_out == 1 and stats.documents == 1


@pytest.mark.parametrize(("chosen", "rejected"), [(10, 200), (200, 10), (200, 200)])
def test_a_pair_that_is_too_long_shares_the_row(opened, chosen, rejected):
    record = {"prompt": turn(0)[:1], "chosen": "fox " * chosen, "rejected": "dog " * rejected}
    rows, _, stats = opened([record, *pairs(3)], "preference")
    sizes = np.diff(rows.examples.offsets)[:2]
    assert stats.cut == 1 and sizes.sum() == LENGTH
    assert sizes.max() == LENGTH // 2 if chosen == rejected else sizes.min() < LENGTH // 2
    conversation = {"prompt": [*turn(1, 20), *turn(2)[:1]], "chosen": "fox", "rejected": "dog"}
    _, _, stats = opened([conversation, *pairs(3)], "preference")
    assert stats.shortened == 1


# --- nothing to train on ----------------------------------------------------------------------------------------------


def test_records_without_an_assistants_turn_are_counted_and_refused_if_all(opened):
    silent = {"messages": [{"role": "user", "content": "hi"}]}
    assert "1 without an assistant's turn, left out" in str(opened([silent, *chats(3)])[2])
    with refuses("data.path", code="no_examples", naming="none of the 2"):
        opened([silent, silent])


def test_data_without_examples_is_refused(opened, tokenizer, tmp_path):
    with refuses("data.path", code="no_examples", naming="the list of records holds none"):
        opened([])
    (tmp_path / "a.jsonl").write_text("")
    with refuses("data.path", code="no_examples", naming="a.jsonl"):
        open_examples(TuningData(path=str(tmp_path / "a.jsonl")), 64, 1, tokenizer, "sft")
    with refuses("data.path", RecipeError):
        open_examples(TuningData(), 64, 1, tokenizer, "sft")
    with refuses("data.path", code="no_examples", naming="raise length"):
        opened(chats(2), overlong="skip", length=8)
    with refuses("kind", RecipeError):
        opened(chats(2), "dpo")


def test_a_record_that_fails_is_named(opened, tokenizer, tmp_path):
    lines = [json.dumps(record) for record in chats(2)] + ['{"messages": [{"role": "user", "content": "\\ud800"}, '
        '{"role": "assistant", "content": "x"}]}']  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with refuses(code="bad_records", naming="a.jsonl line 3: "):
        open_examples(TuningData(path=str(tmp_path / "a.jsonl")), 64, 1, tokenizer, "sft")


def test_prompts_without_completions(tokenizer):
    encoder = example_encoder(TuningData(), tokenizer)
    records = from_list([{"prompt": turn(1)[:1]}, {"prompt": "who "}])
    found = [encoder.prompt(example(record, "prompts").sides[0]) for record in records]
    assert (
        tokenizer.decode(found[0], skip_special=False) == "<|im_start|>user\nwho 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(found[1]) == "who "


# --- what a step takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind, records", [("sft", chats(12)), ("preference", pairs(12))])
def test_a_pass_sees_each_example_once(opened, kind, records, packing):
    rows, _, _ = opened(records, kind, batch=8, columns=("document",), packing=packing)
    for number in range(2):
        steps = range(number * rows.steps_per_epoch, (number + 1) * rows.steps_per_epoch)
        batches = [rows.batch(step) for step in steps]
        seen = [int(b.columns["document"][row, where][0]) for b in batches for row, _, where in segments(b)]
        assert sorted(seen) == list(range(1, len(rows.examples) + 1))
        notes = [rows.notes(step) for step in steps]
        unit = "examples" if kind == "sft" else "pairs"
        assert sum(each[unit] for each in notes) == 12 == rows.examples_per_epoch
        assert [each["tokens"] for each in notes] == [int((b.segment_ids > 0).sum()) for b in batches]
        if not packing:
            assert [each[unit] for each in notes] == [8, 4]
    assert same(rows.batch(1), rows.batch(1)) and rows.epochs(rows.steps_per_epoch) == (1.0,)


def test_without_packing_rows_have_the_longest_examples_length(opened):
    rows, held_out, _ = opened(chats(20), length=1000, packing=False, held_out=3)
    assert rows.length == 32 and rows.batch(0).tokens.shape == (BATCH, 32)
    assert opened([{"messages": turn(1, 140)}], length=1000, packing=False)[0].length == 256  # whole blocks
    assert rows.documents(0) == 1
    assert rows.examples_per_epoch == 17 and held_out.examples_per_epoch == 3
    assert opened(chats(20), length=30, packing=False)[0].length == 30  # never longer than was asked for
    halves = [opened(chats(11), hosts=(i, 2), packing=False)[0].batch(2) for i in range(2)]
    whole = opened(chats(11), packing=False)[0].batch(2)
    assert same(whole, jax.tree.map(lambda *parts: np.concatenate(parts), *halves))


# --- bad records ------------------------------------------------------------------------------------------------------


def test_bad_records_are_all_named_or_skipped_and_listed(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    good = [json.dumps(record) for record in chats(3)]
    empty = json.dumps({"messages": [*turn(1)[:1], {"role": "assistant", "content": ""}]})
    path.write_text("\n".join([good[0], "{torn", good[1], empty, json.dumps({"messages": None}), good[2]]))
    with refuses(code="bad_records", naming="set data.skip_bad_records=true") as e:
        open_examples(TuningData(path=str(path)), 64, 1, tokenizer, "sft")
    assert all(f"line {number}: " in str(e.value) for number in (2, 4, 5))
    rows, _, stats = open_examples(TuningData(path=str(path), skip_bad_records=True), 64, 1, tokenizer, "sft")
    assert rows.examples_per_epoch == 3 and "3 bad records left out" in str(stats)
    assert ["line 2: " in stats.bad[0], "line 4: " in stats.bad[1], "line 5: " in stats.bad[2]] == [True] * 3
    path.write_text("{torn")
    with refuses("data.path", code="no_examples", naming="line 1: "):
        open_examples(TuningData(path=str(path), skip_bad_records=True), 64, 1, tokenizer, "sft")
    with refuses(code="bad_records", naming="line 1: "):
        open_examples(TuningData(path=str(path)), 64, 1, tokenizer, "sft")


def test_a_first_turn_of_the_assistant_is_counted_and_not_trained(opened, make_tokenizer):
    opening = {"messages": [{"role": "assistant", "content": "dog"}, *turn(1)]}
    rows, _, stats = opened([opening])
    assert "1 begin with the assistant: that turn is read and not trained" in str(stats)
    marked = make_tokenizer(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    both = rows, open_examples(TuningData(), LENGTH, 1, marked, "sft", records=[opening])[0]
    for one in both:
        said = marked.decode(one.examples.read(0, 0, LENGTH)[one.examples.trained(0)].tolist(), skip_special=False)
        assert said == "fox 1<|im_end|>"


# --- the cache on disk ------------------------------------------------------------------------------------------------


def test_a_second_run_reads_the_cache(tokenizer, make_tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in pairs(6)))
    data = TuningData(path=str(path), cache=str(tmp_path / "cache"))

    def opened(kind="preference", tokenizer=tokenizer, length=LENGTH, **changes):
        return open_examples(dataclasses.replace(data, **changes), length, 2, tokenizer, kind)

    first, _, stats = opened()
    with monkeypatch.context() as patched:
        patched.setattr(ExampleEncoder, "encode", None)  # it would fail if anything was tokenised again
        again, _, same_stats = opened(seed=3, held_out=0.2)  # neither changes the tokens
    assert (again.fingerprints, same_stats) == (first.fingerprints, stats)
    assert same(again.every_document().batch(0), first.every_document().batch(0))
    folders = {entry.name for entry in (tmp_path / "cache").iterdir()}
    assert len(folders) == 1 and not any(name.startswith(".") for name in folders)
    opened(length=40)
    opened(tokenizer=make_tokenizer(CHATML.replace("<|im_end|>", "<|im_end|> ")))
    opened(keys=Keys(chosen="rejected", rejected="chosen"))
    path.write_text(path.read_text().replace("fox", "dog"))  # the same size
    opened()
    assert len(list((tmp_path / "cache").iterdir())) == 5


@pytest.mark.parametrize("kind", ["sft", "unpaired"])
def test_memory_does_not_grow_with_the_file(tokenizer, tmp_path, kind):
    """Only offsets and labels of the documents are in memory; the tokens are memory-mapped."""

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for i in range(count):
                file.write(json.dumps({"prompt": f"who {i}", "completion": " fox" * 2000, "label": True}) + "\n")
        tracemalloc.start()
        rows = open_examples(TuningData(path=str(path), cache=str(tmp_path / "cache")), 4096, 1, tokenizer, kind)[0]
        rows.batch(0)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert rows.tokens_per_epoch > 4000 * count if kind == "unpaired" else 2000 * count
        return found

    peak(1)  # imports and one-time compilation
    few, many = peak(8), peak(64)
    assert many < few + 200_000, "56 more examples have 450,000 bytes of tokens as int32, and as many again of text"
