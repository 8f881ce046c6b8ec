"""`Tokenizer.exceeds`: it never refuses a text that fits, and finds far too long ones by their bytes alone."""

import itertools
import random
import threading
import time

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dovetail.io.fewest import Fewest
from dovetail.io.gguf import GgufCheckpoint
from dovetail.io.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

RUNS = [
    " ",
    "\n",
    "=",
    "-",
    "a",
    "Z",
    "7",
    "e\u0301",
    "a\u0323\u0302",
    "é",
    "漢字",
    "👩‍👩‍👧‍👦",
    "\u3000",
    "\x04",
    "ﬁ",
    "ᄀ",
    "ᅡ",
]


def long_tokens(normalizer=None, pre_tokenizer=None, added=(), byte_level=True, lacks="", **model) -> Backend:
    """With tokens of up to 64 equal letters, and 128 of an accented one: each merge doubles."""
    letters = pre_tokenizers.ByteLevel.alphabet() if byte_level else [chr(code) for code in range(0x20, 0x17F)]
    vocab, merges = {c: i for i, c in enumerate(sorted(set(letters) - set(lacks)))}, []
    accented = "Ã©"  # the bytes of é
    merges.append(tuple(accented))
    vocab[accented] = len(vocab)
    for c, most in (("Ġ", 64), ("=", 64), ("a", 64), ("Ċ", 64), (accented, 256)):
        while len(c) < most and c in vocab:
            merges.append((c, c))
            c += c
            vocab[c] = len(vocab)
    made = Backend(models.BPE(vocab, merges, **model))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)] if byte_level else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*([pre_tokenizer] if pre_tokenizer else []), *steps])
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(added))
    return made


def removing(pattern):
    return pre_tokenizers.Split(Regex(pattern), "removed")


# name -> (backend, whether it can be said of letters, and of anything)
MADE = {
    "nothing is changed": (lambda: long_tokens(), True, True),
    "composed": (lambda: long_tokens(normalizers.NFC()), True, False),
    "composed for compatibility": (lambda: long_tokens(normalizers.NFKC()), True, False),
    "decomposed": (lambda: long_tokens(normalizers.NFD()), True, False),
    "lowered, accents stripped": (
        lambda: long_tokens(normalizers.Sequence([normalizers.BertNormalizer(), normalizers.StripAccents()])),
        True,
        False,
    ),
    "stripped": (lambda: long_tokens(normalizers.Strip()), True, False),
    "runs replaced": (lambda: long_tokens(normalizers.Replace(Regex("a+"), "a")), False, False),
    "letters replaced": (lambda: long_tokens(normalizers.Replace("aa", "")), False, False),
    "matches removed": (lambda: long_tokens(pre_tokenizer=removing("[a-z]+")), False, False),
    "spaces removed": (lambda: long_tokens(pre_tokenizer=pre_tokenizers.Whitespace()), True, False),
    "a token that takes the spaces": (
        lambda: long_tokens(added=[AddedToken("<mask>", lstrip=True, rstrip=True)]),
        True,
        False,
    ),
    "a long special token": (lambda: long_tokens(added=[AddedToken("<|" + "reserved" * 20 + "|>")]), True, True),
    "unknown ones are dropped": (lambda: long_tokens(byte_level=False), True, False),
    "unknown letters": (lambda: long_tokens(byte_level=False, lacks="aZ7"), True, False),
    "unknown bytes": (lambda: long_tokens(lacks="Z7"), True, True),
    "unknown ones are joined": (
        lambda: long_tokens(byte_level=False, unk_token="=", fuse_unk=True),
        True,
        False,
    ),
    "ends of words are marked": (lambda: long_tokens(end_of_word_suffix="</w>"), False, False),
}


