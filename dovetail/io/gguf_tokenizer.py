"""Build a `tokenizers` pipeline from the metadata of a `.gguf` file.

There are two kinds. "gpt2" is byte-level BPE with a list of merges; how text is split into words before is given only
by a name (`tokenizer.ggml.pre`), so the patterns of the names are here. "llama" is SentencePiece BPE: scores instead of
merges, spaces written as U+2581, and bytes for what the vocabulary lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import CheckpointError
from dovetail.io.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from dovetail.io.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # how SentencePiece writes a space
# Tokens that end a turn, by their text: files older than the key `eot_token_id` name them in no other way.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")

# --- how text is cut into words ---

_WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d|" + _WORDS
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BREAKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BREAKS
)


@dataclass(frozen=True)
class _Words:
    """Describe a way to split text: each pattern splits what the one before it left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is in the vocabulary is taken as it is, whatever the merges say
    add_bos: bool = False
    nfc: bool = False


_GPT2_WORDS = _Words((_GPT2,))
_DIGITS_APART = _Words((r"\p{N}", _GPT2))
_LLAMA3_WORDS = _Words((_GPT4 % r"\p{N}{1,3}",), whole_words=True, add_bos=True)
_QWEN2_WORDS = _Words((_GPT4 % r"\p{N}",), nfc=True)
_WORDS_BY_NAME = {
    "default": _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2"), _GPT2_WORDS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_APART),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Words(_LLAMA3_WORDS.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_WORDS),
    "tekken": _Words((_TEKKEN,), whole_words=True, add_bos=True),
}


def tokenizer(file: GgufFile) -> Tokenizer:
    """Return the Tokenizer with the file's special tokens and chat template."""
    from dovetail.io.tokenizer import Tokenizer

    kind, tokens = file.metadata.get("tokenizer.ggml.model"), _list(file, "tokens")
    if kind == "gpt2":
        words = _words(file)
        made, add_bos = _byte_level(file, tokens, words), words.add_bos
    elif kind in ("llama", "gemma"):
        made, add_bos = _sentencepiece(file, tokens), True
    else:
        raise CheckpointError(f"{file.path} has a tokenizer of kind {kind!r}; gpt2 and llama are supported.")
    made.add_tokens(_added(tokens, _list(file, "token_type")))
    ids = special_ids(file.metadata)
    bos, pad, unk = (_token(tokens, ids.get(f"{name}_token_id")) for name in ("bos", "pad", "unk"))
    stops = _as_tuple(ids.get("eos_token_id"))
    return Tokenizer(
        made,
        bos=bos,
        pad=pad,
        unk=unk,
        eos=_token(tokens, stops[0] if stops else None),
        eos_ids=stops,
        add_bos=bool(file.metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and bos is not None,
        add_eos=bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)) and bool(stops),
        chat_template=_templates(file.metadata),
    )


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name; the one without a name is the default."""
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in metadata.get("tokenizer.chat_templates", ())}
    return {name: text for name, text in ({"default": metadata.get(key)} | named).items() if text is not None}


def special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the bos, eos, pad and unk ids under config.json's names.

    Eos is a list if turns have their own end token.
    """
    keys = {"bos": "bos", "pad": "padding", "unk": "unknown"}
    found = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    stops = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if stops[1] is None:
        stops += _turn_endings(metadata)
    unique = list(dict.fromkeys(stop for stop in stops if stop is not None))
    found["eos_token_id"] = unique[0] if len(unique) == 1 else unique or None
    return {key: value for key, value in found.items() if value is not None}


def _turn_endings(metadata: dict[str, Any]) -> list[int]:
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    endings = [i for i, token in enumerate(tokens) if token in _END_OF_TURN]
    return [i for i in endings if i < len(kinds) and kinds[i] == _CONTROL]


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _token(tokens: list[str], index: int | None) -> str | None:
    return tokens[index] if index is not None and index < len(tokens) else None


def _list(file: GgufFile, key: str) -> list[Any]:
    """Return one of the parallel lists that describe the vocabulary."""
    value, tokens = file.metadata.get(f"tokenizer.ggml.{key}"), file.metadata.get("tokenizer.ggml.tokens", ())
    if not value:
        raise CheckpointError(f"{file.path} has no tokenizer.ggml.{key}: the tokenizer cannot be built from it.")
    if key != "merges" and len(value) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} has {len(value)} entries for {len(tokens)} tokens.")
    return value


def _words(file: GgufFile) -> _Words:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name not in _WORDS_BY_NAME:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}, a way of cutting text into words that is not known here; "
            f"these are: {', '.join(_WORDS_BY_NAME)}."
        )
    return _WORDS_BY_NAME[name]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    # When two tokens share a text the first keeps it, as in llama.cpp; no text encodes to the other.
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def _added(tokens: list[str], kinds: list[int]) -> list[Any]:
    """Return the added tokens: control tokens are special, user-defined ones are ordinary text that is never split."""
    from tokenizers import AddedToken

    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token
    ]


def _byte_level(file: GgufFile, tokens: list[str], words: _Words) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    # A merge is "left right"; the left part may itself begin with a space, so look for the space after that.
    merges = [(merge[: (at := merge.find(" ", 1))], merge[at + 1 :]) for merge in _list(file, "merges")]
    made = Tokenizer(models.BPE(_vocabulary(tokens), merges, ignore_merges=words.whole_words))
    if words.nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = _cutter(words.patterns)
    made.decoder = decoders.ByteLevel()
    return made


def _cutter(patterns: tuple[str, ...]) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Backend:
    from tokenizers import Tokenizer, decoders, models

    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    merges = _merges(tokens, _list(file, "token_type"), _list(file, "scores"))
    unknown = _token(tokens, file.metadata.get("tokenizer.ggml.unknown_token_id"))
    made = Tokenizer(models.BPE(_vocabulary(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    made.normalizer = _spaces(prefix)
    undo_prefix = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *undo_prefix]
    )
    return made


def _spaces(prefix: bool) -> Normalizer:
    """Return the normalizer of spaces.

    As in llama.cpp, the prefix precedes every piece of text between special tokens.
    """
    from tokenizers import normalizers

    replace = normalizers.Replace(" ", _SPACE)
    return normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return merges that join the neighbours whose union scores best: every split of a token, the best token first."""
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    halves = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(halves)]
