"""Tiny tokenizers of the kinds that real models have, trained here, and a folder of checkpoints."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. It isn't the first time, is it? No , never !",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # 1234567890",
    "naïve café, Zürich, el niño; ελληνικά и русский текст",
    "你好，世界。今日は良い天気ですね。안녕하세요",
    "system user assistant tool content question answer weather city",
] * 3

# What trips decoders: joined emoji, combining marks, right-to-left, odd spaces, SentencePiece's own mark.
SAMPLES = [
    "",
    " ",
    "   leading and trailing   ",
    "Hello, world! It isn't .",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇨🇭",
    "e\u0301 combining, n\u0303",
    "日本語テキスト、中文文本",
    "שלום עולם مرحبا",
    "tab\tnew\nline\r\nend",
    "nb\u00a0sp\u3000wide",
    "already ▁ marked ▁▁ twice",
    "<0x41> looks like a byte",
    "\ufffd replacement \x00 nul",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


def byte_level(specials=("<|begin|>", "<|end|>", "<|pad|>")) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every byte is a token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    made.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("a b", normalized=False)])
    return made


def sentencepiece(*, prefix: bool = True, decoder=None) -> Tokenizer:
    """As Llama 2 (a dummy space in front) or, without the prefix, Gemma: unknown characters become byte tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(TEXT[:2], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(made.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    made = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoder or decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if prefix else joined)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return made


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "it", "is", "##n", "n't", "'s", "no", ".", ",", "?", "!", "'", "##e", "never"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["[UNK]", "[SEP]"])
    return made


def unigram() -> Tokenizer:
    """As T5: the Metaspace decoder, and no byte fallback."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def no_decoder() -> Tokenizer:
    made = byte_level()
    made.decoder = None
    return made


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece(prefix=False),
    "byte fallback, then metaspace": lambda: sentencepiece(
        decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "strip of every token": lambda: sentencepiece(
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.ByteFallback()])
    ),
    "unigram": unigram,
    "word_piece": word_piece,
    "no decoder": no_decoder,
}


@pytest.fixture(scope="session")
def samples() -> list[str]:
    return SAMPLES


@pytest.fixture(scope="session", params=KINDS)
def any_backend(request) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def make_backend():
    """A fresh backend of a kind: `Tokenizer` takes it over, so tests do not share one."""
    return lambda kind: KINDS[kind]()


@pytest.fixture
def problems() -> list[str]:
    """The problems that the checkpoints of `open_at` reported."""
    return []


@pytest.fixture
def open_at(tmp_path, problems):
    """Checkpoints in tmp_path; all are closed at the end."""
    from dovetail.io.checkpoint import Checkpoints

    opened = []

    def make(name="run", **options) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / name, on_problem=problems.append, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
