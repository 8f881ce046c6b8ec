"""The keys of every training, as `--show-config` prints them, and other libraries' names for them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.core import recipe
from dovetail.core.explain import explained
from dovetail.core.recipe import IN_SECTION, OURS, has_key
from dovetail.train.pretrain import run_folder
from dovetail.train.settings import Pretrain
from dovetail.tune.rl.settings import Rl
from dovetail.tune.settings import Distill, Dpo, Draft, Reward, Sft

TRAININGS = (Pretrain, Sft, Dpo, Reward, Distill, Rl, Draft)


@pytest.mark.slow
@pytest.mark.parametrize("cls", TRAININGS, ids=lambda cls: cls.__name__)
def test_every_key_has_a_meaning_and_a_default(cls):
    keys = explained(cls)
    assert len({key.name for key in keys}) == len(keys) > 60
    assert [key.name for key in keys if not key.meaning] == []
    assert all(has_key(cls, key.name) for key in keys) and not any(key.is_set for key in keys)


def test_values_stand_beside_defaults():
    settings = recipe.create(Sft, {"model": "m", "lora": {"r": 4}, "samples": {"every": 2, "prompts": ["a", "b: c"]}})
    found = {key.name: (key.value, key.default) for key in explained(Sft, settings)}
    assert found["model"] == ("m", "(required)") and found["epochs"] == ("3", "0")
    assert (found["lora.r"], found["lora.lora_alpha"]) == (("4", "16"), ("32", "32"))
    assert found["samples.prompts"] == ("[a, 'b: c']", "[]") and found["optimizer.lr"] == ("0.0001", "0.0001")
    assert {key.name: key.value for key in explained(Sft)}["lora.r"] == "-", "no adapters unless lora is set"
    module = recipe.create(Sft, {"model": {"torch": "a.b:c"}})
    assert {key.name: key.value for key in explained(Sft, module)}["model.torch"] == "a.b:c"


def test_the_option_prints_them_and_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in (
        ["--model", "m", "--data", "d.jsonl"],
        ["model=m", "data=d.jsonl"],
    ):
        out = CliRunner().invoke(app, ["sft", *given, "optimizer.lr=5e-5", "--show-config"])
        assert out.exit_code == 0, out.output
        rows = {line.split()[0]: line.split()[1:] for line in out.stdout.splitlines()}
        assert (rows["model"][0], rows["data.path"][0], rows["optimizer.lr"][:2]) == (
            "m",
            "d.jsonl",
            ["5e-05", "0.0001"],
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cls", "given", "proposed"),
    [
        (Sft, "learning_rate=1e-4", "Did you mean optimizer.lr?"),
        (Sft, "lora.rank=8", "Did you mean lora.r?"),
        (Sft, "lora.alpha=8", "Did you mean lora.lora_alpha?"),
        (Sft, "lora.dropout=0.1", "Did you mean lora.lora_dropout?"),
        (Sft, "lora.targets=[q_proj]", "Did you mean lora.target_modules?"),
        (Sft, "lora.rslora=true", "Did you mean lora.use_rslora?"),
        (Sft, "lora.dora=true", "Did you mean lora.use_dora?"),
        (Sft, "base=nf4", "Did you mean quantization?"),
        (Sft, "optimizer.clip=1", "Did you mean optimizer.max_grad_norm?"),
        (Dpo, "preference.loss=ipo", "Did you mean preference.loss_type?"),
        (Sft, "lora_alpha=8", "Did you mean lora.lora_alpha?"),
        (Sft, "num_train_epochs=1", "Did you mean epochs?"),
        (Sft, "output_dir=here", "Use the option --run-dir."),
        (Dpo, "beta=0.1", "Did you mean preference.beta?"),
        (Rl, "group_size=4", "Did you mean num_generations?"),
        (Sft, "lorra=8", "Did you mean lora?"),
    ],
)
def test_other_libraries_names_are_understood(cls, given, proposed):
    with pytest.raises(ValueError) as error:
        recipe.create(cls, ["model=m", given])
    assert str(error.value) == f"{given.split('=')[0]} is not a key. {proposed}"


def test_every_name_that_is_proposed_exists():
    ours = {name for name in OURS.values() if not name.startswith("--")}
    assert all(any(has_key(cls, name) for cls in TRAININGS) for name in ours)
    names = {key.name.rpartition(".")[2] for cls in TRAININGS for key in explained(cls)}
    assert set(IN_SECTION.values()) <= names


def test_text_for_data_is_its_path(tmp_path):
    (tmp_path / "low.yaml").write_text("model: m\ndata: {held_out: 0.5, path: a.jsonl}\n")
    (tmp_path / "high.yaml").write_text("base: low.yaml\ndata: b.jsonl\n")
    data = recipe.load(str(tmp_path / "high.yaml"), [], Sft).data
    assert (data.path, data.held_out) == ("b.jsonl", 0.5)
    given = recipe.load(str(tmp_path / "low.yaml"), ["data=c.jsonl", "data.seed=3"], Sft).data
    assert (given.path, given.seed, given.held_out) == ("c.jsonl", 3, 0.5)


def test_a_run_is_named_after_its_recipe_or_model():
    names = {("Qwen/Qwen3-0.6B", "sft"): "Qwen3-0.6B-sft", ("a/b.yaml", "rl"): "b-rl", ("x.gguf", "dpo"): "x-dpo"}
    assert {given: run_folder(*given).name for given in names} == names and run_folder("tiny").name == "tiny"
    assert run_folder("smollm2-135m-sft", "sft").name == "smollm2-135m-sft"  # which says it already
