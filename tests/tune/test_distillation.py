"""Test whole distillation runs with a teacher of another size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from tune.small_models import LORA, RUN, chats, metrics, model_folder

import dovetail as dt
from dovetail.core.errors import RecipeError

QUICK = RUN | {"optimizer": {"lr": 3e-3}}

pytestmark = pytest.mark.slow


def last(ended, name: str) -> float:
    return [line[name] for line in metrics(ended.folder) if name in line][-1]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"lora": LORA}, marks=pytest.mark.thorough),
        pytest.param({"lora": LORA | {"use_dora": True}}, marks=pytest.mark.thorough),
    ],
    ids=["all weights", "adapters", "dora"],
)
def test_the_student_approaches_the_teacher(how, tmp_path):
    teacher = model_folder(tmp_path, 1, hidden_size=96, num_attention_heads=6)
    ended = dt.distill(
        model=model_folder(tmp_path), teacher=teacher, data=chats(), distillation={"alpha": 1.0}, steps=16,
        run_dir=tmp_path / "run", **QUICK, **how,
    )  # fmt: skip
    found = [line["divergence"] for line in metrics(ended.folder)]
    assert found[-1] < 0.6 * found[0]


@pytest.mark.thorough
def test_features_are_learnt_in_addition(tmp_path):
    teacher = model_folder(tmp_path, 1, hidden_size=96, num_attention_heads=6)
    ended = dt.distill(
        model=model_folder(tmp_path), teacher=teacher, data=chats(), steps=8, run_dir=tmp_path / "run",
        distillation={"features": {"weight": 1.0}}, **QUICK,
    )  # fmt: skip
    found = [line["features"] for line in metrics(ended.folder)]
    assert found[-1] < found[0]
    dt.load(ended.folder / "export/step_8")  # without the projections


@pytest.mark.thorough
def test_distillation_beats_cross_entropy_alone(tmp_path):
    """On what the teacher has written: its distribution says more than the words that it happened to draw."""
    base = model_folder(tmp_path, 1)
    trained = dt.sft(model=base, data=chats(), steps=16, run_dir=tmp_path / "teacher", **RUN)
    teacher = str(trained.folder / "export/step_16")
    rows, apart = drawn(teacher), {}
    for name, alpha in (("taught", 1.0), ("alone", 0.0)):
        ended = dt.distill(
            model=model_folder(tmp_path), teacher=teacher, data={"path": rows, "held_out": 0.25}, steps=20,
            distillation={"alpha": alpha}, eval={"every": 20, "batches": 2}, run_dir=tmp_path / name, **QUICK,
        )  # fmt: skip
        apart[name] = ended.metrics["held_out_divergence"]
    assert apart["taught"] < 0.7 * apart["alone"]


def drawn(teacher: str) -> str:
    llm = dt.LLM(teacher, dtype="f32", max_model_len=64, max_num_seqs=8)
    prompts = [f"say {i}" for i in range(32)]
    ids = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    answers = llm.generate(ids, dt.SamplingParams(temperature=1, max_tokens=8, seed=1), progress=False)
    texts = [answer.outputs[0].text or "none" for answer in answers]
    path = Path(teacher) / "drawn.jsonl"
    lines = [{"prompt": prompt, "completion": text} for prompt, text in zip(prompts, texts, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    teacher = model_folder(tmp_path, 2, vocab_size=400)
    with refuses("teacher", RecipeError, naming="320 tokens, got 400"):
        dt.distill(
            model=model_folder(tmp_path), teacher=teacher, data=chats(), steps=1, length=48, run_dir=tmp_path / "run"
        )


def test_a_teacher_on_disk_is_the_live_one(tmp_path):
    teacher = model_folder(tmp_path, 1, hidden_size=96, num_attention_heads=6)
    live, disk = (
        dt.distill(
            model=model_folder(tmp_path),
            teacher=teacher,
            data=chats(),
            distillation={"teacher": how, "top_k": 8},
            steps=3,
            run_dir=tmp_path / how,
            **QUICK,
        )
        for how in ("live", "disk")
    )
    assert (disk.folder / "teacher.npz").exists()
    ours, theirs = ([line["loss"] for line in metrics(ended.folder)] for ended in (disk, live))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.thorough
def test_reverse_and_jsd_losses_are_finite(tmp_path):
    teacher = model_folder(tmp_path, 1)
    for kind in ("reverse", "jsd"):
        ended = dt.distill(
            model=model_folder(tmp_path), teacher=teacher, data=chats(), distillation={"kind": kind},
            steps=2, run_dir=tmp_path / kind, **QUICK,
        )  # fmt: skip
        assert np.isfinite(last(ended, "loss"))
