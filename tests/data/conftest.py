"""A small ChatML tokenizer, trained here: no download, the same on every run."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog answers: hello, who are you?",
    "user assistant\n\n\n\n",
]


def small_tokenizer(template=CHATML, **more):
    from dovetail.io.tokenizer import Tokenizer

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>", "<|end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    return Tokenizer(backend, eos="<|im_end|>", chat_template=template, **more)


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="session")
def make_tokenizer():
    """Of a template, and arguments of Tokenizer."""
    return small_tokenizer
