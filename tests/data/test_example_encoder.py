"""Test that exactly the assistant's tokens are trained, as transformers masks them, with and without marks."""

import functools
import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from refusals import refuses
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dovetail.core.errors import MissingFileError
from dovetail.data.example_encoder import ExampleEncoder
from dovetail.data.examples import ChatExample, TextExample
from dovetail.data.settings import TrainedTokens
from dovetail.io.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {
    "smollm2": ["<|im_start|>", "<|im_end|>"],
    "qwen2": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
}


def say(role, content=None, **more):
    return {"role": role, "content": content, **more}


def call(city):
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city, "days": 2}}}


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM, USER, MORE = say("system", "Be brief. 简短"), say("user", 'What\'s the "weather"? 😀'), say("user", "And then?")
CHATS = {
    "one turn": ([USER, say("assistant", "Sunny.")], None),
    "several turns": ([SYSTEM, USER, say("assistant", "Sunny 🦊"), MORE, say("assistant", "Rain.\n\n 🌧")], None),
    "tools": (
        [SYSTEM, USER, say("assistant", tool_calls=[call("Zürich")]), say("tool", '{"sky": "clear"}'),
         say("assistant", "Clear."), MORE, say("assistant", tool_calls=[call("東京")]), say("tool", "rain"),
         say("assistant", "Rain. <b>&</b>")],
        TOOLS,
    ),
    "thinking": (
        [USER, say("assistant", "Sunny.", reasoning_content="I look."), MORE,
         say("assistant", "Rain.", reasoning_content="Clouds.")],
        None,
    ),
    "the user last": ([USER, say("assistant", "Sunny."), MORE], None),
    "spaces around": ([USER, say("assistant", "  Sunny. \n"), MORE, say("assistant", " x ")], None),
    "markers spelled out": ([say("user", "<|im_end|> <end_of_turn>"), say("assistant", "a <|im_end|> b")], None),
}  # fmt: skip


@pytest.fixture(scope="module")
def family(smollm2_gguf):
    """SmolLM2's vocabulary with a family's special tokens and template; Gemma's kind of tokenizer is trained here."""
    from dovetail.data.encoder import find_tokenizer

    smollm2 = find_tokenizer(str(smollm2_gguf)).backend.to_str()
    return functools.cache(lambda name: Family(name, Backend.from_str(smollm2)))


class Family:
    def __init__(self, name, backend):
        backend = sentencepiece() if name == "gemma" else backend
        backend.add_special_tokens(SPECIAL[name])
        if name == "llama3":  # as its own: it moves offsets past the space before a word
            backend.post_processor = processors.ByteLevel(trim_offsets=True)
        self.template = (TEMPLATES / f"{name}.jinja").read_text()
        self.bare = re.sub(r"\{%-? (end)?generation -?%\}", "", self.template)
        self.tokenizer = Tokenizer(backend, bos=SPECIAL[name][0], eos=SPECIAL[name][-1])
        self.marked = ExampleEncoder(self.tokenizer, self.template)
        self.unmarked = ExampleEncoder(self.tokenizer, self.bare)

    @functools.cached_property
    def theirs(self):
        from transformers import PreTrainedTokenizerFast

        mine = self.tokenizer
        backend = Backend.from_str(mine.backend.to_str())
        return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=mine.bos, eos_token=mine.eos)


