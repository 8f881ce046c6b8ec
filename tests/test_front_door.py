"""`import dovetail as dt`: the public names, imported on first use."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refuses
from train.runs import model_folder

import dovetail as dt
from dovetail.core.errors import RecipeError


def test_the_names_are_those_of_the_rooms():
    from dovetail.engine.llm import LLM
    from dovetail.engine.request.params import SamplingParams
    from dovetail.io.load import load
    from dovetail.train.pretrain import pretrain

    assert (dt.LLM, dt.SamplingParams, dt.load, dt.pretrain) == (LLM, SamplingParams, load, pretrain)
    assert {"LLM", "SamplingParams", "load", "pretrain"} <= set(dir(dt))
    assert (Path(dt.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="it has LLM, SamplingParams, distill, dpo, draft, load"):
        dt.nothing  # noqa: B018  # type: ignore[attr-defined]


def test_importing_it_imports_nothing_heavy():
    code = "import sys, dovetail; print([name for name in ('jax', 'numpy', 'tokenizers') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"


@pytest.mark.slow
def test_pretrain_in_a_program(tmp_path):
    """Overrides of each kind; called again it goes on; the process, its signals and its folder are as before."""
    handler, given = signal.getsignal(signal.SIGTERM), {"checkpoint.every": 2, "schedule": {"warmup": 0}}
    given |= {"model": model_folder(tmp_path), "batch": 8, "length": 32, "eval": {"every": 0}}
    ended = dt.pretrain("tiny", steps=3, run_dir=tmp_path / "run", show=False, **given)
    assert (ended.code, ended.step, ended.folder) == (0, 3, tmp_path / "run")
    assert ended.metrics["step"] == 3 and ended.metrics["loss"] < 6 and (ended.folder / "report.html").exists()
    assert signal.getsignal(signal.SIGTERM) is handler

    from dovetail.core.recipe import find, load
    from dovetail.train.settings import Pretrain

    settings = load("tiny", {**given, "steps": 3}, Pretrain)
    assert settings.checkpoint.every == 2 and settings.optimizer == load(str(find("tiny")), [], Pretrain).optimizer
    again = dt.pretrain(settings, steps=5, optimizer={"lr": 1e-3}, run_dir=str(tmp_path / "run"), show=False)
    assert (again.code, again.step) == (0, 5)
    steps = [json.loads(line)["step"] for line in (again.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    with refuses("optimizer.lrr", RecipeError, code="unknown_key", naming="optimizer.lr"):
        dt.pretrain("tiny", optimizer={"lrr": 1e-3}, run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()
