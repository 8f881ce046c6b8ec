"""A tokenizer whose ids are UTF-8 bytes, with 256 for the end of a text: what `data.tokenizer: bytes` trains with, in
the form that an exported folder needs to be served."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dovetail.io.tokenizer import Tokenizer

END = "<|end|>"


def byte_tokenizer() -> Tokenizer:
    vocab = {letter: byte for byte, letter in enumerate(_letters())} | {END: 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return Tokenizer(backend, eos=END)


def _letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]