def sentencepiece():
    """Build a tokenizer whose spaces are ▁ and whose unknown characters become bytes."""
    texts = ["What's the weather? And then: Sunny. Rain. Clear. Rain or rain. user model tool_code"] * 3
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    vocab = made.get_vocab()
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(vocab, key=vocab.__getitem__)]
    merges = [tuple(merge) for merge in json.loads(made.to_str())["model"]["merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    out = Backend(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    out.normalizer = normalizers.Replace(" ", "▁")
    out.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return out


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", SPECIAL)
def test_marked_templates_give_the_mask_of_transformers(family, name, chat):
    (messages, tools), one = CHATS[chat], family(name)
    expected = one.theirs.apply_chat_template(
        messages, tools=tools, chat_template=one.template, return_dict=True, return_assistant_tokens_mask=True
    )
    (found,) = one.marked.encode(ChatExample(messages, tools))
    assert found.tokens.tolist() == expected["input_ids"]
    assert found.mask.astype(int).tolist() == expected["assistant_masks"] and found.mask.sum() > 2


PIECES = [
    " ",
    "\n",
    "\n\n",
    "a",
    "the ",
    "😀",
    "👩‍👩‍👧",
    "é",
    "e\u0301",
    "東京",
    "\t",
    "<|im_end|>",
    "<end_of_turn>",
    "1234",
    "שלום",
]


@pytest.mark.parametrize("name", SPECIAL)
def test_random_text_gives_the_mask_of_transformers(family, name):
    one, random = family(name), Random(0)

    def some():
        return "".join(random.choices(PIECES, k=random.randint(1, 12)))

    for _ in range(100):
        messages = [say(role, some()) for role in ["user", "assistant"] * random.randint(1, 3)]
        expected = one.theirs.apply_chat_template(
            messages, chat_template=one.template, return_dict=True, return_assistant_tokens_mask=True
        )
        (found,) = one.marked.encode(ChatExample(messages))
        assert found.tokens.tolist() == expected["input_ids"], messages
        assert found.mask.astype(int).tolist() == expected["assistant_masks"], messages


@pytest.mark.parametrize("chat", [chat for chat in CHATS if chat != "spaces around"])  # see the test of joined tokens
@pytest.mark.parametrize("name", SPECIAL)
def test_templates_without_marks_train_the_same_tokens(family, name, chat):
    """Over all documents of a conversation, each turn is trained once, as the marks have it where it stands last."""
    (messages, tools), one = CHATS[chat], family(name)
    documents = one.unmarked.encode(ChatExample(messages, tools))
    last = [one.marked.encode(ChatExample(messages[: i + 1], tools, i))[0] for i in turns(messages)]
    assert sorted(written(one.tokenizer, documents)) == sorted(written(one.tokenizer, last))
    rendered = [found.tokens.tolist() for found in [*one.marked.encode(ChatExample(messages, tools)), *last]]
    assert all(document.tokens.tolist() in rendered for document in documents)


def turns(messages):
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def written(tokenizer, documents):
    """The text of each run of trained tokens."""
    for tokens, mask, _ in documents:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        for start, stop in edges.reshape(-1, 2):
            yield tokenizer.decode(tokens[start:stop], skip_special=False)


# --- documents of their own -------------------------------------------------------------------------------------------


def test_a_stable_template_makes_one_document_of_a_conversation(family):
    one = family("smollm2")
    (found,) = one.unmarked.encode(ChatExample(CHATS["several turns"][0]))
    assert list(written(one.tokenizer, [found])) == ["Sunny 🦊<|im_end|>", "Rain.\n\n 🌧<|im_end|>"]


def test_the_template_of_smollm2(smollm2_gguf):
    from dovetail.data.encoder import find_tokenizer

    tokenizer = find_tokenizer(str(smollm2_gguf))
    messages = CHATS["several turns"][0]
    (found,) = ExampleEncoder(tokenizer).encode(ChatExample(messages))
    assert found.tokens.tolist() == tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert list(written(tokenizer, [found])) == ["Sunny 🦊<|im_end|>", "Rain.\n\n 🌧<|im_end|>"]


def test_thinking_dropped_by_later_turns_is_trained_in_the_last_turn(family):
    one = family("qwen3")
    documents = one.unmarked.encode(ChatExample(CHATS["thinking"][0]))
    assert sorted(written(one.tokenizer, documents)) == [
        "<think>\nClouds.\n</think>\n\nRain.<|im_end|>",
        "<think>\nI look.\n</think>\n\nSunny.<|im_end|>",
    ]


def test_an_answer_that_would_merge_with_the_prompts_last_token(make_tokenizer):
    tokenizer = make_tokenizer()
    messages = [say("user", "hi"), say("assistant", "\n\nhello"), say("user", "you?"), say("assistant", "fox")]
    documents = ExampleEncoder(tokenizer).encode(ChatExample(messages))
    assert sorted(written(tokenizer, documents)) == ["\n\nhello<|im_end|>", "fox<|im_end|>"]
    alone = documents[0].tokens.tolist()
    prompt = tokenizer.encode_chat(messages[:1])
    assert alone[: len(prompt)] == prompt, "the model reads the prompt's own tokens when it is asked"
    assert alone[len(prompt) - 1 : len(prompt) + 1] != tokenizer.encode("\n\n\n")[:2]


# --- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["marked", "unmarked"])
def test_only_what_follows_the_prompt_is_trained(family, encoder):
    messages, tools = CHATS["tools"]
    (found,) = getattr(family("qwen2"), encoder).encode(ChatExample(messages, tools, 6))
    called = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "東京", "days": 2}}\n</tool_call><|im_end|>'
    assert list(written(family("qwen2").tokenizer, [found])) == [called, "Rain. <b>&</b><|im_end|>"]


def test_plain_text_trains_the_completion_and_the_end(make_tokenizer):
    tokenizer = make_tokenizer(bos="<|end|>", add_bos=True)
    encoder = ExampleEncoder(tokenizer)
    (found,) = encoder.encode(TextExample("Who are you? ", "a fox"))
    assert tokenizer.decode(found.tokens, skip_special=False) == "<|end|>Who are you? a fox<|im_end|>"
    assert list(written(tokenizer, [found])) == ["a fox<|im_end|>"]
    prompt = tokenizer.encode("Who are you? ")
    assert found.tokens[: len(prompt)].tolist() == prompt == encoder.prompt(TextExample("Who are you? ", "")).tolist()
    (ended,) = encoder.encode(TextExample("a", "b<|im_end|>"))
    assert ended.tokens.tolist().count(tokenizer.eos_id) == 1


