"""Structured output: sampling under the mask gives text that matches the grammar."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from refusals import refuses
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from dovetail.core.errors import RequestError
from dovetail.engine import grammar
from dovetail.engine.request.params import StructuredOutputsParams as Structured
from dovetail.io.gguf import GgufCheckpoint
from dovetail.io.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
CHOICE = ("yes", "no", 'a "quoted" \\ / back', "naïve 你好\n👍")


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    good = {"name", "age", "kind"} <= found.keys() <= SCHEMA["properties"].keys() and len(found["name"]) <= 8
    tags = found.get("tags", [])
    return good and 0 <= found["age"] <= 120 and found["kind"] in ("cat", "dog") and len(tags) <= 3


ASKED = {
    "schema": (Structured(json=SCHEMA), fits_schema),
    "schema as text": (Structured(json=json.dumps(SCHEMA)), fits_schema),
    "object": (Structured(json="object"), lambda text: isinstance(json.loads(text), dict)),
    "any object": (Structured(json={}), lambda text: isinstance(json.loads(text), dict)),
    "regex": (Structured(regex=r"[0-9]{3}-[a-f]+(\.x)?"), re.compile(r"[0-9]{3}-[a-f]+(\.x)?").fullmatch),
    "choice": (Structured(choice=CHOICE), lambda text: text in CHOICE),
    "lark": (Structured(grammar='start: "a" (", " "b")*'), re.compile(r"a(, b)*").fullmatch),
}


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>", "<turn>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([json.dumps(SCHEMA), *CHOICE] * 3, trainer)
    return Tokenizer(backend, eos="<end>", eos_ids=[1])


@pytest.fixture(scope="module")
def real(smollm2_gguf) -> Tokenizer:
    return GgufCheckpoint(smollm2_gguf).tokenizer()


def allowed_by(matcher: grammar.Matcher, tokenizer: Tokenizer) -> np.ndarray:
    """Return the allowed ids, with the mask of a padded vocabulary that held other bits before."""
    bits = np.full(-(-tokenizer.vocab_size // 32) + 3, 0xFFFFFFFF, np.uint32)
    matcher.fill(bits)
    found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert found.size and found[-1] < tokenizer.vocab_size
    return found


def write(asked: Structured, tokenizer: Tokenizer, rng: np.random.Generator) -> str:
    """Sample a random text under the mask; closing tokens weigh more, so that it ends."""
    matcher, output = grammar.compile(asked, tokenizer).start(), []
    closing = {*tokenizer.eos_ids, *(tokenizer.encode(mark, add_special=False)[0] for mark in '"},:]')}
    for _ in range(400):
        allowed = allowed_by(matcher, tokenizer)
        weights = np.array([0.3 * allowed.size if token in closing else 1.0 for token in allowed.tolist()])
        token = int(rng.choice(allowed, p=weights / weights.sum()))
        matcher.accept(token)
        if token in tokenizer.eos_ids:
            assert matcher.is_done
            return tokenizer.decode(output)
        output.append(token)
    raise AssertionError(f"no end came: {tokenizer.decode(output)}")


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("kind", ["small", "real"])
def test_the_output_matches_the_grammar(name: str, kind: str, request):
    tokenizer = request.getfixturevalue(kind)
    asked, fits = ASKED[name]
    rng = np.random.default_rng(0)
    texts = [write(asked, tokenizer, rng) for _ in range(8)]
    assert all(fits(text) for text in texts), texts
    assert len({*texts}) > 1


def test_done_when_only_the_end_can_follow(small):
    matcher = grammar.compile(Structured(choice=("yes", "yesterday")), small).start()
    for token in small.encode("yes"):
        assert not matcher.is_done
        matcher.accept(token)
    assert not matcher.is_done and {*small.eos_ids} <= {*allowed_by(matcher, small)}
    for token in small.encode("terday"):
        matcher.accept(token)
    assert matcher.is_done and {*allowed_by(matcher, small)} == {*small.eos_ids}


def test_matchers_of_one_grammar_are_independent(small):
    made = grammar.compile(Structured(regex="ab"), small)
    one, two = made.start(), made.start()
    (a,), (b,) = small.encode("a"), small.encode("b")
    one.accept(a)
    assert b in allowed_by(one, small) and b not in allowed_by(two, small)


def test_compiled_once_by_content(small):
    assert grammar.compile(Structured(json=dict(SCHEMA)), small) is grammar.compile(Structured(json=SCHEMA), small)
    assert grammar.compile(Structured(regex="a"), small) is not grammar.compile(Structured(regex="b"), small)


def test_the_cache_is_bounded(small, monkeypatch):
    first, second = Structured(regex="x"), Structured(regex="y")
    monkeypatch.setattr(grammar, "KEPT_BYTES", 2 * grammar.compile(first, small).size)
    kept, gone = grammar.compile(first, small), grammar.compile(second, small)
    assert grammar.compile(first, small) is kept  # used again, so it goes last
    grammar.compile(Structured(regex="z"), small)
    assert grammar.compile(first, small) is kept and grammar.compile(second, small) is not gone


def test_the_memory_of_grammars_in_use_is_bounded(small, monkeypatch):
    held = grammar.compile(Structured(regex="held1"), small)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 0)
    monkeypatch.setattr(grammar, "MOST_BYTES", held.size + 100)
    with refuses("structured_outputs", RequestError):
        grammar.compile(Structured(regex="held2"), small)
    del held
    assert grammar.compile(Structured(regex="held2"), small)


def test_many_literals_count_for_more_than_their_length(small):
    many = grammar.compile(Structured(grammar="start: " + " ".join(f'"w{i}"' for i in range(1500))), small)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    assert 6e6 < many.size < 30e6, "8 MB were measured"
    assert grammar.compile(Structured(json=schema), small).size < many.size


def _refs(count: int) -> Structured:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return Structured(json={"$defs": chain | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"})


DEEP = {
    "schemas that refer to each other": _refs(4000),
    "rules": Structured(grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "z"'),
}


@pytest.mark.parametrize("case", DEEP)
def test_a_deep_grammar_does_not_end_the_process(small, case):
    """llguidance recurses: on a usual stack of 8 MiB such a grammar is a segmentation fault."""
    try:
        grammar.compile(DEEP[case], small)
    except ValueError as error:  # one that it refuses is as well
        assert "structured_outputs" in str(error)


@pytest.mark.parametrize(
    ("asked", "naming"),
    [
        (Structured(json={"type": "nonsense"}), "nonsense"),
        (Structured(json={"not": {"type": "string"}}), "not"),
        (Structured(json="{broken"), "JSON schema"),
        (Structured(json="[1]"), "object"),
        (Structured(regex="(["), "unclosed"),
        (Structured(grammar="start: missing"), "missing"),
        (
            Structured(choice=tuple(f"choice {i}" for i in range(3000))),
            "3001 items; max is 2000",
        ),
        (Structured(json={"$ref": "#"}), "no text"),
        (Structured(regex="a" * (grammar.LONGEST + 1)), "262,144"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_grammar_is_refused_with_llguidances_reason(small, asked: Structured, naming: str):
    with refuses("structured_outputs", RequestError, naming=naming):
        grammar.compile(asked, small)


def test_a_limit_reached_during_decoding_is_reported_without_the_grammar(small):
    matcher = grammar.compile(Structured(regex="([a-z]{1,500}){1,500}"), small).start()
    with pytest.raises(RequestError, match="too complex") as error:
        for _ in range(300):
            matcher.fill(np.zeros(-(-small.vocab_size // 32), np.uint32))
            matcher.accept(small.encode("q")[0])
    assert "[a-z]" not in str(error.value) and len(str(error.value)) < 1000


def test_a_token_outside_the_grammar_and_a_short_mask_are_refused(small):
    matcher = grammar.compile(Structured(regex="a"), small).start()
    with refuses("structured_outputs", RequestError):
        matcher.fill(np.zeros(2, np.uint32))
    with refuses("structured_outputs", RequestError):
        matcher.accept(small.encode("b")[0])


def test_tokenizers_without_grammar_support_are_refused(small):
    no_end = Tokenizer(Backend.from_str(small.backend.to_str()))
    with refuses("structured_outputs", RequestError):
        grammar.compile(Structured(regex="a"), no_end)
    odd = Backend(models.WordPiece({"[UNK]": 0, "[SEP]": 1}, unk_token="[UNK]"))
    with refuses("structured_outputs", RequestError):
        grammar.compile(Structured(regex="a"), Tokenizer(odd, eos="[SEP]"))
