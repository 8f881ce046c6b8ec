"""Images in the engine: the tokens of the plain forward pass, whatever is chunked, cached, preempted or aborted."""

from __future__ import annotations

import base64
import functools
import gc
import json
import math
import shutil
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from engine.engines import GREEDY, NEW, OPTIONS, make_llm, mixed_prompts, tokens_of, variant
from PIL import Image
from reference_models import reference
from refusals import refuses
from vision_models import SIZES, patches_of, sized_example, their_logits, vision_reference

from dovetail.core.errors import RequestError
from dovetail.core.spec import ParamSpec, Stored, init
from dovetail.core.types import Embeds, Packed
from dovetail.engine.device.encoder import EncoderBuckets
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.outputs import RequestOutput
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.schedule.encoder_cache import EncoderCache
from dovetail.io.images.item import ImageItem, ImagePrompt, ImageSpan
from dovetail.io.load import load
from dovetail.models.decoder import forward, unembed
from dovetail.models.spec import spec
from dovetail.models.towers.vision import Vision
from dovetail.plan.serve_memory import feature_bytes, held

pytestmark = pytest.mark.slow

IMAGE = 7  # the image token
LENGTH = 96  # of the reference's rows
BATCHED = 24  # tokens of a step, fewer than two images have


@dataclass(frozen=True)
class ToyTower:
    """Map patches of 12 numbers to features, two patches each: the least that has sizes, padding and weights."""

    dim: int = 48
    patch_dim: int = 12
    patches_per_feature: int = 2
    min_patches: int = 4
    max_patches: int = 32

    def spec(self) -> dict[str, Any]:
        shape = self.dim, self.patch_dim
        return {"proj": ParamSpec(shape, ("embed", None), Stored(("toy.weight",), shape))}

    def __call__(self, params, patches, positions, placement=None):
        real = (positions[..., :1] >= 0).astype(jnp.float32)
        seen = jnp.tanh(patches / 64.0 - 2.0) * (1.0 + positions[..., 1:]) * real
        mean = seen.sum(1, keepdims=True) / real.sum(1, keepdims=True).clip(1)  # padding must not change it
        pairs = (seen + mean).reshape(seen.shape[0], -1, self.patches_per_feature, self.patch_dim).sum(2)
        return pairs.astype(params["proj"].dtype) @ params["proj"].T

    def flops(self, patches: int) -> float:
        return 2.0 * patches * self.dim * self.patch_dim