def test_prompts_equal_those_of_serving(make_tokenizer):
    tokenizer = make_tokenizer()
    found = ExampleEncoder(tokenizer).prompt(ChatExample([USER], None, 1))
    assert found.tolist() == tokenizer.encode_chat([USER])


# --- refusals ---------------------------------------------------------------------------------------------------------

THINKS_AHEAD = (
    "{%- for m in messages %}{{- m.role + ':' + m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:<think>' }}{%- endif %}"
)


def test_a_template_without_a_findable_mask_is_refused_by_name(make_tokenizer, tmp_path):
    from dovetail.data.example_rows import open_examples
    from dovetail.data.settings import TuningData

    (tmp_path / "thinks.jinja").write_text(THINKS_AHEAD)
    records = [{"messages": [say("user", "hi"), say("assistant", "fox")]}]
    settings = TuningData(template=str(tmp_path / "thinks.jinja"))
    with refuses(code="bad_records", naming="thinks.jinja"):
        open_examples(settings, 64, 1, make_tokenizer(), "sft", records=records)
    with refuses("data.template", MissingFileError, naming="'nowhere'"):
        open_examples(TuningData(template="nowhere"), 64, 1, make_tokenizer(), "sft", records=records)


def test_tokenizers_without_template_or_eos_are_refused(make_tokenizer):
    bare = make_tokenizer(None)
    with refuses("data.template"):
        ExampleEncoder(bare).encode(ChatExample(CHATS["one turn"][0]))
    bare.eos_id = None
    with refuses(naming="eos_token"):
        ExampleEncoder(bare).encode(TextExample("a", "b"))


def test_a_token_across_prompt_and_completion_is_refused():
    backend = sentencepiece()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["</s>"])
    encoder = ExampleEncoder(Tokenizer(backend, eos="</s>"))
    with refuses(naming="'Rain ' and 'then'"):
        encoder.encode(TextExample("Rain ", "then"))
    (found,) = encoder.encode(TextExample("Rain", " then"))
    assert found.mask.sum() == len(found.tokens) - len(encoder.prompt(TextExample("Rain", "")))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
LEAVES_OUT = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{{ m.role + ':' + (m.content or '') + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "tools", "naming"),
    [
        ([say("user", "hi"), CALL], None, "messages[1].tool_calls: "),
        ([say("user", "hi"), say("assistant", "a")], [{"function": {"name": "add"}}], "tools: "),
        ([say("system", "be"), say("user", "hi"), say("assistant", "a")], None, "messages[0], of role 'system': "),
        ([say("narrator", "be"), say("user", "hi"), say("assistant", "a")], None, "[0]: unknown role 'narrator'"),
    ],
)
def test_what_a_template_does_not_write_is_refused(make_tokenizer, messages, tools, naming):
    with refuses(naming=naming):
        ExampleEncoder(make_tokenizer(LEAVES_OUT)).encode(ChatExample(messages, tools))


def test_a_role_that_the_template_names_is_taken(make_tokenizer):
    named = LEAVES_OUT.replace("('user',", "('narrator', 'user',")
    messages = [say("narrator", "be"), say("user", "hi"), say("assistant", "a")]
    assert len(ExampleEncoder(make_tokenizer(named)).encode(ChatExample(messages))) == 1


def test_assistant_only_loss_false_trains_all_tokens(make_tokenizer):
    tokenizer, chat = (
        make_tokenizer(),
        [say("user", "hi"), say("assistant", "fox"), say("user", "so"), say("assistant", "a")],
    )

    def said(side, **trained):
        (found,) = ExampleEncoder(tokenizer, trained=TrainedTokens(**trained)).encode(side)
        return tokenizer.decode(found.tokens[found.mask].tolist(), skip_special=False)

    whole = tokenizer.apply_chat(chat, add_generation_prompt=False)
    assert said(ChatExample(chat), assistant_only=False) == whole
    assert whole.endswith(said(ChatExample(chat, None, 3), assistant_only=False)) and "so" not in said(
        ChatExample(chat, None, 3), assistant_only=False
    )
    assert said(ChatExample(chat, None, 3), assistant_only=False, completion_only=False) == whole
    assert said(ChatExample(chat, None, 3), completion_only=False) == "fox<|im_end|>a<|im_end|>"
    assert said(TextExample("who", " fox"), completion_only=False) == "who fox<|im_end|>"
