"""Images of models with multimodal RoPE in the engine: the greedy tokens of transformers, whatever the steps are."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from engine.engines import GREEDY, NEW, OPTIONS, tokens_of, variant
from engine.test_images import write_tokenizer
from engine.test_speculation import Always, Replay
from image_cases import HALF, noise
from later import later
from reference_models import reference
from vision_models import IMAGE_TOKEN, Example, their_logits, vision_reference

from dovetail.core.spec import tree_map
from dovetail.engine.llm import LLM
from dovetail.engine.request.outputs import RequestOutput
from dovetail.engine.spec.speculator import Speculator, speculator_of
from dovetail.io.images.item import ImagePrompt, ImageSpan
from dovetail.io.images.patches import make_item
from dovetail.io.images.resample import resize
from dovetail.io.load import load
from dovetail.io.peft import save_adapter
from dovetail.models.lora import Lora, lora_spec

pytestmark = pytest.mark.slow

peft = later("peft")

NAME = "qwen3-vl"
DRAFTS = 3
SMALL = OPTIONS | dict(max_num_seqs=2, max_num_batched_tokens=16, max_decode_steps=4)
CAT, DOG = resize(noise(37, 21), 40, 24, "bicubic"), noise(16, 32, seed=1)  # 15 and 8 image tokens of 8 x 8 pixels
TEXT, MORE = list(range(20, 29)), [30, 31, 32]
PROMPTS = {
    "one": (TEXT, CAT, MORE),
    "another": (TEXT, 255 - CAT, MORE),
    "two": (CAT, TEXT, DOG, MORE),
    "three": (TEXT, DOG, [40], CAT, [41], DOG, MORE),
    "at the end": (TEXT, CAT),
    "none": (TEXT, MORE),
}


def example(name: str) -> Example:
    tokens, ids, pixels = [], [], []
    for part in PROMPTS[name]:
        if isinstance(part, np.ndarray):
            pixels.append(part)
            count = part.shape[0] // 8 * (part.shape[1] // 8)
            tokens, ids = tokens + [IMAGE_TOKEN] * count, ids + [len(pixels)] * count
        else:
            tokens, ids = tokens + part, ids + [0] * len(part)
    return Example(np.asarray(tokens, np.int32), pixels, np.asarray(ids, np.int32))


def prompt(name: str) -> ImagePrompt:
    given = example(name)
    starts = [int((given.image_ids == i).argmax()) for i in range(1, len(given.pixels) + 1)]
    items = [make_item(pixels, 4, 2, NAME, blocks=True) for pixels in given.pixels]
    return ImagePrompt(tuple(given.tokens.tolist()), tuple(map(ImageSpan, starts, items)))


def followed_by(name: str, tokens: Sequence[int]) -> Example:
    given = example(name)
    ids = np.append(given.image_ids, [0] * len(tokens)).astype(np.int32)
    return Example(np.append(given.tokens, tokens).astype(np.int32), given.pixels, ids)


@functools.cache
def answer(name: str, family: str) -> tuple[int, ...]:
    """The tokens that are the most probable for transformers."""
    tokens = ()
    for _ in range(NEW):
        tokens = (*tokens, int(their_logits(family, followed_by(name, tokens))[-1].argmax()))
    return tokens


def expected(*names: str, family: str = NAME) -> list[list[int]]:
    return [list(answer(name, family)) for name in names]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """An engine with a tokenizer, a chat template, a processor, and room for adapters and draft tokens."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    shutil.copytree(vision_reference(NAME)[1], folder)
    around = ["<|vision_start|>", "<|vision_end|>"]
    write_tokenizer(folder, around, "<|image_pad|>", "<|image_pad|>".join(around))
    settings = dict(image_processor_type="Qwen2VLImageProcessorFast", patch_size=4, merge_size=2, **HALF)
    settings |= dict(size=dict(shortest_edge=64, longest_edge=2048))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    made = LLM(folder, **SMALL, max_loras=1, speculative_config={"num_speculative_tokens": DRAFTS})
    made.runner.steps.all([made.runner.buckets.verify(2, DRAFTS)])  # a step that is not compiled is not waited for
    return made


