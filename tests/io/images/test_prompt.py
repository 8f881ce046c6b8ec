"""Prompts with images: the tokens of transformers' processors, and a place for each image."""

import importlib

import image_cases
import numpy as np
import pytest
from image_cases import FAMILIES, noise
from PIL import Image
from refusals import refuses

from dovetail.core.errors import RequestError, UserError
from dovetail.io.images.prompt import encode_images, encode_text, encode_tokens, expand, place_images
from dovetail.io.tokenizer import LiteralText

pytestmark = pytest.mark.slow

IMAGE, PHOTOS = {"type": "image"}, [noise(30, 50), noise(90, 20, seed=1)]
MESSAGES = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "hi\n"}, IMAGE, {"type": "text", "text": "\n?"}]},
]
THEIRS = {
    "smolvlm": "idefics3.processing_idefics3.Idefics3Processor",
    "gemma3": "gemma3.processing_gemma3.Gemma3Processor",
    "gemma4": "gemma4.processing_gemma4.Gemma4Processor",
    "qwen2.5": "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "qwen3": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
}


def their_tokens(name, tokenizer, text, images, folder, monkeypatch):
    """Return the input_ids of transformers' processor, without those of its parts that need torchvision."""
    from transformers import PreTrainedTokenizerFast
    from transformers.processing_utils import ProcessorMixin

    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *args: type(None))
    tokenizer.save(folder)
    family, (module, _, kind) = FAMILIES[name], THEIRS[name].rpartition(".")
    found = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    more = {"feature_extractor": None, "video_processor": None} if name == "gemma4" else {}
    processor = found(
        image_processor=image_cases.image_processor_of(family),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder), **family.more, **more,
    )  # fmt: skip
    return list(processor(text=[text], images=[[Image.fromarray(image) for image in images]])["input_ids"][0])


@pytest.mark.parametrize("name", THEIRS)
def test_tokens_equal_transformers(name, tmp_path, monkeypatch):
    processor, tokenizer = image_cases.processor_of(FAMILIES[name], tmp_path)
    prompt = encode_images(tokenizer, processor, MESSAGES, PHOTOS)
    text = tokenizer.apply_chat(MESSAGES)
    assert list(prompt.tokens) == their_tokens(name, tokenizer, text, PHOTOS, tmp_path, monkeypatch)
    covered = {i for span in prompt.spans for i in range(span.start, span.end)}
    assert covered == {i for i, token in enumerate(prompt.tokens) if token == processor.image_id}
    items = [item.key for photo in PHOTOS for item in processor(photo).items]
    assert [span.item.key for span in prompt.spans] == items


def test_line_breaks_around_an_image_become_one_token(tmp_path):
    processor, tokenizer = image_cases.processor_of(FAMILIES["gemma3"], tmp_path)
    prompt = encode_images(tokenizer, processor, MESSAGES, PHOTOS)
    three = tokenizer.encode("\n\n\n", add_special=False)
    assert len(three) == 1 and prompt.tokens.count(three[0]) == 2


@pytest.fixture
def smol(tmp_path):
    return image_cases.processor_of(FAMILIES["smolvlm"], tmp_path)


def test_images_may_be_inside_the_messages(smol, tmp_path):
    processor, tokenizer = smol
    path = tmp_path / "photo.png"
    Image.fromarray(PHOTOS[0]).save(path)
    want = encode_images(tokenizer, processor, [{"role": "user", "content": [IMAGE, IMAGE]}], [PHOTOS[0]] * 2)
    for part in (
        {"type": "image", "image": PHOTOS[0]}, {"type": "image", "image": Image.fromarray(PHOTOS[0])},
        {"type": "image", "path": str(path)}, {"type": "image_url", "image_url": {"url": str(path)}},
        {"type": "input_image", "image_url": str(path)},
    ):  # fmt: skip
        found = encode_images(tokenizer, processor, [{"role": "user", "content": [part, IMAGE]}], [PHOTOS[0]])
        assert found.tokens == want.tokens and [s.item.key for s in found.spans] == [s.item.key for s in want.spans]


