"""Train a torch module from a recipe: losses of torch, FSDP, resume, export, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from interop.torch.torch_models import gpt2, words
from refusals import refuses
from safetensors.torch import load_file
from train.runs import Numbers, metrics
from tune.small_models import RUN, chats, model_folder
from xla_flags import flags

import dovetail as dt
from dovetail.core.errors import RecipeError, UserError
from dovetail.core.recipe import create, dump, read
from dovetail.core.reporter import Reporter
from dovetail.train import run as runs
from dovetail.train.external import external_objective
from dovetail.train.prepare import prepare
from dovetail.train.rows import Opened
from dovetail.train.settings import Pretrain
from dovetail.tune.settings import Dpo, Sft

pytestmark = pytest.mark.slow

FILE = f"{Path(__file__).parent}/torch_models.py"
GPT2 = {"torch": f"{FILE}:gpt2", "args": {"vocab": 257}}
RECIPE = {
    "model": GPT2, "batch": 8, "length": 16, "steps": 50, "precision": {"compute": "f32"},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.0}, "schedule": {"name": "constant"}, "checkpoint": {"every": 3},
    "data": {"sources": [{"path": "made here"}]},
}  # fmt: skip


def run(folder, devices=1, **changes):
    settings = read(Pretrain, {**RECIPE, **changes})
    ready = prepare(settings, external_objective(settings), jax.devices()[:devices])
    return runs.run(ready, folder, Opened(Numbers(settings), Numbers(settings)), reporter=Reporter(show=False))


def test_losses_are_those_of_torch(tmp_path):
    """Train by FSDP over four devices. Rows are whole documents, so the module's own causal mask is the same."""
    run(tmp_path, 4, mesh={"data": 1, "fsdp": 4})
    module, settings = gpt2(257), read(Pretrain, RECIPE)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, (0.9, 0.95), weight_decay=0.0)
    for i, line in enumerate(metrics(tmp_path)):
        rows = Numbers(settings).batch(i)
        logits = module(torch.tensor(rows.tokens)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(rows.targets).long().flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-4), i
    assert i == 49 and line["loss"] < 3


def test_a_run_continues_exactly_and_is_exported(tmp_path):
    model = {"torch": f"{FILE}:gpt2", "args": {"vocab": 257, "dropout": 0.1}}
    export = {"every": 3, "export_hf": 8}
    run(tmp_path / "whole", steps=8, model=model, checkpoint=export)
    run(tmp_path / "parts", steps=4, model=model, checkpoint=export)
    again = run(tmp_path / "parts", steps=8, model=model, checkpoint=export)
    assert again.began == 4 and metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    folder = tmp_path / "parts/export/step_8"
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in again.at.state.params.items():
        np.testing.assert_array_equal(weight, found.state_dict()[name], err_msg=name)
    assert found.lm_head.weight is found.transformer.wte.weight


def test_documents_of_a_row_do_not_see_each_other():
    from dovetail.core.types import Batch
    from dovetail.train.external import model_config

    model = model_config(read(Pretrain, RECIPE).model).external
    values, tokens = model.load(), np.arange(10, 20, dtype=np.int32)[None]
    segments, positions = np.array([[1] * 4 + [2] * 6]), np.array([[*range(4), *range(6)]])
    batch = Batch(tokens, tokens, positions, segments, np.ones((1, 10)))
    ours = jax.jit(lambda values: model.logits(values, {}, batch))(values)
    with torch.no_grad():
        alone = gpt2(257).eval()(torch.tensor(tokens[:, 4:])).logits
    np.testing.assert_allclose(ours[:, 4:], alone, atol=1e-5)


def test_sft_writes_a_state_dict(tmp_path):
    model = {"torch": f"{FILE}:words", "tokenizer": model_folder(tmp_path)}
    ended = dt.sft(model=model, data=chats(), steps=4, run_dir=tmp_path / "run", **RUN)
    losses = [line["loss"] for line in metrics(ended.folder)]
    assert ended.code == 0 and losses[-1] < losses[0]
    module, folder = words(), ended.folder / "export/step_4"
    module.load_state_dict(load_file(folder / "model.safetensors"))
    assert (folder / "tokenizer.json").exists() and not torch.equal(module.head.weight, words().head.weight)


def test_a_recipe_with_a_module_is_read_and_written():
    settings = read(Pretrain, RECIPE)
    assert read(Pretrain, dump(settings)) == settings and str(settings.model) == "gpt2"
    assert create(Sft, {"model.torch": "a.b:c"}).model.torch == "a.b:c"


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"remat": "full"}, "remat"), ({"mesh": {"tensor": 2}}, "mesh.tensor"), ({"loss": {"z": 1e-4}}, "loss"),
        ({"init": "smollm2-135m"}, "init"), ({"model": {"torch": "nothing"}}, "model.torch"),
    ],
)  # fmt: skip
def test_keys_that_need_known_layers_are_refused(changes, param):
    with refuses(param, RecipeError):
        read(Pretrain, {**RECIPE, **changes})


def test_models_that_are_not_modules_of_tokens_are_refused(tmp_path):
    for name, says in (
        ("number", "must return a torch.nn.Module"),
        ("mlp", "must map tokens"),
        ("gone", "no function"),
    ):
        with pytest.raises(UserError, match=says):
            external_objective(read(Pretrain, {**RECIPE, "model": {"torch": f"{FILE}:{name}"}}))
    with refuses("lora", RecipeError):
        create(Sft, {"model.torch": "a.b:c", "lora.r": 4})
    with refuses("model", RecipeError):
        create(Dpo, {"model.torch": "a.b:c"})


@pytest.mark.thorough
def test_a_killed_run_resumes_exactly(tmp_path):
    words = [
        f"model.torch={FILE}:gpt2", "model.args.vocab=300", "model.args.dropout=0.1", "length=32",
        "batch=4", "steps=40", "schedule.warmup=5", "checkpoint.every=4", "checkpoint.keep=20", "eval.every=0",
        "checkpoint.export_hf=40",
    ]  # fmt: skip
    environment = os.environ | {"DOVETAIL_HOME": str(tmp_path / "home"), "XLA_FLAGS": flags(1)}

    def start(folder):
        command = [sys.executable, "-m", "dovetail", "pretrain", "tiny", *words, "--run-dir", str(folder)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert start(straight).wait(timeout=240) == 0
    process = start(killed)
    while process.poll() is None and len(lines(killed)) < 9:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start(killed).wait(timeout=240) == 0
    assert metrics(killed) == metrics(straight)
    one, other = (load_file(each / "export/step_40/model.safetensors") for each in (straight, killed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
