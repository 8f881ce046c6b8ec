"""A student learns from a teacher of another size."""

from __future__ import annotations

import numpy as np
import pytest
from tune.small_models import LORA, RUN, chats, metrics, model_folder

import dovetail as dt

QUICK = RUN | {"optimizer": {"lr": 3e-3}}


def last(ended, name: str) -> float:
    return [line[name] for line in metrics(ended.folder) if name in line][-1]


@pytest.mark.parametrize("how", [{}, {"lora": LORA}], ids=["all weights", "adapters"])
def test_the_student_comes_near_the_teacher(how, tmp_path):
    teacher = model_folder(tmp_path, 1, hidden_size=96, num_attention_heads=6)
    ended = dt.distill(
        model=model_folder(tmp_path), teacher=teacher, data=chats(), distillation={"alpha": 1.0}, steps=16,
        run_dir=tmp_path / "run", **QUICK, **how,
    )  # fmt: skip
    found = [line["divergence"] for line in metrics(ended.folder)]
    assert found[-1] < 0.6 * found[0]


def test_features_are_learnt_besides(tmp_path):
    teacher = model_folder(tmp_path, 1, hidden_size=96, num_attention_heads=6)
    ended = dt.distill(
        model=model_folder(tmp_path), teacher=teacher, data=chats(), steps=8, run_dir=tmp_path / "run",
        distillation={"features": {"weight": 1.0}}, **QUICK,
    )  # fmt: skip
    found = [line["features"] for line in metrics(ended.folder)]
    assert found[-1] < found[0]
    dt.load(ended.folder / "export/step_8")  # without the projections


def test_it_beats_cross_entropy_alone(tmp_path):
    """On what the teacher writes: its distribution says more of it than the words that it happened to draw."""
    teacher = model_folder(tmp_path, 1)
    rows = sampled(teacher)
    measured = {}
    for name, alpha in (("taught", 1.0), ("alone", 0.0)):
        ended = dt.distill(
            model=model_folder(tmp_path), teacher=teacher, data={"path": rows, "held_out": 0.25}, steps=20,
            distillation={"alpha": alpha}, eval={"every": 20, "batches": 2}, run_dir=tmp_path / name, **QUICK,
        )  # fmt: skip
        measured[name] = ended.metrics["held_out_nll"]
    assert measured["taught"] < measured["alone"] - 0.1


def sampled(teacher: str) -> str:
    import json
    from pathlib import Path

    llm = dt.LLM(teacher, dtype="f32", max_model_len=128, max_num_seqs=8)
    prompts = [[7, 11 + i % 5] for i in range(32)]
    answers = llm.generate(prompts, dt.SamplingParams(temperature=1, max_tokens=60, seed=1), progress=False)
    path = Path(teacher) / "sampled.jsonl"
    texts = [answer.completions[0].text for answer in answers]
    path.write_text("".join(json.dumps({"prompt": "a", "completion": text or "b"}) + "\n" for text in texts))
    return str(path)


def test_another_vocabulary_is_refused(tmp_path):
    teacher = model_folder(tmp_path, 2, vocab_size=400)
    with pytest.raises(ValueError, match="must have the student's vocabulary, of 320 words; it has 400"):
        dt.distill(model=model_folder(tmp_path), teacher=teacher, data=chats(), steps=1, run_dir=tmp_path / "run")


def test_numbers_are_finite(tmp_path):
    teacher = model_folder(tmp_path, 1)
    for kind in ("reverse", "jsd"):
        ended = dt.distill(
            model=model_folder(tmp_path), teacher=teacher, data=chats(), distillation={"kind": kind},
            steps=2, run_dir=tmp_path / kind, **QUICK,
        )  # fmt: skip
        assert np.isfinite(last(ended, "loss"))
