"""Tokenizer: files, special tokens, chat templates and refusals, compared with transformers."""

import json
import warnings

import numpy as np
import pytest
from refusals import refuses

from dovetail.core.errors import MissingFileError
from dovetail.io.tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
USER = [{"role": "user", "content": "the dog"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="session")
def auto():
    """transformers' reading of a folder. Its own import may warn; what we do may not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

    def load(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoTokenizer.from_pretrained(folder)

    return load


@pytest.fixture
def make_folder(tmp_path, make_backend):
    """A model's folder: a backend's tokenizer.json and files given by name (dicts as JSON)."""

    def make(kind="byte_level", backend=None, **files):
        (backend or make_backend(kind)).save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return make


def config(**more):
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return named | {"tokenizer_class": "PreTrainedTokenizerFast"} | more


def assert_same(ours: Tokenizer, theirs, samples):
    """Ids, text and special tokens agree, special tokens in the text included."""
    for text in [*samples, *(f"{token}x {token} y{token}" for token in theirs.all_special_tokens)]:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(samples) == theirs(samples)["input_ids"]
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.unk_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
        theirs.unk_token_id,
    )
    assert ours.vocab_size == len(theirs)


# --- equal to transformers --------------------------------

SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
WORDS = {"unk_token": "[UNK]", "sep_token": "[SEP]", "tokenizer_class": "PreTrainedTokenizerFast"}
BEGIN = {"content": "<|begin|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
FOLDERS = {
    "plain": ("byte_level", {"tokenizer_config__json": config()}),
    "no config": ("byte_level", {}),
    "bos in the config is not read": ("byte_level", {"tokenizer_config__json": config(add_bos_token=True)}),
    "tokens as objects": ("byte_level", {"tokenizer_config__json": config(bos_token=BEGIN | {"__type": "AddedToken"})}),
    "old special_tokens_map": (
        "byte_level",
        {
            "tokenizer_config__json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a"},
            "special_tokens_map__json": {
                "bos_token": BEGIN,
                "eos_token": "<|end|>",
                "additional_special_tokens": ["<image>", "the"],
            },
        },
    ),
    "added_tokens_decoder wins": (
        "byte_level",
        {
            "tokenizer_config__json": config(
                added_tokens_decoder={"9": BEGIN | {"content": "<tool>", "lstrip": True, "special": True}},
                additional_special_tokens=["<tool>"],
            ),
        },
    ),
    "tokens that are new": (
        "byte_level",
        {"tokenizer_config__json": config(pad_token="<new>", image_token="<img>", extra_special_tokens=["<e>"])},
    ),
    "special tokens split": ("byte_level", {"tokenizer_config__json": config(split_special_tokens=True)}),
    "sentencepiece": ("sentencepiece", {"tokenizer_config__json": SPM}),
    "gemma-like": ("sentencepiece without prefix", {"tokenizer_config__json": SPM}),
    "clean-up is not for BPE": (
        "sentencepiece",
        {"tokenizer_config__json": SPM | {"clean_up_tokenization_spaces": True}},
    ),
    "unigram": ("unigram", {"tokenizer_config__json": {"tokenizer_class": "PreTrainedTokenizerFast"}}),
    "word pieces": ("word_piece", {"tokenizer_config__json": WORDS}),
    "word pieces cleaned up": (
        "word_piece",
        {"tokenizer_config__json": WORDS | {"clean_up_tokenization_spaces": True}},
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_reads_as_transformers_reads_it(case, make_folder, auto, samples, tmp_path):
    kind, files = FOLDERS[case]
    folder = make_folder(kind, **files)
    ours, theirs = Tokenizer.from_folder(folder), auto(folder)
    assert_same(ours, theirs, samples)
    ours.save(tmp_path / "saved")
    assert_same(Tokenizer.from_folder(tmp_path / "saved"), theirs, samples)
    assert_same(ours, auto(tmp_path / "saved"), samples)


def test_truncation_and_padding_in_the_file_are_not_applied(make_folder, make_backend, auto, samples):
    backend = make_backend("byte_level")
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    folder = make_folder(backend=backend, tokenizer_config__json=config())
    ours = Tokenizer.from_folder(folder)
    assert ours.encode(samples[3]) == auto(folder).encode(samples[3])
    assert len(ours.encode(samples[3])) > 4


def test_clean_up_streams_too(make_folder):
    ours = Tokenizer.from_folder(
        make_folder("word_piece", tokenizer_config__json={"clean_up_tokenization_spaces": True})
    )
    ids = ours.encode("it isn ' t no .")
    stream = ours.stream()
    text = "".join([stream.push(i) for i in ids]) + stream.flush()
    assert text == ours.decode(ids) and " ." not in text


def test_tokens_as_objects_in_a_list_are_read_and_saved_as_text(make_folder, tmp_path):
    listed = {"additional_special_tokens": [BEGIN | {"content": "<image>"}]}
    ours = Tokenizer.from_folder(make_folder(tokenizer_config__json=config(), special_tokens_map__json=listed))
    assert ours.id("<image>") in ours.special_ids
    ours.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved["additional_special_tokens"] == ["<image>"]


# --- from parts, and back to a folder --------------------------------


@pytest.mark.parametrize("add_eos", [True, None])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_from_parts_saves_to_what_transformers_reads(make_backend, auto, samples, tmp_path, add_bos, add_eos):
    ours = Tokenizer(
        make_backend("byte_level"),
        bos="<|begin|>",
        eos="<|end|>",
        eos_ids=[2],
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=TEMPLATE,
    )
    plain = ours.encode("the", add_special=False)
    assert ours.encode("the") == [0] * bool(add_bos) + plain + [1] * bool(add_eos)
    ours.save(tmp_path)
    theirs, again = auto(tmp_path), Tokenizer.from_folder(tmp_path)
    assert_same(ours, theirs, samples)
    assert again.eos_ids == ours.eos_ids == (1, 2)
    text = theirs.apply_chat_template(USER, tokenize=False)
    assert ours.apply_chat(USER) == again.apply_chat(USER) == text
    assert ours.encode_chat(USER) == theirs.apply_chat_template(USER)["input_ids"]
    assert ours.encode_chat(USER).count(0) == 1, "the template's BOS and no other"


def test_add_bos_replaces_the_backends_rule(make_backend):
    assert Tokenizer(make_backend("sentencepiece"), bos="<s>").encode("the")[0] == 1
    assert Tokenizer(make_backend("sentencepiece"), bos="<s>", add_bos=False).encode("the")[0] != 1
    with refuses("add_bos"):
        Tokenizer(make_backend("sentencepiece"), add_bos=True)


def test_unknown_keys_of_the_config_are_kept(make_folder, tmp_path):
    kept = {"model_max_length": 4096, "our_key": {"deep": [1, "é"]}, "tokenizer_class": "Qwen2Tokenizer"}
    Tokenizer.from_folder(make_folder(tokenizer_config__json=config(**kept))).save(tmp_path / "saved")
    assert kept.items() <= json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text()).items()


def test_save_leaves_a_models_generation_config_alone(make_backend, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    Tokenizer(make_backend("byte_level"), eos="<|end|>", eos_ids=[2]).save(tmp_path)
    assert (tmp_path / "generation_config.json").read_text() == '{"temperature": 0.5}'


def test_save_drops_a_stale_template(make_backend, tmp_path):
    Tokenizer(make_backend("byte_level"), chat_template=TEMPLATE).save(tmp_path)
    Tokenizer(make_backend("byte_level")).save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).chat_template is None


# --- stop ids --------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1,)),
        ({"generation_config__json": {"eos_token_id": [2, 1]}, "config__json": {"eos_token_id": 5}}, (1, 2)),
        ({"generation_config__json": {"eos_token_id": 2}}, (1, 2)),
        ({"generation_config__json": {"temperature": 1}, "config__json": {"eos_token_id": 2}}, (1, 2)),
        ({"config__json": {"text_config": {"eos_token_id": [2]}}}, (1, 2)),
        ({"config__json": {"eos_token_id": [2, 99_999, -1]}}, (1, 2)),
    ],
)
def test_stop_ids_come_from_the_generation_config_or_the_config(make_folder, files, expected):
    ours = Tokenizer.from_folder(make_folder(tokenizer_config__json=config(), **files))
    assert ours.eos_ids == expected and ours.eos_id == 1


# --- where chat templates are found --------------------------------

NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config__json": config(chat_template="C")}, "C", "C"),
        ({"tokenizer_config__json": config(chat_template=NAMED)}, "D", "T1"),
        ({"tokenizer_config__json": config(chat_template="C"), "chat_template__jinja": "J"}, "J", "J"),
        ({"tokenizer_config__json": config(), "chat_template__jinja": "J"}, "J", "J"),
    ],
)
def test_templates_are_chosen_as_transformers_chooses_them(make_folder, auto, tmp_path, files, plain, with_tools):
    ours, theirs = Tokenizer.from_folder(make_folder(**files)), auto(tmp_path)
    ours.save(tmp_path / "saved")
    for one in (ours, Tokenizer.from_folder(tmp_path / "saved")):
        assert one.apply_chat(USER) == plain and one.apply_chat(USER, TOOLS) == with_tools
    for one in (theirs, auto(tmp_path / "saved")):
        assert one.apply_chat_template(USER, tokenize=False) == plain
        assert one.apply_chat_template(USER, tools=TOOLS, tokenize=False) == with_tools


def test_a_template_in_chat_template_json(make_folder):
    folder = make_folder(tokenizer_config__json=config(), chat_template__json={"chat_template": "P"})
    assert Tokenizer.from_folder(folder).apply_chat(USER) == "P"


def test_a_template_can_be_given_by_name_or_source(make_backend):
    ours = Tokenizer(make_backend("byte_level"), chat_template={"default": "D", "rag": "R"})
    assert ours.apply_chat(USER, chat_template="rag") == "R"
    assert ours.apply_chat(USER, chat_template="{{ messages[0].content }}") == "the dog"


def test_no_template_says_how_to_give_one(make_backend):
    with refuses("chat_template", naming="chat_template.jinja"):
        Tokenizer(make_backend("byte_level")).apply_chat(USER)
    with refuses("chat_template", naming="'rag'"):
        Tokenizer(make_backend("byte_level"), chat_template={"rag": "R"}).apply_chat(USER)


# --- ids, tokens and errors --------------------------------


def test_tokens_and_ids(make_backend):
    ours = Tokenizer(make_backend("byte_level"), bos="<|begin|>")
    assert ours.token(ours.id("<tool>")) == "<tool>" and ours.bos_id == 0 and ours.eos_id is None
    assert ours.decode(np.array(ours.encode("the dog"))) == "the dog"
    assert {"<|begin|>", "<|end|>"} <= {ours.token(i) for i in ours.special_ids}
    with refuses(naming="'nonsense'"):
        ours.id("nonsense")


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_ids_out_of_range_are_refused(make_backend, bad):
    ours = Tokenizer(make_backend("byte_level"))
    for use in (lambda: ours.decode([0, bad]), lambda: ours.token(bad), lambda: Tokenizer(ours.backend, eos_ids=[bad])):
        with refuses(naming=str(bad)):
            use()


def test_ids_in_a_gap_are_refused(make_folder, make_backend):
    made = json.loads(make_backend("byte_level").to_str())
    last = max(made["model"]["vocab"], key=made["model"]["vocab"].get)
    made["model"]["vocab"][last] += 5
    folder = make_folder()
    (folder / "tokenizer.json").write_text(json.dumps(made))
    ours = Tokenizer.from_folder(folder)
    gap = ours.id(last) - 1
    with refuses(naming=str(gap)):
        ours.decode([gap])


@pytest.mark.parametrize("bad", [b"bytes", None, 3, "half \ud83d"])
def test_input_that_is_not_text_is_refused(make_backend, bad):
    ours = Tokenizer(make_backend("byte_level"))
    with refuses():
        ours.encode(bad)
    with refuses():
        ours.encode_batch(["fine", bad])


def test_a_folder_without_a_tokenizer_says_what_is_needed(tmp_path):
    with refuses(None, MissingFileError, naming="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with refuses(None, MissingFileError, naming="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with refuses(None, MissingFileError, naming="tokenizer.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"],
)
@pytest.mark.parametrize("content", ['{"eos_token_id": 1, "vers', "", "[]"])
def test_a_broken_file_is_named(make_folder, name, content):
    folder = make_folder()
    (folder / name).write_text(content)
    with refuses(naming=name):
        Tokenizer.from_folder(folder)


def test_a_templates_name_is_not_a_path(make_backend, tmp_path):
    with refuses(naming="../x"):
        Tokenizer(make_backend("byte_level"), chat_template={"../x": ""}).save(tmp_path)
