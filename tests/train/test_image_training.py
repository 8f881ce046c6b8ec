"""Train models of images with the common loop: exact resume, meshes, evaluation, exports that transformers reads."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.core.reporter import Reporter
from dovetail.core.training import Checkpoint, Eval, Mesh, Optimizer, Precision, Schedule
from dovetail.data.image_settings import Augment, ImageData
from dovetail.train.image_objective import mixed
from dovetail.train.image_settings import ImagePretrain
from dovetail.train.pretrain import pretrain_class, pretrain_settings
from dovetail.train.settings import Pretrain

pytestmark = pytest.mark.slow

TOWER = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
VISION = dict(TOWER, image_size=8, patch_size=4, model_type="siglip_vision_model")
TEXT = dict(TOWER, vocab_size=257, max_position_embeddings=16, projection_size=16, pad_token_id=256)
MODELS = {
    "classification": {
        "architectures": ["SiglipForImageClassification"], "vision_config": VISION | {"vision_use_head": False},
        "num_labels": 10, "dovetail": {"fixed_positions": True},
    },
    "siglip": {"architectures": ["SiglipModel"], "vision_config": VISION, "text_config": TEXT},
}  # fmt: skip


def recipe(folder, objective="classification", **more):
    path = folder / f"{objective}.json"
    path.write_text(json.dumps(MODELS[objective] | {"model_type": "siglip"}))
    tokenizer = "bytes" if objective == "siglip" else ""
    data = ImageData("digits", held_out=0.1, augment=Augment(0.6, True, 1), tokenizer=tokenizer, prompt="digit {}")
    given = dict(
        model=str(path), data=data, batch=32, steps=4, mixup=0.2 if objective == "classification" else 0.0,
        optimizer=Optimizer(lr=1e-3, beta2=0.999), schedule=Schedule("constant"), precision=Precision("f32"),
        mesh=Mesh(data=1, fsdp=1), report_to=(), checkpoint=Checkpoint(every=2, export_hf=4),
        eval=Eval(every=4, batches=2),
    )  # fmt: skip
    return ImagePretrain(objective=objective, **given | more)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr("dovetail.train.prepare._all_but", lambda spare: jax.devices()[:1])


def train(settings, folder):
    return pretrain_settings(settings, folder, reporter=Reporter(show=False))


def steps(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "kind" not in line], [line for line in lines if "kind" in line]


@pytest.mark.parametrize("objective", ["classification", "siglip"])
def test_an_interrupted_run_continues_exactly(objective, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(recipe(tmp_path, objective), whole)
    train(recipe(tmp_path, objective, steps=2), parts)
    ended = train(recipe(tmp_path, objective), parts)
    assert ended.trained == 2
    (a, evals), (b, _) = steps(whole), steps(parts)
    assert [line["loss"] for line in a] == [line["loss"] for line in b]
    files = [folder / "export" / "step_4" / "model.safetensors" for folder in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    name = "held_out_top1" if objective == "classification" else "held_out_zero_shot_top1"
    assert any(0 <= line.get(name, -1) <= 1 for line in evals)


@pytest.mark.parametrize(
    "objective, mesh", [("classification", Mesh(data=1, fsdp=4)), ("siglip", Mesh(data=2, fsdp=2))]
)
def test_a_mesh_changes_no_loss(objective, mesh, tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail.train.prepare._all_but", lambda spare: jax.devices()[:4])
    train(recipe(tmp_path, objective, mesh=mesh, steps=2, eval=Eval()), tmp_path / "mesh")
    monkeypatch.setattr("dovetail.train.prepare._all_but", lambda spare: jax.devices()[:1])
    train(recipe(tmp_path, objective, steps=2, eval=Eval()), tmp_path / "one")
    (a, _), (b, _) = steps(tmp_path / "mesh"), steps(tmp_path / "one")
    np.testing.assert_allclose([x["loss"] for x in a], [x["loss"] for x in b], rtol=2e-5)


def test_an_export_is_the_same_classifier_in_transformers(tmp_path):
    from dovetail.io.load import load
    from dovetail.models.towers.classifier import to_patches
    from dovetail.models.towers.siglip import centred

    train(recipe(tmp_path), tmp_path / "run")
    folder = tmp_path / "run" / "export" / "step_4"
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    with torch.no_grad():
        wanted = theirs(**processor(list(images), return_tensors="pt")).logits
    model = load(folder, "f32")
    patches = centred(to_patches(jnp.asarray(images), 4), jnp.float32)
    np.testing.assert_allclose(model.config.images(model.params, patches), wanted, atol=1e-4)
    assert type(theirs).__name__ == "SiglipForImageClassification" and abs(wanted).max() > 1e-3


def test_mixup_mixes_images_and_targets_alike():
    images, targets = jnp.arange(4.0).reshape(4, 1, 1, 1) * 40, jnp.eye(4)
    mixed_images, mixed_targets = mixed(images, targets, 0.2, jax.random.key(0))
    share = mixed_targets[0, 0]
    assert 0.5 <= share <= 1
    np.testing.assert_allclose(mixed_targets, share * targets + (1 - share) * jnp.roll(targets, 1, 0))
    np.testing.assert_allclose(mixed_images, share * images + (1 - share) * jnp.roll(images, 1, 0))


def test_recipes_of_text_and_images_are_told_apart_and_checked(tmp_path):
    assert pretrain_class("vit-s16") is ImagePretrain and pretrain_class("tiny") is Pretrain
    assert pretrain_class("", ["objective=siglip", "model=x"]) is ImagePretrain
    with refuses("mixup", RecipeError):
        recipe(tmp_path, "siglip", mixup=0.2)
    with refuses("accumulate", RecipeError):
        recipe(tmp_path, "siglip", accumulate=2)
    with refuses("model", RecipeError):
        train(recipe(tmp_path, model="tiny"), tmp_path / "run")
    with refuses("objective", RecipeError):
        train(recipe(tmp_path, objective="classification", model=recipe(tmp_path, "siglip").model), tmp_path / "run")