def picture(seed: int, patches: int = 24) -> ImageItem:
    rng = np.random.default_rng(seed)
    positions = np.stack([np.arange(patches) % 4, np.arange(patches) // 4], -1).astype(np.int32)
    pixels = rng.integers(0, 256, (patches, 12), np.uint8)
    return ImageItem(pixels, positions, (1, patches // 2), b"%d/%d" % (seed, patches))


def prompt(*parts: ImageItem | list[int]) -> ImagePrompt:
    tokens, spans = [], []
    for part in parts:
        if isinstance(part, ImageItem):
            spans.append(ImageSpan(len(tokens), part))
            tokens += [IMAGE] * spans[-1].count
        else:
            tokens += part
    return ImagePrompt(tuple(tokens), tuple(spans))


CAT, DOG = picture(1), picture(2, 32)
TEXT, MORE = list(range(20, 29)), [30, 31, 32]
PROMPTS = {
    "one": prompt(TEXT, CAT, MORE),
    "two": prompt(CAT, TEXT, DOG, MORE),
    "adjacent": prompt(TEXT, CAT, picture(3, 6), DOG, MORE),
    "at the end": prompt(TEXT, CAT),
    "twice": prompt(TEXT, CAT, MORE, CAT, MORE),
    "none": prompt(TEXT, MORE),
}


@functools.cache
def model(family: str = "llama3.1", block_mask: str = ""):
    loaded = load(reference(family)[1])
    source = json.dumps({"text_config": loaded.config.to_hf()})
    cfg = replace(loaded.config, vision=Vision(ToyTower(loaded.config.dim), IMAGE, block_mask), source=source)
    vision = init(spec(cfg)["vision"], jax.random.key(0), jnp.float32)
    return cfg, {**loaded.params, "vision": jax.tree.map(lambda x: 3 * x, vision)}


def make(**options) -> LLM:
    return LLM.from_weights(*model(), EngineOptions(**(OPTIONS | dict(max_decode_steps=1) | options)))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make(max_num_batched_tokens=BATCHED)


@functools.partial(jax.jit, static_argnames="cfg")
def logits_of(params, cfg, tokens, count, features, index):
    positions = jnp.arange(LENGTH)[None]
    ctx = Packed((positions < count).astype(jnp.int32))
    hidden, _ = forward(params, cfg, tokens[None], positions, ctx, embeds=Embeds(features, index[None]))
    return unembed(params, cfg, hidden[0])


def log_probabilities(given: ImagePrompt, tokens: list[int], params=None) -> np.ndarray:
    """[tokens, V] of the plain forward pass, with the tower run item by item."""
    cfg, own = model()
    params, tower = params or own, cfg.vision.tower
    features, index = np.zeros((LENGTH, cfg.dim), np.float32), np.full(LENGTH, -1, np.int32)
    for span in given.spans:
        found = tower(params["vision"], span.item.patches[None], span.item.positions[None])[0]
        features[span.start : span.end], index[span.start : span.end] = found, np.arange(span.start, span.end)
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    found = logits_of(params, cfg, padded, np.int32(len(tokens)), features, index)
    return np.asarray(jax.nn.log_softmax(found))[: len(tokens)]


@functools.cache
def _expected(name: str) -> tuple[int, ...]:
    return tuple(greedy(PROMPTS[name]))


def greedy(given: ImagePrompt, params=None) -> list[int]:
    tokens = list(given.tokens)
    for _ in range(NEW):
        tokens.append(int(log_probabilities(given, tokens, params)[-1].argmax()))
    return tokens[len(given.tokens) :]


def expected(*names: str) -> list[list[int]]:
    return [list(_expected(name)) for name in names]


def test_engine_generates_what_the_forward_pass_does(llm):
    chunked, whole = variant(llm), make(max_num_batched_tokens=128)
    names = list(PROMPTS)
    assert tokens_of(chunked.generate([PROMPTS[name] for name in names], GREEDY)) == expected(*names)
    assert tokens_of(whole.generate([PROMPTS[name] for name in names], GREEDY)) == expected(*names)
    alone = variant(llm, caching=False)
    assert [tokens_of(alone.generate(PROMPTS[name], GREEDY))[0] for name in names] == expected(*names)


@functools.cache
def given_to(name: str) -> tuple[ImagePrompt, list[int]]:
    """A prompt with two images for a family, and the tokens that are the most probable for transformers."""
    vision = load(vision_reference(name)[1]).config.vision
    tower, square = vision.tower, 2 if vision.mrope else 1
    unit = math.isqrt(tower.patch_dim // 3 * tower.patches_per_feature)
    given = sized_example([5, 3, 4], SIZES.get(name, ((32, 32),)), unit)
    spans = []
    for i, pixels in enumerate(given.pixels, 1):
        (patches,), (positions,) = patches_of([pixels], math.isqrt(tower.patch_dim // 3), square)
        grid = pixels.shape[0] // unit, pixels.shape[1] // unit
        start = int((given.image_ids == i).argmax())
        spans.append(ImageSpan(start, ImageItem(patches, positions, grid, bytes(patches))))
    longer = given
    for _ in range(NEW):
        token = int(their_logits(name, longer)[-1].argmax())
        tokens, ids = (np.append(old, new) for old, new in ((longer.tokens, token), (longer.image_ids, 0)))
        longer = replace(longer, tokens=tokens, image_ids=ids)
    return ImagePrompt(tuple(given.tokens.tolist()), tuple(spans)), longer.tokens[-NEW:].tolist()


@pytest.mark.parametrize(
    "name, tokens",
    [("smolvlm", 12), ("gemma3", 24), ("gemma4", 12), ("gemma4-31b", 288), ("gemma4-unified", 288)],
)
def test_families_generate_what_transformers_does(name, tokens, monkeypatch):
    """With a block mask (Gemma 3), no chunk ends inside an image, and hits that end there are used."""
    given, expected = given_to(name)
    options = OPTIONS | dict(max_num_batched_tokens=tokens, max_decode_steps=1)
    llm = LLM(vision_reference(name)[1], **options)
    first, again = (llm.generate(given, GREEDY)[0] for _ in range(2))
    assert tokens_of([first, again]) == [expected] * 2
    assert again.num_cached_tokens == (len(given.tokens) - 1) // 4 * 4 > 0
    # a prompt that ends earlier leaves pages up to the middle of the second image
    llm.reset_prefix_cache()
    end = given.spans[1].start + given.spans[1].count
    llm.generate(ImagePrompt(given.tokens[:end], given.spans), GREEDY)
    assert tokens_of(llm.generate(given, GREEDY)) == [expected]
    # a stream's steps are short, but not shorter than an image that is computed as a whole
    monkeypatch.setattr("dovetail.engine.engine.LEAST_TOKENS", 2)
    llm.engine.pace.tokens = 3
    llm.reset_prefix_cache()
    assert [token for delta in llm.stream(given, GREEDY) for token in delta.token_ids] == expected
    if name == "gemma3":
        with refuses("max_num_batched_tokens"):
            LLM(vision_reference(name)[1], **(options | dict(max_num_batched_tokens=23)))


def write_tokenizer(folder: Path, special: list[str], image: str, placeholder: str) -> None:
    """Write a tokenizer of letters with special tokens from 140 on, the image token 150, and a chat template."""
    letters = {chr(32 + i): i + 3 for i in range(95)} | {"\n": 98}
    vocab = letters | {f"<{i}>": i for i in (0, 1, 2)} | {token: 140 + i for i, token in enumerate(special)}
    vocab |= {image: 150}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<0>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([*special, image])
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message.role }}:{% for part in message.content %}{% if part.type == 'image' %}"
        + placeholder
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}assistant:"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def folder_to_chat_with(folder: Path) -> Path:
    """SmolVLM with a tokenizer of letters, a chat template and a processor of 32 x 32 tiles."""
    shutil.copytree(vision_reference("smolvlm")[1], folder)
    special = ["<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"]
    special += ["<fake_token_around_image>", "<global-img>"]
    write_tokenizer(folder, special, "<image>", "<image>")
    settings = dict(
        image_processor_type="SmolVLMImageProcessor", size={"longest_edge": 64}, max_image_size={"longest_edge": 32},
        do_resize=True, do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=[0.5] * 3,
        image_std=[0.5] * 3, resample=1, do_image_splitting=True,
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_chat_and_generate_take_images(tmp_path):
    llm = LLM(
        folder_to_chat_with(tmp_path / "model"), **(OPTIONS | dict(max_num_batched_tokens=64, max_decode_steps=1))
    )
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "photo.png")
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "photo.png").read_bytes()).decode()

    def ask(part: dict) -> RequestOutput:
        return llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}], GREEDY)

    found = [ask({"type": "image", "image": each}) for each in (image, pixels, str(tmp_path / "photo.png"))]
    found.append(ask({"type": "image_url", "image_url": {"url": url}}))
    assert len({tuple(each) for each in tokens_of(found)}) == 1 and llm.stats().encoded_items == 5, "four tiles and all"
    assert [each.num_cached_tokens > 0 for each in found] == [False, True, True, True]
    assert tokens_of([ask({"type": "image", "image": 255 - pixels})]) != tokens_of(found[:1])
    text = "user:<image>What?assistant:"
    given = {"prompt": text, "multi_modal_data": {"image": image}}
    assert tokens_of(llm.generate([given, {"prompt": "Hello"}], GREEDY))[0] == tokens_of(found[:1])[0]
    assert "".join(delta.text for delta in llm.stream(given, GREEDY)) == found[0].outputs[0].text
    for bad, param, code in (
        ({"prompt": text}, "images", None),  # an image token without an image
        ({"prompt": "Hello", "multi_modal_data": {"image": image}}, "prompt", "invalid_image"),
        ({"prompt": text, "multi_modal_data": {"audio": image}}, "multi_modal_data", None),
        ({"prompt": text, "multi_modal_data": {"image": "https://a.example/a.png"}}, "image", "invalid_image_url"),
        ({"prompt": text, "images": image}, "prompts", None),
    ):
        with refuses(param, RequestError, code):
            llm.generate(bad, GREEDY)
    with refuses("messages", RequestError, "invalid_image_url"):
        ask({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})


