"""Test `dovetail sft` from hub ids, run twice, and its adapter in other commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from huggingface_hub import constants
from tune.small_models import chats, model_folder
from typer.testing import CliRunner

from dovetail import __version__
from dovetail.cli.chat_partner import ChatOptions, Local
from dovetail.cli.main import app
from dovetail.core import reporter, yaml_text
from dovetail.engine import llm
from dovetail.io import hub
from dovetail.io.adapter_folder import base_of
from dovetail.serve.http import server

pytestmark = pytest.mark.slow

GIVEN = [  # small_models' RUN and LORA: compiled once for all of them
    "lora.r=8", "lora.lora_alpha=16", "steps=2", "batch=8", "length=48", "precision.compute=f32", "optimizer.lr=1e-2",
    "schedule.name=constant", "--run-dir", "runs/first",
]  # fmt: skip


def cached(cache: Path, name: str) -> Path:
    """Return the folder of a repository in a hub's cache."""
    (cache / name / "refs").mkdir(parents=True)
    (cache / name / "refs/main").write_text("a" * 40)
    return cache / name / "snapshots" / ("a" * 40)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with a model, and a hub's cache with the same model and a dataset."""
    place = tmp_path_factory.mktemp("command")
    shutil.copytree(model_folder(place), cached(place / "hub", "models--org--tiny"))
    data = cached(place / "hub", "datasets--org--chats")
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats()))
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))


def dovetail(*words: str) -> str:
    out = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"}, catch_exceptions=False)
    assert out.exit_code == 0, out.output
    return out.output


@pytest.fixture(scope="module")
def first(place):
    """What the first run printed."""
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    patch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    patch.setattr(reporter, "WAIT_MARKS", (0, 1000))  # every wait is long enough for a line
    try:
        return dovetail("sft", "--model", "org/tiny", "--data", "org/chats", *GIVEN)
    finally:
        patch.undo()


def test_a_run_by_hub_ids_reports_compilation_and_records_its_recipe(first, place):
    assert "compiling the training step: done in " in first and "WARNING" not in first
    text = Path("runs/first/recipe.yaml").read_text()
    assert text.startswith(f"# Written by dovetail {__version__}, jax ")
    kept = yaml_text.parse(text)
    assert (kept["model"], kept["data"]["path"], kept["optimizer"]["beta2"]) == ("org/tiny", "org/chats", 0.999)


def test_a_finished_run_reports_that_there_is_nothing_to_train(first):
    again = dovetail("sft", "model=org/tiny", "data=org/chats", *GIVEN)
    assert "nothing to train: the run in runs/first has finished its 2 steps" in again
    assert "nothing to train" not in first


def test_an_adapter_names_its_base_by_hub_id(first, place):
    said = json.loads(Path("runs/first/export/step_2/adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "org/tiny"
    assert hub.name_for_others("model-0") == str(place / "model-0")
    assert hub.name_for_others("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub.name_here("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-135m"
    assert base_of("runs/first/export/step_2") == "org/tiny" and base_of("model-0") is base_of("absent") is None


def test_info_of_an_adapter_shows_it_and_its_base(first):
    shown = dovetail("info", "runs/first/export/step_2")
    assert "LoRA of rank 8, alpha 16" in shown and "org/tiny" in shown and "1 of width 64" in shown


def test_serve_of_an_adapter_serves_its_base_with_it(first, place, monkeypatch):
    started = {}

    def serve(path, options, config, *rest):
        started.update(path=path, adapters=dict(options.lora_modules), names=config.names)

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(server, "run", lambda it: None)
    folder = "runs/first/export/step_2"
    dovetail("serve", folder, "--port", "0", "--served-model-name", "mine", "--lora-modules", f"b={folder}")
    assert (started["path"] / "model.safetensors").is_file() and started["names"] == ("org/tiny",)
    assert started["adapters"] == {"mine": folder, "b": folder}


def test_chat_with_an_adapter_uses_it(first, monkeypatch):
    asked = []

    class FakeEngine(MagicMock):
        start_seconds = 0.0

        @classmethod
        def from_options(cls, model, options, *, progress):
            asked.append((model, options.lora_modules))
            return cls()

        def stream(self, prompt, params, adapter):
            asked.append(adapter)
            yield from ()

    monkeypatch.setattr(llm, "LLM", FakeEngine)
    monkeypatch.setattr("dovetail.engine.request.params.check_room", lambda *given: None)
    partner = Local("runs/first/export/step_2")
    assert list(partner.answer([{"role": "user", "content": "Hi"}], ChatOptions(0.0, 4))) == []
    assert asked == [("org/tiny", {"adapter": "runs/first/export/step_2"}), "adapter"]
    assert partner.describe().startswith("runs/first/export/step_2 on org/tiny")


def test_an_adapter_given_as_model_is_refused(first):
    out = CliRunner().invoke(app, ["sft", "--model", "runs/first/export/step_2", "--data", "org/chats"])
    assert "is a LoRA adapter, not a model: merge it into its base" in str(out.exception)
