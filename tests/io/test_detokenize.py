"""Streaming detokenisation gives the text of decode, however the ids are split."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from tokenizers import AddedToken, decoders

from dovetail.io import detokenize
from dovetail.io.detokenize import Detokenizer
from dovetail.io.tokenizer import Tokenizer

property_test = settings(max_examples=60, deadline=None, derandomize=True)
CHAR_OF = {byte: char for char, byte in detokenize._BYTE_OF.items()}


def pieces(stream: Detokenizer, ids) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.flush()]


def streamed(stream: Detokenizer, ids) -> str:
    return "".join(pieces(stream, ids))


@pytest.fixture(scope="session")
def tokenizer(any_backend) -> Tokenizer:
    return Tokenizer(any_backend)


@pytest.fixture(scope="session")
def byte_level(make_backend) -> Tokenizer:
    return Tokenizer(make_backend("byte_level"))


@pytest.fixture(scope="session")
def sentencepiece(make_backend) -> Tokenizer:
    return Tokenizer(make_backend("sentencepiece"))


# --- equal to decoding at once --------------------------------


@pytest.mark.slow
@property_test
@given(data=st.data(), skip_special=st.booleans())
def test_any_ids_give_the_text_of_decode(tokenizer, data, skip_special):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stream = tokenizer.stream(skip_special)
    assert streamed(stream, ids) == tokenizer.decode(ids, skip_special)
    assert streamed(stream, ids[::-1]) == tokenizer.decode(ids[::-1], skip_special), "not as new after flush"


def test_real_text_gives_the_text_of_decode(tokenizer, samples):
    for text in samples:
        ids = tokenizer.encode(text)
        assert streamed(tokenizer.stream(), ids) == tokenizer.decode(ids)


@property_test
@given(data=st.binary(max_size=12))
def test_any_bytes_give_the_text_of_decode(byte_level, sentencepiece, data):
    ids = [byte_level.id(CHAR_OF[byte]) for byte in data]
    assert streamed(byte_level.stream(), ids) == byte_level.decode(ids) == data.decode(errors="replace")
    ids = [sentencepiece.id(f"<0x{byte:02X}>") for byte in data]
    assert streamed(sentencepiece.stream(), ids) == sentencepiece.decode(ids)


@property_test
@given(
    data=st.lists(st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xff", "é".encode(), b" a", b"\xe4\xbd"]), max_size=8)
)
def test_characters_cut_anywhere(byte_level, sentencepiece, data):
    for tokenizer, spell in ((byte_level, CHAR_OF.get), (sentencepiece, "<0x{:02X}>".format)):
        ids = [tokenizer.id(spell(byte)) for part in data for byte in part]
        # An ordinary token between byte runs: what is certain then must come out, and stay right.
        ids = ids[: len(ids) // 2] + [tokenizer.id("t")] + ids[len(ids) // 2 :]
        assert streamed(tokenizer.stream(), ids) == tokenizer.decode(ids)


def test_a_byte_token_with_a_plus_is_read_as_the_library_reads_it(make_backend):
    backend = make_backend("sentencepiece")
    backend.add_tokens([AddedToken(text) for text in ("<0x+1>", "<0xé>", "<0x4>", "<0xGG>")])
    tokenizer = Tokenizer(backend)
    ids = [tokenizer.id(text) for text in ("<0x+1>", "<0xé>", "<0x4>", "<0xGG>", "<0x41>")]
    assert streamed(tokenizer.stream(), ids) == tokenizer.decode(ids)


# --- what streaming is for --------------------------------


def test_a_character_is_emitted_once_its_bytes_are_complete(byte_level):
    ids = byte_level.encode("hi 😀!", add_special=False)
    got = pieces(byte_level.stream(), ids)
    assert "😀" in got and not any("\ufffd" in piece for piece in got)
    assert len([piece for piece in got if piece]) >= 4, "text must flow, not wait for the end"


def test_a_byte_run_waits_for_its_end(sentencepiece):
    stream = sentencepiece.stream()
    assert [stream.push(sentencepiece.id(f"<0x{byte:02X}>")) for byte in "😀".encode()] == [""] * 4
    assert stream.push(sentencepiece.id("t")) == "😀t"


def test_only_the_first_space_is_dropped(sentencepiece):
    ids = sentencepiece.encode("the the", add_special=False)
    got = pieces(sentencepiece.stream(), ids)
    assert got[0] == "t" or got[0] == "the"
    assert "".join(got) == "the the"
    assert streamed(sentencepiece.stream(), [sentencepiece.id("▁")] * 2 + ids) == "   the the"[1:]


def test_context_keeps_the_space_after_a_prompt(sentencepiece):
    prompt, answer = sentencepiece.encode("the"), sentencepiece.encode("dog", add_special=False)
    assert streamed(sentencepiece.stream(), answer) == "dog"
    assert streamed(sentencepiece.stream(context=prompt), answer) == " dog"


def test_special_tokens_are_skipped_or_shown(byte_level):
    ids = [byte_level.id(token) for token in ("<|begin|>", "a", "<tool>", "<|end|>")]
    assert streamed(byte_level.stream(), ids) == "a<tool>"
    assert streamed(byte_level.stream(skip_special=False), ids) == "<|begin|>a<tool><|end|>"


def test_a_skipped_token_does_not_break_a_character(byte_level):
    first, *rest = (byte_level.id(CHAR_OF[byte]) for byte in "é".encode())
    ids = [first, byte_level.id("<|end|>"), *rest]
    assert streamed(byte_level.stream(), ids) == byte_level.decode(ids) == "é"


def test_a_decoder_that_cannot_stream_waits_for_the_end(make_backend):
    backend = make_backend("sentencepiece")
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("▁t", "T")])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("the the")
    *early, last = pieces(tokenizer.stream(), ids)
    assert not any(early) and last == tokenizer.decode(ids)


def test_an_id_past_the_tokenizers_own_has_no_text_and_a_negative_one_is_refused(byte_level):
    stream = byte_level.stream()
    assert stream.push(10**6) == "" and stream.push(byte_level.vocab_size) == ""
    with refuses(naming="-1"):
        stream.push(-1)


def test_a_token_costs_the_same_late_as_early(byte_level):
    ids = byte_level.encode("the lazy dog " * 50, add_special=False)
    stream = byte_level.stream()

    def seconds() -> float:
        start = time.perf_counter()
        for token_id in ids:
            stream.push(token_id)
        return time.perf_counter() - start

    early = min(seconds() for _ in range(5))
    for _ in range(50):
        seconds()
    late = min(seconds() for _ in range(5))
    assert late < 5 * early, "the history must not be decoded again"