def test_equal_images_share_pages_and_different_ones_do_not(llm):
    llm = variant(llm)
    first, again = (llm.generate(PROMPTS["one"], GREEDY)[0] for _ in range(2))
    other = prompt(TEXT, picture(9), MORE)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == (len(PROMPTS["one"].tokens) - 1) // 4 * 4
    encoded = llm.stats().encoded_items
    found = llm.generate(other, GREEDY)[0]
    assert found.num_cached_tokens == len(TEXT) // 4 * 4, "only the text before the image is equal"
    assert tokens_of([first, again, found]) == [*expected("one", "one"), greedy(other)]
    assert greedy(other) != expected("one")[0]
    assert llm.stats().encoded_items == encoded + 1 == 2
    # the same image at another place: its features are found, its pages are not
    moved = llm.generate(prompt(MORE, CAT, MORE), GREEDY)[0]
    assert moved.num_cached_tokens == 0 and llm.stats().encoded_items == 2


def test_sequences_of_a_request_share_the_image(llm):
    llm = variant(llm)
    params = replace(GREEDY, n=3, temperature=0.0)
    outputs = llm.generate(PROMPTS["two"], params)[0].outputs
    assert [list(each.token_ids) for each in outputs] == expected(*["two"] * 3)
    assert llm.stats().encoded_items == 2


