"""Test a tokenizer that is read when it is first used."""

from __future__ import annotations

from dovetail.io.late_tokenizer import LateTokenizer
from dovetail.io.tokenizer import Tokenizer, byte_tokenizer


def late() -> tuple[Tokenizer, list[Tokenizer]]:
    read: list[Tokenizer] = []

    def make() -> Tokenizer:
        read.append(byte_tokenizer())
        return read[-1]

    return LateTokenizer(make, byte_tokenizer().eos_ids), read


def test_it_is_read_once_when_it_is_needed():
    tokenizer, read = late()
    assert tokenizer.eos_ids == byte_tokenizer().eos_ids and read == []
    assert tokenizer.encode("some text") == byte_tokenizer().encode("some text")
    assert tokenizer.decode(tokenizer.encode("more")) == "more" and tokenizer.vocab_size and len(read) == 1


def test_copies_have_their_own_templates():
    tokenizer, read = late()
    before = tokenizer.with_templates("{{ bos_token }}")
    assert read == [] and before.chat_template == "{{ bos_token }}"
    assert before.encode("text") == tokenizer.encode("text") and before.chat_template == "{{ bos_token }}"


def test_an_attribute_that_no_tokenizer_has():
    tokenizer, _ = late()
    assert not hasattr(tokenizer, "nothing") and not hasattr(tokenizer, "__nothing__")