@pytest.mark.parametrize("steps", [1, 4])
def test_engine_generates_what_transformers_does(llm, steps):
    """Two sequences at a time, in chunks that end inside of images, beside others that decode."""
    engine, names = variant(llm, steps=steps), list(PROMPTS)
    first, again = (engine.generate([prompt(name) for name in names], GREEDY) for _ in range(2))
    assert tokens_of(first) == tokens_of(again) == expected(*names)
    assert max(engine.launched) == steps
    assert [each.num_cached_tokens for each in again] == [(len(each.prompt_token_ids) - 1) // 4 * 4 for each in again]
    assert len({tuple(each) for each in expected(*names)}) == len(names), "a test of nothing"


@pytest.mark.thorough
def test_qwen2_5_vl():
    llm, names = LLM(vision_reference("qwen2.5-vl")[1], **SMALL), list(PROMPTS)
    for _ in range(2):
        found = llm.generate([prompt(name) for name in names], GREEDY)
        assert tokens_of(found) == expected(*names, family="qwen2.5-vl")


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl"])
def test_an_adapter_beside_the_base_model(family, tmp_path):
    model, folder = vision_reference(family)
    cfg, lora = load(folder).config, Lora(r=2, target_modules=("q_proj", "down_proj"))
    rng = np.random.default_rng(0)
    adapters = tree_map(lambda one: rng.normal(0, 0.3, one.shape).astype(np.float32), lora_spec(cfg, lora))
    save_adapter(tmp_path, cfg, adapters, lora)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    llm, given = LLM(folder, **SMALL, max_loras=1, max_lora_rank=2), prompt("two")
    llm.load_adapter("own", tmp_path)
    found = [*llm.generate(given, GREEDY, adapter="own"), *llm.generate(given, GREEDY)]
    theirs = their_logits(family, followed_by("two", tokens_of(found)[0]), adapted)
    assert theirs[len(given.tokens) - 1 : -1].argmax(-1).tolist() == tokens_of(found)[0] != tokens_of(found)[1]
    assert tokens_of(found)[1] == expected("two", family=family)[0]


def test_preempted_sequences_have_the_same_positions(llm):
    small, names = variant(llm, pages=16, caching=False), ["one", "at the end"]
    assert tokens_of(small.generate([prompt(name) for name in names], GREEDY)) == expected(*names)
    assert small.stats().preemptions > 0


def test_chat_takes_images_of_any_size(llm):
    def ask(*images: np.ndarray) -> RequestOutput:
        parts = [{"type": "image", "image": image} for image in images]
        return variant(llm).chat([{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], GREEDY)

    odd, small, large = noise(37, 21), noise(3, 5), noise(70, 90)  # 5 x 3, 1 x 2 and 4 x 6 features
    given = [ask(odd), ask(odd, small), ask(large)]
    assert [each.prompt_token_ids.count(IMAGE_TOKEN) for each in given] == [15, 15 + 2, 24]
    tokens = np.asarray(given[0].prompt_token_ids, np.int32)
    seen = Example(np.append(tokens, given[0].outputs[0].token_ids), [CAT], np.zeros(0))
    theirs = their_logits(NAME, replace(seen, image_ids=(seen.tokens == IMAGE_TOKEN).astype(np.int32)))
    assert theirs[len(tokens) - 1 : -1].argmax(-1).tolist() == list(given[0].outputs[0].token_ids)


@pytest.mark.thorough
def test_log_probabilities_of_a_prompt(llm):
    output = variant(llm).generate(prompt("two"), replace(GREEDY, prompt_logprobs=0))[0]
    logits = their_logits(NAME, example("two")).astype(np.float64)
    theirs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    given = prompt("two")
    after = given.spans[1].end
    for i in (*range(given.spans[0].end, given.spans[1].start), *range(after, len(given.tokens))):
        np.testing.assert_allclose(output.prompt_logprobs[i].logprob, theirs[i - 1, given.tokens[i]], atol=1e-4)
    assert tokens_of([output]) == expected("two")


def test_with_draft_tokens(llm):
    engine, given = variant(llm), [prompt(name) for name in ("one", "at the end")]
    plain = variant(llm).generate(given, GREEDY)
    engine.engine.speculator = Speculator(Replay(plain), Always((DRAFTS,)))
    assert tokens_of(plain) == tokens_of(engine.generate(given, GREEDY)) == expected("one", "at the end")
    assert engine.stats().speculation.accepted_tokens > 0


@pytest.mark.thorough
def test_with_a_draft_model_ahead_of_the_host():
    """Verify steps are launched before the host knows how many tokens the last one gained."""
    config = {"model": str(reference("llama3.1")[1]), "num_speculative_tokens": DRAFTS}
    llm = LLM(vision_reference(NAME)[1], **SMALL, speculative_config=config)
    llm.runner.steps.all([llm.runner.buckets.verify(2, DRAFTS)])
    made = speculator_of(llm.options.speculative_config, (DRAFTS,))
    engine = variant(llm)
    engine.engine.speculator = Speculator(made.drafter, Always((DRAFTS,)))
    given = [prompt(name) for name in ("one", "at the end")]
    assert tokens_of(engine.generate(given, GREEDY)) == expected("one", "at the end")
    assert engine.stats().speculation.drafts > 0