def test_preempted_sequences_encode_again(llm):
    small = variant(llm, pages=24, caching=False)
    names = ["one", "two", "adjacent", "twice"]
    assert tokens_of(small.generate([PROMPTS[name] for name in names], GREEDY)) == expected(*names)
    assert small.stats().preemptions > 0
    assert small.stats().encoded_items > 5


def test_abort_between_the_chunks_of_an_image(llm):
    llm = variant(llm)
    engine = llm.engine
    engine.add("gone", PROMPTS["two"], GREEDY)
    engine.add("stays", PROMPTS["adjacent"], GREEDY)
    engine.step()
    assert 0 < engine.scheduler.running[0].computed < engine.scheduler.running[0].images_end
    assert [delta.finish_reason for delta in engine.abort("gone")] == ["abort"]
    while not engine.is_done("stays"):
        engine.step()
    assert tokens_of([engine.output("stays")]) == expected("adjacent")
    assert engine.scheduler.pool.num_used == 0
    assert tokens_of(llm.generate(PROMPTS["two"], GREEDY)) == expected("two")


def test_memory_is_bounded_over_many_images(llm):
    llm = variant(llm)
    rows, buffer = llm.engine.scheduler.config.encoder_rows, llm.runner.features
    assert buffer is not None and rows == len(buffer) == BATCHED
    params, alive = SamplingParams(temperature=0, max_tokens=1), weakref.WeakSet()
    for start in range(100, 400, 50):
        many = [prompt(picture(start + i, 8), MORE) for i in range(50)]
        alive.update(each.spans[0].item for each in many)
        llm.generate(many, params)
        assert llm.stats().encoder_rows <= rows
    del many
    gc.collect()
    assert llm.stats().encoded_items == 300 and len(alive) == 0, "pixels are kept as long as their request"
    assert len(llm.engine.scheduler.encoder._rows) <= rows // 4
    assert llm.runner.features is not None and llm.runner.features.shape == buffer.shape
    assert tokens_of(llm.generate(PROMPTS["two"], GREEDY)) == expected("two")


def test_new_weights_encode_again(llm):
    llm = variant(llm)
    params = model()[1]
    assert tokens_of(llm.generate(PROMPTS["one"], GREEDY)) == expected("one")
    changed = {**params, "vision": jax.tree.map(lambda x: -x, params["vision"])}
    llm.update_weights(changed)
    assert tokens_of(llm.generate(PROMPTS["one"], GREEDY)) == [greedy(PROMPTS["one"], changed)] != expected("one")
    llm.update_weights(params)
    llm.sleep(1)
    llm.wake_up()
    assert tokens_of(llm.generate(PROMPTS["one"], GREEDY)) == expected("one")


def test_log_probabilities_of_a_prompt_leave_out_image_tokens(llm):
    given = PROMPTS["one"]
    output = variant(llm).generate(given, replace(GREEDY, logprobs=0, prompt_logprobs=0))[0]
    theirs = log_probabilities(given, [*given.tokens, *output.outputs[0].token_ids])
    assert output.prompt_logprobs is not None and tokens_of([output]) == expected("one")
    span = given.spans[0]
    for i, entry in enumerate(output.prompt_logprobs):
        if i == 0 or span.start <= i < span.end:
            assert entry is None
        else:
            assert entry is not None
            np.testing.assert_allclose(entry.logprob, theirs[i - 1, given.tokens[i]], atol=1e-4)
    ours = output.outputs[0].token_logprobs
    np.testing.assert_allclose(ours, theirs[len(given.tokens) - 1 : -1].max(-1), atol=1e-4)


def test_a_failed_encoder_leaves_no_features(llm, monkeypatch):
    llm = variant(llm)
    run = llm.runner._run_encoder
    monkeypatch.setattr(llm.runner, "_run_encoder", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS["one"], GREEDY)
    monkeypatch.setattr(llm.runner, "_run_encoder", run)
    assert tokens_of(llm.generate(PROMPTS["one"], GREEDY)) == expected("one")


def test_on_two_devices():
    llm = make(tensor_parallel_size=2, max_num_batched_tokens=BATCHED)
    assert tokens_of(llm.generate([PROMPTS["two"], PROMPTS["none"]], GREEDY)) == expected("two", "none")