def texts(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    found = [each * 700 for each in RUNS] + ["<mask>" + " " * 3000 + "<mask>", "<|" + "reserved" * 20 + "|>"]
    for _ in range(count):
        parts = (chance.choice(RUNS) * chance.choice((1, 1, 2, 5, 64, 300)) for _ in range(chance.randrange(1, 40)))
        found.append("".join(parts))
    return found


def assert_never_wrong(tokenizer: Tokenizer, texts):
    for text in texts:
        count = len(tokenizer.encode(text, add_special=False))
        assert not tokenizer.exceeds(text, count), (text[:40], len(text), count)


@pytest.mark.parametrize("name", MADE)
def test_a_text_that_fits_is_never_refused(name, monkeypatch):
    monkeypatch.setattr("dovetail.io.fewest._CHUNK", 97)  # letters and their marks are cut apart, too
    make, letters, anything = MADE[name]
    tokenizer = Tokenizer(make())
    assert_never_wrong(tokenizer, texts(0, 150))
    assert tokenizer.exceeds("the quick brown fox " * 1000, 60) == letters
    assert tokenizer.exceeds("漢字" * 20_000, 100) == tokenizer.exceeds(" \n" * 200_000, 100) == anything


def test_exceeds_is_right_for_every_kind_of_tokenizer(any_backend, samples):
    tokenizer = Tokenizer(any_backend)
    mixed = [a + b * 50 for a in samples for b in samples]
    assert_never_wrong(tokenizer, [*mixed, *texts(1, 50)])
    is_bpe = type(any_backend.model).__name__ == "BPE"
    assert tokenizer.exceeds("The quick brown fox. " * 10_000, 1000) == is_bpe


def test_exceeds_is_right_for_smollm2(smollm2_gguf):
    tokenizer = GgufCheckpoint(smollm2_gguf).tokenizer()
    assert_never_wrong(tokenizer, texts(2, 100))
    longest = sorted((tokenizer.token(i) for i in range(tokenizer.vocab_size)), key=len)[-300:]
    assert_never_wrong(tokenizer, [tokenizer.decode([tokenizer.id(token)]) * 200 for token in longest])
    for text in ("the quick brown fox ", "漢字かな", "=" * 20, "\n", " "):
        assert tokenizer.exceeds(text * (4_000_000 // len(text)), 8191)


def test_a_letter_and_its_mark_in_two_chunks(monkeypatch):
    """One token stands for 64 letters and an accented one, which is two characters before it is composed."""
    run, accented = "a" * 64, "Ã¡"
    doubled = [("a" * 2**i, "a" * 2**i) for i in range(6)]
    merges = [*doubled, ("Ã", "¡"), (run, accented)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    made = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.normalizer = normalizers.NFC()
    monkeypatch.setattr("dovetail.io.fewest._CHUNK", 65)
    tokenizer, text = Tokenizer(made), run + "a\u0301"
    assert len(tokenizer.encode(text)) == 1 and not tokenizer.exceeds(text, 1)


def test_it_reads_no_further_than_it_must():
    fewest, read = Fewest(long_tokens()), []

    class Text(str):
        def __getitem__(self, part):
            read.append(part)
            return super().__getitem__(part)

    assert fewest.exceeds(Text("word " * 3_000_000), 100)
    assert len(read) == 1


def test_a_long_text_lets_other_threads_run(smollm2_gguf):
    """Tokenizing must release Python's lock, or a server's streams stop meanwhile."""
    tokenizer, text = GgufCheckpoint(smollm2_gguf).tokenizer(), "the quick brown fox jumps over a lazy dog " * 15_000
    turns, done = [time.perf_counter()], threading.Event()

    def count():
        while not done.is_set():
            time.sleep(0.001)
            turns.append(time.perf_counter())

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.perf_counter()
    ids = tokenizer.encode(text)
    took = time.perf_counter() - begun
    done.set()
    thread.join()
    longest = max(b - a for a, b in itertools.pairwise(turns))
    assert longest < took / 2, f"another thread stood still for {longest:.2f} s of {took:.2f}"
    assert ids == tokenizer.backend.encode(text).ids
