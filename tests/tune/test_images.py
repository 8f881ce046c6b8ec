"""Test SFT on images: rows, losses beside transformers', adapters, resume, and exports that load elsewhere."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from later import later
from tune.small_models import metrics
from tune.small_vision import COLOURS, IMAGE, picture, vision_folder
from vision_models import vision_reference

import dovetail as dt
from dovetail.core.compute import compute_of
from dovetail.core.errors import UnsupportedError, UserError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.recipe import create
from dovetail.core.spec import leaves
from dovetail.data.example_encoder import ExampleEncoder, fit
from dovetail.data.example_rows import open_examples
from dovetail.data.examples import example
from dovetail.data.records import from_list
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.io.images.decode import as_image
from dovetail.io.images.processor import read_processor
from dovetail.io.load import load
from dovetail.models.lora import Lora, lora_spec
from dovetail.train.objective import StepContext
from dovetail.tune.settings import Sft
from dovetail.tune.sft import sft_objective

peft = later("peft")

pytestmark = pytest.mark.slow

RUN: dict[str, Any] = dict(
    batch=8, length=96, show=False, optimizer={"lr": 3e-3}, precision={"compute": "f32"}, schedule={"name": "constant"}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("smolvlm") / "model")


def named(colour: str, image: Any = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": "colour?"}, {"role": "assistant", "content": colour}]
    return {"messages": messages, "images": [picture(colour) if image is None else image]}


def asked(*parts: Any, answer: str = "red") -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


PART = {"type": "image"}
TWO = {"messages": asked("from ", PART, " to ", PART, answer="red, blue"), "images": [picture("red"), picture("blue")]}
TALK = {
    "messages": asked(PART, "one?") + asked("and ", PART, "?", answer="blue"),
    "images": [picture("red"), picture("blue")],
}
PLAIN = {"prompt": "hello", "completion": " you"}


def vision_of(folder: Path) -> tuple[Any, Any]:
    model = load(folder)
    assert model.config.vision and model.tokenizer
    return model, read_processor(folder, model.config.vision, model.tokenizer)


def rows_of(folder: Path, records: list, **how: Any):
    model, processor = vision_of(folder)
    given: Any = dict(length=256, batch=2, kind="sft", vision=(processor, model.config.vision)) | how
    return open_examples(TuningData(), tokenizer=model.tokenizer, records=records, **given)[0]


def pixels_of(processor: Any, files: list[bytes]) -> torch.Tensor:
    """The items of images as transformers has them, [1, N, 3, 32, 32]."""
    items = [item for file in files for item in processor(as_image(file)).items]
    patches = np.stack([item.patches for item in items]).reshape(-1, 8, 8, 4, 4, 3)
    pixels = patches.transpose(0, 1, 3, 2, 4, 5).reshape(1, -1, 32, 32, 3)
    return torch.tensor(pixels).permute(0, 1, 4, 2, 3).float() / 127.5 - 1


def their_model(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").float()


def their_loss(model: Any, processor: Any, examples: Any) -> float:
    total = count = 0.0
    for document in range(len(examples)):
        tokens, mask = examples.read(document, 0, 999).astype(np.int64), np.asarray(examples.trained(document))
        files = examples.images(document)
        given = {"pixel_values": pixels_of(processor, files)} if files else {}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(tokens[None]), **given).logits[0].double()
        nll = -torch.log_softmax(logits, -1)[np.arange(len(tokens) - 1), tokens[1:]].numpy()
        total, count = total + nll[mask[1:]].sum(), count + mask[1:].sum()
    return float(total / count)


@pytest.mark.parametrize("packing", [True, False])
def test_loss_is_that_of_transformers(folder, packing):
    """Packed or alone: two images, one, none; the loss is on answers, and never on image tokens."""
    model, processor = vision_of(folder)
    rows = rows_of(folder, [TWO, named("green"), PLAIN], packing=packing, batch=1 if packing else 3)
    batch = jax.tree.map(jnp.asarray, rows.batch(0))
    assert rows.steps_per_epoch == 1 and batch.columns["patches"].shape[:2] == ((1, 10) if packing else (3, 6))
    given = {"model": str(folder), "data": {"path": "x"}, "steps": 1}
    objective = sft_objective(replace(create(Sft, given), image_patches=64))
    ctx = StepContext(Placement(make_mesh(dict(data=1), jax.devices()[:1]), TRAIN), compute_of("f32"), jnp.float32)

    def loss(params):
        return objective.measure(params, model.config, batch, objective.weight(batch), ctx).loss

    ours, grads = jax.value_and_grad(loss)(model.params)
    theirs = their_loss(vision_reference("smolvlm")[0], processor, rows.examples)
    np.testing.assert_allclose(float(ours), theirs, rtol=0, atol=1e-4)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(grads["vision"]["projector"]))
    assert float(jnp.abs(grads["vision"]["siglip"]["patch"]).max()) > 0
    assert not np.asarray(batch.loss_mask)[np.asarray(batch.targets) == IMAGE].any()


def test_every_token_but_images_can_be_trained(folder):
    rows = rows_of(folder, [TWO], trained=TrainedTokens(False, False), batch=1)
    tokens, mask = rows.examples.read(0, 0, 999), np.asarray(rows.examples.trained(0))
    np.testing.assert_array_equal(mask, tokens != IMAGE)
    assert (tokens == IMAGE).sum() == 24


def test_forms_of_images(folder, tmp_path):
    """All forms of one picture give the same rows."""
    image = picture("red")
    image.save(tmp_path / "red.png")
    file = (tmp_path / "red.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    text = "colour?"
    records = [
        named("red", value) for value in (image, np.asarray(image), file, url, {"bytes": file, "path": None},
                                          str(tmp_path / "red.png"), {"bytes": None, "path": tmp_path / "red.png"})
    ]  # fmt: skip
    records += [
        {"messages": asked(PART, text), "image": image},
        {"messages": asked({"type": "image", "image": image}, text)},
        {"messages": asked({"type": "image_url", "image_url": {"url": url}}, text)},
        {"prompt": text, "completion": "red", "image": image},
        {"prompt": asked(text)[:1], "completion": asked(text)[1:], "images": [image]},
    ]
    rows = rows_of(folder, records, batch=len(records), packing=False)
    batch = rows.batch(0)
    assert np.asarray(batch.tokens).max() == IMAGE
    for x in (batch.tokens, batch.loss_mask, batch.columns["image_index"], batch.columns["patches"]):
        assert (np.asarray(x) == np.asarray(x)[0]).all()
    lines = [{**named("red"), "images": ["red.png"]}, {**named("red"), "images": [url]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model, processor = vision_of(folder)
    given: Any = dict(tokenizer=model.tokenizer, kind="sft", vision=(processor, model.config.vision))
    settings = TuningData(path=str(tmp_path / "data.jsonl"), cache=str(tmp_path / "cache"))
    for _ in range(2):  # tokenised, then from the cache
        found, _, _ = open_examples(settings, 256, 2, **given)
        assert found.examples.images(0) == found.examples.images(1) == [file]


def test_a_cut_never_divides_an_image(folder):
    model, processor = vision_of(folder)
    encoder = ExampleEncoder(model.tokenizer, processor=processor)
    (record,) = from_list([TALK])
    found = example(record, "sft")
    assert found
    found = encoder.with_pictures(found, folder)
    (whole,) = encoder.encode(found.sides[0])
    at = np.flatnonzero(whole.tokens == IMAGE)
    assert len(at) == 24 and len(whole.images) == 2
    seen = set()
    for length in range(len(whole.tokens) - 1, 2, -1):
        documents, outcome = fit(encoder, found.sides, length, "cut")
        if outcome == "left out":
            assert length < at[12], "the first answer is not trained"
            continue
        document = documents[0][0]
        count = int((document.tokens == IMAGE).sum())
        assert count == 12 * len(document.images) and len(document.tokens) <= length
        np.testing.assert_array_equal(document.tokens, whole.tokens[: len(document.tokens)])
        if length in at[13:]:
            assert len(document.tokens) == at[12], "before the second image"
        seen.add(count)
    assert seen == {12, 24}
    half, _ = fit(encoder, found.sides, len(whole.tokens) - 1, "turns")
    assert len(half[0][0].images) == 1 and half[0][0].images[0].file != whole.images[0].file, "the older one is gone"
    assert fit(encoder, found.sides, int(at[6]), "cut").outcome == "left out", "nothing is left to train on"


def test_refusals(folder, tmp_path):
    photo = picture("red")
    for record, words in (
        ({"messages": asked("colour?", PART, PART), "images": [photo]}, "more image parts than the 1 images"),
        ({"messages": asked("colour?", PART), "images": [photo, photo]}, "1 more images than image parts"),
        ({"messages": asked("an <image> here")}, "placeholders"),
        ({"prompt": "an <image>", "completion": "red"}, "has others"),
        ({"text": "a text", "images": [photo]}, "plain text"),
        (named("red", "https://example.com/cat.png"), "download"),
        (named("red", "nothing.png"), "no file"),
        (named("red", b"GIF89a"), "images"),
    ):
        with pytest.raises(UserError, match="record 1: ") as error:
            rows_of(folder, [named("blue"), record])
        assert words in str(error.value), error.value
    with pytest.raises(UserError, match="train on images"):  # a model without a tower
        rows_of(folder, [named("red")], vision=None)
    pair = {"prompt": asked("colour?")[:1], "chosen": "red", "rejected": "blue", "images": [photo]}
    for call, record in ((dt.reward, pair), (dt.draft, {"prompt": "colour?", "images": [photo]})):
        with pytest.raises(UserError, match="train on images"):
            call(model=str(folder), data=[record], steps=1, run_dir=tmp_path / "no", show=False)


def losses(ended: Any) -> list[float]:
    return [line["loss"] for line in metrics(ended.folder) if "loss" in line]


def colours() -> list[dict[str, Any]]:
    return [named(name, picture(name, seed)) for name in COLOURS for seed in range(4)]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory) -> Any:
    """All weights, 24 steps: the colour of a picture is all that tells the answers apart."""
    at = tmp_path_factory.mktemp("trained")
    return dt.sft(model=str(folder), data=colours(), steps=24, run_dir=at / "run", **RUN)


def test_it_learns_colours(trained):
    found = losses(trained)
    assert trained.code == 0 and found[-1] < 0.1 * found[0]


def test_the_export_loads_elsewhere(trained, folder):
    export = next((trained.folder / "export").iterdir())
    theirs = their_model(export)
    model, processor = vision_of(export)
    file = io.BytesIO()
    picture("green", 9).save(file, "PNG")
    llm = dt.LLM(export, max_model_len=128, max_num_seqs=2, dtype="f32")
    question = [
        {"role": "user", "content": [{"type": "image", "image": picture("green", 9)}, *asked("colour?")[0]["content"]]}
    ]
    output = llm.chat(question, dt.SamplingParams(temperature=0, max_tokens=6))
    assert output.outputs[0].text == "green"
    ids = torch.tensor([list(output.prompt_token_ids)])
    with torch.no_grad():
        logits = theirs(input_ids=ids, pixel_values=pixels_of(processor, [file.getvalue()])).logits[0, -1]
    assert int(logits.argmax()) == output.outputs[0].token_ids[0]
    before, after = load(folder).params["vision"], model.params["vision"]
    assert all((np.asarray(x) != np.asarray(y)).any() for x, y in
               zip(jax.tree.leaves(before["projector"]), jax.tree.leaves(after["projector"]), strict=True))  # fmt: skip


def adapted_modules(cfg: Any, *targets: str) -> set[str]:
    found = leaves(lora_spec(cfg, Lora(r=4, target_modules=targets)))
    return {path.rpartition(".")[0] for path, _ in found}


def test_targets_of_adapters(folder):
    """A name of the language model's is not the tower's; the tower and the projector are named by more."""
    cfg = load(folder).config
    assert not any(path.startswith("vision") for path in adapted_modules(cfg, "all-linear"))
    assert adapted_modules(cfg, "q_proj") == {f"layers.{i}.attn.q" for i in range(2)}
    assert adapted_modules(cfg, "modality_projection.proj") == {"vision.projector.proj"}
    tower = {f"vision.siglip.layers.{i}" for i in range(3)}
    assert adapted_modules(cfg, r".*vision_model.*\.v_proj") == {f"{each}.attn.v" for each in tower}
    both = adapted_modules(cfg, "q_proj", "fc1")
    assert both == {f"{each}.mlp.up" for each in tower} | adapted_modules(cfg, "q_proj")


def test_adapters_are_peft_s(folder, tmp_path):
    """Adapters of all three parts: PEFT, a merged folder and a resumed run have the same; the rest stays as it was."""
    targets = ["all-linear", "modality_projection.proj", "fc1"]
    how: Any = dict(
        model=str(folder), data=colours(), lora={"r": 4, "lora_alpha": 8.0, "target_modules": targets}, **RUN
    )
    straight = dt.sft(steps=4, run_dir=tmp_path / "straight", **how)
    dt.sft(steps=2, run_dir=tmp_path / "resumed", **how)
    resumed = dt.sft(steps=4, run_dir=tmp_path / "resumed", **how)
    assert (resumed.trained, resumed.step) == (2, 4)
    exports = [ended.folder / "export/step_4" for ended in (straight, resumed)]
    one, other = ((each / "adapter_model.safetensors").read_bytes() for each in exports)
    assert one == other
    merged = dt.merge(folder, exports[0], tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(their_model(folder), exports[0])
    _, processor = vision_of(merged)
    rows = rows_of(folder, [TWO], batch=1)
    ids = torch.tensor(rows.examples.read(0, 0, 999).astype(np.int64)[None])
    pixels = pixels_of(processor, rows.examples.images(0))
    with torch.no_grad():
        a, b, before = (
            m(input_ids=ids, pixel_values=pixels).logits.numpy()
            for m in (theirs, their_model(merged), their_model(folder))
        )
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
    assert np.abs(a - before).max() > 0.01
    old, new = load(folder).params["vision"]["siglip"], load(merged).params["vision"]["siglip"]
    np.testing.assert_array_equal(old["layers"][0]["attn"]["q"], new["layers"][0]["attn"]["q"])
    with pytest.raises(UnsupportedError, match="dovetail merge"):
        dt.LLM(folder, lora_modules={"mine": str(exports[0])}, max_model_len=64, max_num_seqs=2)