def test_with_drafts_and_room_for_adapters():
    llm = make(
        max_num_batched_tokens=64, max_loras=1, speculative_config=dict(method="ngram", num_speculative_tokens=3)
    )
    names = ["one", "at the end", "twice"]
    assert tokens_of(llm.generate([PROMPTS[name] for name in names], GREEDY)) == expected(*names)


def test_refusals(llm):
    blind = make_llm("llama3.1")
    with refuses("images", RequestError):
        blind.generate(PROMPTS["one"], GREEDY)
    with refuses("images", RequestError):
        blind.generate({"prompt": "<image>", "multi_modal_data": {"image": np.zeros((8, 8, 3), np.uint8)}}, GREEDY)
    start = ImageSpan(3, CAT)
    for bad in (
        ImagePrompt(tuple(TEXT), (start,)),  # no image tokens there
        ImagePrompt((*TEXT, IMAGE), ()),  # an image token without an image
        ImagePrompt((IMAGE,) * 12, (ImageSpan(0, CAT), ImageSpan(0, CAT))),
        prompt(TEXT, replace(CAT, patches=CAT.patches[:, :8])),
        prompt(TEXT, picture(1, 34)),  # too large
        prompt(TEXT, replace(CAT, grid=(1, 3))),
    ):
        with refuses("images", RequestError):
            llm.generate(bad, GREEDY)
    with refuses("images", RequestError):
        llm.embed(PROMPTS["one"])


def test_encoder_cache_evicts_what_was_used_longest_ago():
    cache = EncoderCache(10)
    items = [picture(i, 8) for i in range(4)]  # 4 rows each
    cache.begin()
    assert cache.hold(items[0], 4) and cache.hold(items[1], 4) and not cache.hold(items[2], 4)
    held, new = cache.take()
    assert [item for item, _ in new] == items[:2] and sorted(np.concatenate([*held.values()])) == list(range(8))
    cache.begin()
    assert cache.hold(items[0], 4) and cache.hold(items[2], 4), "item 1 makes room"
    assert [item for item, _ in cache.take()[1]] == [items[2]]
    cache.begin()
    assert cache.hold(items[1], 4) and cache.hold(items[2], 4)
    assert [item for item, _ in cache.take()[1]] == [items[1]]
    assert (cache.encoded, cache.hits, cache.num_used) == (4, 2, 8)


def test_several_items_are_encoded_at_once(llm, monkeypatch):
    llm, programs = variant(llm), llm.runner.programs
    encoder = EncoderBuckets.of(llm.config.vision.tower, BATCHED, 256, items=(1, 2), least=4)
    monkeypatch.setattr(llm.runner, "programs", replace(programs, encoder=encoder))
    sizes = [(shape.items, shape.patches, len(few)) for shape, few in encoder.calls([(CAT, 0), (DOG, 0), (CAT, 0)])]
    assert encoder.patches == (8, 16, 32) and sizes == [(2, 32, 2), (1, 32, 1)]
    few = [prompt(picture(20 + i, 6), MORE) for i in range(3)]  # padded to 8 patches
    assert tokens_of(llm.generate([*few, PROMPTS["two"]], GREEDY)) == [*map(greedy, few), *expected("two")]
    before = np.asarray(llm.runner.features)
    for shape in encoder.usual():  # as a start does
        if shape.patches < 32:
            llm.runner._run_encoder(shape, [])
    assert np.array_equal(before, llm.runner.features), "a call without items writes nothing"


def test_the_plan_counts_the_buffer_and_the_tower(llm):
    cfg, features = llm.config, llm.runner.programs.features
    assert feature_bytes(cfg, BATCHED, 4) == features.shape[0] * features.shape[1] * 4
    seeing, blind = (held(each, None, memory=2**34, dtype="f32") for each in (cfg, replace(cfg, vision=None)))
    assert seeing.weights - blind.weights == 4 * 48 * 12
    assert seeing.step >= blind.step + feature_bytes(cfg, 8192, 4)


def test_mixed_with_text(llm):
    llm, texts = variant(llm), mixed_prompts(3, 8, 40)
    texts = [[token for token in each if token != IMAGE] for each in texts]
    alone = tokens_of(llm.generate(texts, GREEDY))
    both = llm.generate([texts[0], PROMPTS["two"], texts[1], PROMPTS["one"], texts[2]], GREEDY)
    assert tokens_of(both) == [alone[0], *expected("two"), alone[1], *expected("one"), alone[2]]