def test_images_of_plain_text_come_first(smol):
    processor, tokenizer = smol
    system = {"role": "system", "content": "s"}
    text = [system, {"role": "user", "content": "hi"}, {"role": "user", "content": "there"}]
    parts = [system, {"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "hi"}]}, text[2]]
    found, want = (encode_images(tokenizer, processor, messages, PHOTOS) for messages in (text, parts))
    assert found.tokens == want.tokens


def test_templates_that_read_parts_alone_write_texts_too(smol):
    """SmolVLM's would read a text letter by letter and write nothing."""
    _, tokenizer = smol
    assert tokenizer.apply_chat([{"role": "user", "content": "hello"}]) == "user: hello\n"
    assert tokenizer.apply_chat(
        [{"role": "user", "content": "hello"}], add_generation_prompt=False, continue_final_message=True
    ) == "user: hello"  # fmt: skip


def test_a_prompt_without_images(smol):
    processor, tokenizer = smol
    prompt = encode_images(tokenizer, processor, [{"role": "user", "content": "hello"}])
    assert prompt.spans == () and list(prompt.tokens) == tokenizer.encode("user: hello\n", add_special=False)


@pytest.mark.parametrize("parts, images", [([IMAGE], PHOTOS), ([IMAGE, IMAGE, IMAGE], PHOTOS), ([IMAGE], [])])
def test_wrong_number_of_images_is_refused(smol, parts, images):
    processor, tokenizer = smol
    with refuses("messages", RequestError, "invalid_image"):
        encode_images(tokenizer, processor, [{"role": "user", "content": parts}], images)


def test_placeholder_in_a_text_is_refused_or_literal(smol):
    processor, tokenizer = smol
    messages = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "what is <image>?"}]}]
    with refuses("messages", RequestError, "invalid_image", naming="<image>"):
        encode_images(tokenizer, processor, messages, PHOTOS[:1])
    literal, images = LiteralText(tokenizer), [processor(PHOTOS[0])]
    text = tokenizer.apply_chat(literal.mark(messages))
    prompt = encode_text(text, images, processor, lambda text: literal.encode(text, False))
    assert sum(span.count for span in prompt.spans) == prompt.tokens.count(processor.image_id)
    assert "what is <image>?" in tokenizer.decode(prompt.tokens)


def test_template_that_writes_no_placeholder_is_refused(smol):
    processor, tokenizer = smol
    blind = tokenizer.with_templates("{% for m in messages %}{{ m.role }}{% endfor %}")
    with refuses("messages", RequestError, "invalid_image", naming="0 placeholders"):
        encode_images(blind, processor, MESSAGES, PHOTOS)


def test_messages_with_images_are_no_text_prompt(smol):
    with refuses("messages", UserError):
        smol[1].encode_chat(MESSAGES)


def test_token_ids_with_placeholders_or_image_tokens(smol):
    processor, tokenizer = smol
    images = [processor(photo) for photo in PHOTOS]
    ids = tokenizer.encode("a<image>b<image>", add_special=False)
    want = encode_text("a<image>b<image>", images, processor, lambda text: tokenizer.encode(text, False))
    for tokens in (ids, want.tokens):
        found = encode_tokens(tokens, images, processor, tokenizer)
        assert found.tokens == want.tokens and [s.start for s in found.spans] == [s.start for s in want.spans]
    with refuses("prompt", RequestError, "invalid_image"):
        encode_tokens(ids[:2], images, processor, tokenizer)
    torn = [*want.tokens[:30], 7, *want.tokens[30:]]
    assert want.tokens[29] == want.tokens[30] == processor.image_id or torn.insert(want.spans[0].start + 1, 7) is None
    with refuses("prompt", RequestError, "invalid_image"):
        encode_tokens(torn, images, processor, tokenizer)


def test_characters_are_found_after_expansion(smol):
    processor, _ = smol
    images = [processor(photo) for photo in PHOTOS]
    text = "ab<image>cd<image>ef"
    found = expand(text, images, "<image>")
    for letter in "abcdef":
        if letter not in "ae":  # also letters of the placeholder
            assert found.text[found.moved(text.rindex(letter))] == letter
    assert found.moved(len(text)) == len(found.text) and found.moved(2) == 2
    assert expand("ab<image>cd", images, "<image>", partly=True).text == found.text[: found.moved(11)]


def test_a_bad_image_is_named():
    with refuses("messages", RequestError, "invalid_image"):
        place_images([{"role": "user", "content": [IMAGE]}], [])
    assert np.array_equal(place_images([{"role": "user", "content": [IMAGE]}], PHOTOS[:1])[1], PHOTOS[:1])
