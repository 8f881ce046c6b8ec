"""Tokenizers in a `.gguf` file's metadata encode as the original tokenizers."""

import itertools
import json

import gguf
import pytest
from refusals import refuses
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dovetail.core.errors import CheckpointError
from dovetail.io.gguf_file import GgufFile
from dovetail.io.gguf_tokenizer import special_ids, tokenizer

pytestmark = pytest.mark.slow

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog isn't amused: it's 2024 already!",
    "def add(left, right):\n    return left + right  # 12345\n\n\nclass Thing:\n\tpass\n",
    "naïve café Über straße — ‘quotes’ … 日本語のテキスト 한국어 текст 🎉🎊",
    "WE'LL SEE WHAT THEY'RE DOING; I'm sure they've said the the the there then them thee.",
] * 4
TEXTS = [
    "",
    " ",
    "the dog",
    "  two  spaces\tand tabs \n\n  and lines\r\n",
    "In 1999, 1234567 cost $3.50; ½ Ⅷ ٣٤٥",
    "They're WE'LL it's 'quoted' don't",
    "def add(left, right):\n        return left+right  # sum\n",
    "café cafe\u0301 naïve 🎉 👩‍👧 日本語 texts",
    "HelloWorld camelCase SCREAMING_CASE http://a.b/c?d=e",
    "<|im_start|>user\nHi <think>hm</think><|im_end|>\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEFINED = ["<think>", "</think>"]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str):
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# The pipelines of the models' own tokenizer.json, from which llama.cpp keeps a name only.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
PIPELINES = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": split(LLAMA3),
    "dbrx": split(LLAMA3),
    "qwen2": split(QWEN2),
    "tekken": split(TEKKEN),
}


def trained(pre: str) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    made.pre_tokenizer, made.decoder = PIPELINES[pre], decoders.ByteLevel()
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    made.add_tokens(DEFINED)
    return made


def byte_level_metadata(made: Tokenizer, pre: str) -> dict:
    vocabulary = made.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [CONTROL if t in SPECIAL else USER_DEFINED if t in DEFINED else NORMAL for t in tokens]
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}


