"""Preference losses and distillation on images, beside numbers of transformers."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from refusals import refuses
from tune.small_models import metrics, model_folder
from tune.small_vision import IMAGE, picture, vision_folder
from tune.test_images import asked, pixels_of, vision_of
from vision_models import vision_reference

import dovetail as dt
from dovetail.core.compute import compute_of
from dovetail.core.errors import RecipeError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.recipe import create
from dovetail.data.example_rows import open_examples
from dovetail.data.settings import TuningData
from dovetail.train.objective import StepContext
from dovetail.tune.distill import distill_objective
from dovetail.tune.policy import with_teacher_cfg
from dovetail.tune.preference import dpo_objective
from dovetail.tune.settings import Distill, Dpo

pytestmark = pytest.mark.slow

PART = {"type": "image"}
PAIRS = [
    {"prompt": asked(PART, "colour?")[:1], "chosen": "red", "rejected": "blue", "images": [picture("red")]},
    {"prompt": asked(PART, " or ", PART, "?")[:1], "chosen": "one", "rejected": "the other one",
     "images": [picture("green"), picture("green")]},
    {"prompt": "hello", "chosen": " you", "rejected": " me"},
]  # fmt: skip
SCALE = 1.3  # of the last norm: the policy differs from its reference, the student from its teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("smolvlm") / "model")


def changed(params: Any) -> Any:
    return {**params, "norm": params["norm"] * SCALE}


@functools.cache
def their_models() -> tuple[Any, Any]:
    base = vision_reference("smolvlm")[0]
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.text_model.norm.weight.mul_(SCALE)
    return base, other


def their_logits(model: Any, processor: Any, examples: Any, document: int) -> tuple[torch.Tensor, np.ndarray]:
    """The log-probabilities before each trained token of a document, and these tokens."""
    tokens, mask = examples.read(document, 0, 999).astype(np.int64), np.array(examples.trained(document))
    files = examples.images(document)
    given = {"pixel_values": pixels_of(processor, files)} if files else {}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens[None]), **given).logits[0].double()
    assert not (tokens[mask] == IMAGE).any()
    return torch.log_softmax(logits, -1)[:-1][mask[1:]], tokens[1:][mask[1:]]


def their_logps(processor: Any, examples: Any, base: Any) -> np.ndarray:
    found = [their_logits(base, processor, examples, i) for i in range(len(examples))]
    return np.asarray([float(logps[np.arange(len(tokens)), tokens].sum()) for logps, tokens in found])


def rows_of(folder: Path, kind: str, records: list, **how: Any) -> Any:
    model, processor = vision_of(folder)
    given: Any = dict(length=512, batch=1, kind=kind, vision=(processor, model.config.vision)) | how
    return open_examples(TuningData(), tokenizer=model.tokenizer, records=records, **given)[0]


def measured(objective: Any, folder: Path, batch: Any, frozen: Any) -> tuple[float, dict[str, float]]:
    model, _ = vision_of(folder)
    place = Placement(make_mesh(dict(data=1), jax.devices()[:1]), TRAIN)
    ctx = StepContext(place, compute_of("f32"), jnp.float32, frozen=frozen)
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def measure(params: Any) -> Any:
        found = objective.measure(params, model.config, batch, objective.weight(batch), ctx)
        return found.loss, found.metrics

    return jax.tree.map(float, measure(changed(model.params)))


def settings_of(cls: Any, folder: Path, **more: Any) -> Any:
    found = create(cls, {"model": str(folder), "data": {"path": "x"}, "steps": 1, "length": 512, **more})
    return with_teacher_cfg(replace(found, image_patches=64))


def test_dpo_is_that_of_transformers(folder):
    """Packed pairs: one image that both sides share, the same image twice, none."""
    _, processor = vision_of(folder)
    rows = rows_of(folder, "preference", PAIRS)
    batch = rows.batch(0)
    assert batch.columns["patches"].shape[1] == 10, "3 + 2 x 3 items: a pair shares them, two places do not"
    objective = dpo_objective(settings_of(Dpo, folder, preference={"beta": 0.3, "reference": "live"}))
    loss, metrics = measured(objective, folder, batch, vision_of(folder)[0].params)
    reference, policy = (their_logps(processor, rows.examples, model) for model in their_models())
    margins = 0.3 * (policy - reference)
    chosen, rejected = margins[0::2], margins[1::2]
    np.testing.assert_allclose(loss, np.log1p(np.exp(rejected - chosen)).mean(), atol=1e-4)
    np.testing.assert_allclose(metrics["chosen_logp"], policy[0::2].mean(), atol=1e-3)
    np.testing.assert_allclose(metrics["reward_margin"], (chosen - rejected).mean(), atol=1e-4)


def test_distillation_is_that_of_transformers(folder, tmp_path):
    _, processor = vision_of(folder)
    records = [{"prompt": r["prompt"], "completion": r["rejected"], "images": r.get("images", [])} for r in PAIRS]
    rows = rows_of(folder, "sft", records)
    settings = settings_of(Distill, folder, teacher=str(folder), distillation={"alpha": 1.0})
    loss, _ = measured(distill_objective(settings), folder, rows.batch(0), {"teacher": vision_of(folder)[0].params})
    total = count = 0
    for document in range(len(rows.examples)):
        (teacher, _), (student, _) = (their_logits(m, processor, rows.examples, document) for m in their_models())
        total += float((teacher.exp() * (teacher - student)).sum())
        count += len(teacher)
    np.testing.assert_allclose(loss, total / count, atol=1e-4)
    text_only = model_folder(tmp_path, vocab_size=160)
    with refuses("teacher", RecipeError):
        settings_of(Distill, folder, teacher=text_only)


def test_kto_has_the_images_of_prompts(folder):
    """A mismatched document has the images of its prompt, whole or not at all."""
    records = [{**pair, "completion": pair["chosen"], "label": True} for pair in PAIRS[:2]]
    for length in (512, 90):
        rows = rows_of(folder, "unpaired", records, length=length, packing=False, batch=2)
        examples = rows.examples
        for document in range(len(examples)):
            tokens = examples.read(document, 0, 999)
            assert (tokens == IMAGE).sum() == 12 * len(examples.images(document))
            assert not np.asarray(examples.trained(document))[tokens == IMAGE].any()
        if length == 512:
            assert [len(examples.images(i)) for i in range(4)] == [1, 1, 2, 2]
            np.testing.assert_array_equal(rows.batch(0).columns["label"][:, 0] != 0, [True, True])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dpo", "kto", "distill"])
def test_what_is_on_disk_is_what_is_live(folder, tmp_path, kind):
    """Whole runs: a reference or a teacher's tokens that are computed once, with the images."""
    found = []
    for where in ("live", "disk"):
        more: Any = {"preference": {"reference": where, "loss_type": "kto" if kind == "kto" else "sigmoid"}}
        records = PAIRS if kind == "dpo" else [{**pair, "completion": pair["chosen"], "label": True} for pair in PAIRS]
        if kind == "distill":
            more = {"teacher": str(folder), "distillation": {"teacher": where, "top_k": 8, "kind": "reverse"}}
        call = dt.distill if kind == "distill" else dt.dpo
        ended = call(
            model=str(folder), data=records, run_dir=tmp_path / where, steps=3, batch=8, length=512, show=False,
            optimizer={"lr": 3e-3}, precision={"compute": "f32"}, schedule={"name": "constant"}, **more,
        )  # fmt: skip
        assert ended.code == 0
        found.append([line["loss"] for line in metrics(ended.folder) if "loss" in line])
    np.testing.assert_allclose(*found, rtol=1e-3)
    assert found[0][-1] != found[0][0]