def spm_metadata(prefix: bool) -> tuple[dict, dict[str, float]]:
    """A SentencePiece-like vocabulary (bytes, pieces, scores) from merges that `tokenizers` learned."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, limit_alphabet=60, show_progress=False))
    model = json.loads(made.to_str())["model"]
    joined = ["".join(pair) for pair in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1]
    pieces = {token: -float(rank) for rank, token in enumerate(dict.fromkeys(joined))}
    pieces |= {token: -1000.0 for token in letters if token not in pieces}
    pieces = {token: score for token, score in pieces.items() if "日" not in token}  # left to the bytes
    head = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<end_of_turn>": CONTROL, "  ": USER_DEFINED}
    head |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    values = {
        "model": "llama", "pre": "default", "tokens": [*head, *pieces],
        "token_type": [*head.values()] + [NORMAL] * len(pieces),
        "scores": [0.0] * len(head) + list(pieces.values()), "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0, "add_space_prefix": prefix,
    }  # fmt: skip
    return values, pieces


@pytest.fixture
def load(tmp_path):
    def make(values: dict, **others):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        named = {f"tokenizer.ggml.{key}": value for key, value in values.items()} | others
        for key, value in named.items():
            adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            adders.get(type(value), writer.add_array)(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tokenizer(GgufFile(tmp_path / "a.gguf"))

    return make


# --- byte-level ---


@pytest.mark.parametrize("pre", PIPELINES)
def test_byte_level_ids_are_those_of_the_tokenizer_it_was_made_from(load, pre):
    original = trained(pre)
    ours = load(byte_level_metadata(original, pre))
    for text in TEXTS + CORPUS[:4]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.decode(ids, skip_special=False) == original.decode(ids, skip_special_tokens=False)
        if pre != "qwen2":  # whose normaliser composes accents
            assert ours.decode(ids, skip_special=False) == text


def test_default_words_are_llama_cpps(load):
    """No tokenizer.json stands behind the name "default": digits go in threes, and punctuation apart from words."""
    ours = load(byte_level_metadata(trained("gpt-2"), "default"))
    cut = ours.backend.pre_tokenizer.pre_tokenize_str("it's 12345+67 ok")
    assert [piece for piece, _ in cut] == ["it", "'", "s", "Ġ", "123", "45", "+", "67", "Ġok"]


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_bos_is_added_as_llama_cpp_does_unless_the_file_says(load, pre, expected):
    values = byte_level_metadata(trained(pre), pre) | {"bos_token_id": 1}
    assert load(values).encode("the")[:1] == ([1] if expected else load(values).encode("the", add_special=False)[:1])
    assert load(values | {"add_bos_token": not expected}).add_bos is not expected


# --- SentencePiece ---


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_its_algorithm(load, prefix):
    values, pieces = spm_metadata(prefix)
    ours = load(values)
    for text in [text for text in TEXTS + CORPUS[:4] if "  " not in text]:
        expected = spm_encode(text, pieces, values["tokens"], prefix)
        assert ours.encode(text, add_special=False) == expected, text
        if text != " ":  # which the prefix swallows
            assert ours.decode(expected) == text


def spm_encode(text: str, pieces: dict[str, float], tokens: list[str], prefix: bool) -> list[int]:
    """Join the two neighbours whose union scores best, leftmost first, until none can be; bytes for what is left."""
    symbols = list((" " + text if prefix and text else text).replace(" ", "\u2581"))
    while True:
        pairs = [(-pieces[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = [[s] if s in pieces else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [tokens.index(token) for group in known for token in group]


def test_sentencepiece_specials(load):
    values, _ = spm_metadata(prefix=True)
    ours = load(values)
    space = values["tokens"].index("\u2581")
    assert ours.add_bos and ours.encode("") == [1]
    assert ours.encode("the")[0] == 1
    assert ours.encode("</s><s>", add_special=False) == [2, 1]
    assert 4 in ours.encode("a  b", add_special=False)  # two spaces, a user-defined token, are never cut
    assert ours.encode("<s>日", add_special=False)[:2] == [1, space]  # text after a special token has its prefix too
    assert ours.decode(ours.encode("日 the dog")) == "日 the dog"


# --- special tokens, endings, templates ---


def test_special_tokens_and_endings(load):
    values = byte_level_metadata(trained("qwen2"), "qwen2")
    ids = {"bos_token_id": 0, "eos_token_id": 0, "eot_token_id": 2, "padding_token_id": 0}
    ours = load(values | ids)
    assert (ours.bos, ours.eos, ours.pad, ours.unk) == ("<|endoftext|>", "<|endoftext|>", "<|endoftext|>", None)
    assert ours.eos_ids == (0, 2)
    assert ours.special_ids == {0, 1, 2}
    text = "<|im_start|>a<think>b</think><|im_end|>"
    assert ours.decode(ours.encode(text)) == "a<think>b</think>"


def test_the_end_of_turn_token_is_found_by_its_text():
    tokens = {"tokenizer.ggml.tokens": ["<eos>", "<end_of_turn>", "<|im_end|>"], "tokenizer.ggml.token_type": [3, 3, 1]}
    assert special_ids(tokens | {"tokenizer.ggml.eos_token_id": 0}) == {"eos_token_id": [0, 1]}
    assert special_ids(tokens | {"tokenizer.ggml.eos_token_id": 1}) == {"eos_token_id": 1}
    assert special_ids(tokens | {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 0}) == {
        "eos_token_id": 0
    }
    assert special_ids({}) == {}


def test_chat_templates(load):
    values = byte_level_metadata(trained("qwen2"), "qwen2")
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    ours = load(values, **{"tokenizer.chat_template": template}, **named)
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert ours.apply_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == text
    assert ours.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False)[0] == 1
    assert ours.chat_templates == {"default": template, "tool_use": "tools"}
    assert load(values).chat_template is None


@pytest.mark.parametrize(
    ("change", "naming"),
    [
        ({"pre": "brand-new"}, "tokenizer.ggml.pre is 'brand-new'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"model": "bert"}, "'bert'"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type"),
    ],
)
def test_a_tokenizer_that_cannot_be_built(load, change, naming):
    values = byte_level_metadata(trained("smollm"), "smollm") | change
    with refuses(None, CheckpointError, naming=naming):
        load({key: value for key, value in values.items() if value is not None})


def test_smollm2_ids(smollm2_gguf):
    """Ids from the model's own tokenizer.json, whose digits stand alone."""
    ours = tokenizer(GgufFile(smollm2_gguf))
    assert ours.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert ours.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert (ours.bos, ours.eos, ours.eos_ids, ours.add_bos) == ("<|im_start|>", "<|im_end|>", (2,), False)
    assert "SmolLM" in ours.apply_chat([{"role": "user", "content": "Hi"}])
