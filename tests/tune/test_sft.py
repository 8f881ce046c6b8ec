"""Test whole SFT runs: all weights, adapters, and adapters on quantised weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from later import later
from refusals import refuses
from tune.small_models import LORA, RUN, chats, metrics, model_folder

import dovetail as dt
from dovetail.core.errors import CheckpointError, MissingFileError, RecipeError, UserError
from dovetail.core.recipe import create
from dovetail.core.reporter import Reporter
from dovetail.io.load import convert, load
from dovetail.models.formats import formats_of
from dovetail.models.frozen import dense
from dovetail.models.rounding import round_params, straight_through
from dovetail.ops.loss import cross_entropy
from dovetail.train.prepare import prepare
from dovetail.tune.run import tokenizer_of, tune_settings
from dovetail.tune.settings import Sft
from dovetail.tune.sft import sft_objective

peft = later("peft")

pytestmark = pytest.mark.slow


MINE = (
    "{%- for m in messages %}{{- '[' + m.role + '] ' + m.content }}"
    "{{- '<|im_end|>' if m.role == 'assistant' else '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant] ' }}{%- endif %}"
)


def losses(ended) -> list[float]:
    return [line["loss"] for line in metrics(ended.folder) if "loss" in line]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"lora": LORA}, marks=pytest.mark.thorough),
        {"lora": LORA, "quantization": "nf4"},
        pytest.param(
            {"lora": LORA | {"lora_dropout": 0.1, "use_dora": True}, "scan": True}, marks=pytest.mark.thorough
        ),
    ],
    ids=["all weights", "adapters", "on nf4", "dropout, dora, scanned"],
)
def test_sft_learns(how, tmp_path):
    ended = dt.sft(model=model_folder(tmp_path), data=chats(), steps=12, run_dir=tmp_path / "run", **RUN, **how)
    assert ended.code == 0 and ended.step == 12
    assert losses(ended)[-1] < 0.6 * losses(ended)[0]
    assert 0 <= ended.metrics["token_accuracy"] <= 1
    assert (ended.folder / "report.html").exists()


@pytest.mark.thorough
def test_quantisation_aware_training(tmp_path):
    """The loss is that of the rounded weights, and the export holds them."""
    ended = dt.sft(
        model=model_folder(tmp_path), data=chats(), steps=12, run_dir=tmp_path / "run", quantize="int4", **RUN
    )
    assert losses(ended)[-1] < 0.6 * losses(ended)[0]
    model = load(ended.folder / "export/step_12", dtype="f32")
    assert {form.name for _, form in formats_of(model.params)} == {"int4"}


def test_rounded_weights_have_the_gradients_of_the_weights_themselves(tmp_path):
    model = load(model_folder(tmp_path), dtype="f32")

    def total(params):
        made = straight_through(params, model.config, "int4")
        return sum((2.0 * x).sum() for x in jax.tree.leaves(made)), made

    grads, made = jax.grad(total, has_aux=True)(model.params)
    assert all((g == 2).all() for g in jax.tree.leaves(grads))
    whole = dense(round_params(model.params, model.config, "int4"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), made, whole)
    with refuses("quantize", RecipeError):
        create(Sft, {"model": "none", "steps": 1, "quantize": "int4", "lora": LORA})


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Any:
    """Two passes over 12 chats with a template of their own, and what the run said and was asked."""
    at, asked = tmp_path_factory.mktemp("adapted"), []
    (at / "mine.jinja").write_text(MINE)
    given: dict[str, Any] = {name: value for name, value in RUN.items() if name != "show"}
    folder = model_folder(at)
    given |= {"model": Path(folder).name, "lora": LORA, "epochs": 2, "samples": {"every": 4, "prompts": ["say 3"]}}
    path = written(at, 12)
    with open(path, "a") as file:
        file.write("{torn\n")
    given |= {"data": {"path": path, "template": str(at / "mine.jinja"), "skip_bad_records": True}}
    reporter = Reporter(show=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(at)  # the model is named by a relative path
        patched.setattr("dovetail.tune.run.greedy", lambda model, cfg, ids, *rest: asked.append(ids) or [40, 1, 41])
        ended = tune_settings(create(Sft, given), at / "run", sft_objective, reporter=reporter)
    exported = ended.folder / "export/step_4"
    merged = dt.merge(folder, exported, at / "merged")
    return SimpleNamespace(
        model=folder, folder=ended.folder, exported=exported, merged=merged, lines=reporter.lines, asked=asked
    )


def test_the_exported_adapter_gives_the_trained_logits_in_peft_too(adapted):
    """Also where the model was named by a relative path, and PEFT runs in another folder."""
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(adapted.exported)
    ids = [5, 17, 33, 200, 9]
    ours = load(adapted.merged, dtype="f32").logits(ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].float().numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(ours - load(adapted.model, dtype="f32").logits(ids)).max() > 1e-2


def test_the_chat_template_is_exported_merged_sampled_and_resumed_with(adapted):
    exported, merged = adapted.exported, adapted.merged
    assert [(at / "chat_template.jinja").read_text() for at in (exported, merged)] == [MINE, MINE]
    theirs = transformers.AutoTokenizer.from_pretrained(merged)
    messages = [{"role": "user", "content": "say 3"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "[user] say 3\n[assistant] " and theirs.decode(adapted.asked[0]) == text
    (sample,) = map(json.loads, (adapted.folder / "samples.jsonl").read_text().splitlines())
    assert sample["answer"] == theirs.decode([40])  # the answer ends with the end token, 1
    again = create(Sft, {"model": adapted.model, "lora": LORA, "from_adapter": str(exported), "steps": 1})
    assert tokenizer_of(again).chat_template == MINE


def test_a_step_takes_as_many_examples_as_batch_says(adapted):
    assert [line["examples"] for line in metrics(adapted.folder) if "examples" in line] == [8, 4, 8, 4]
    assert "8 examples per step, in 8 rows of " in adapted.lines[1] and "2 steps are one pass" in adapted.lines[1]


def test_bad_records_are_reported_and_listed_in_the_run(adapted):
    line, left_out = adapted.lines[1:3]
    assert "1 bad records left out" in line and "chats.jsonl line 13: " in left_out
    assert "line 13: expected one JSON object" in (adapted.folder / "bad_records.txt").read_text()


def test_a_missing_file_is_reported_before_the_memory_plan(tmp_path):
    settings = create(Sft, {"model": model_folder(tmp_path), "data.path": "nowhere.jsonl", "steps": 1})
    reporter = Reporter(show=False)
    with refuses("path", MissingFileError, naming="nowhere.jsonl"):
        tune_settings(settings, tmp_path / "run", sft_objective, reporter=reporter)
    assert not reporter.lines


def test_embeddings_and_head_learn_new_special_tokens(tmp_path):
    """The vocabulary is larger, the embeddings are trained whole and the head by an adapter; PEFT loads it all."""
    folder = str(convert(model_folder(tmp_path), tmp_path / "larger", special_tokens=["<|tool|>"]))
    before, tokenizer = load(folder, dtype="f32"), transformers.AutoTokenizer.from_pretrained(folder)
    new = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert new == 320 == len(tokenizer) - 1 and before.config.vocab == 321
    assert tokenizer.tokenize("say<|tool|>") == [*tokenizer.tokenize("say"), "<|tool|>"]
    records = [{"prompt": f"say {i} <|tool|>", "completion": f" <|tool|> {i}"} for i in range(8)]
    lora = {"r": 4, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}
    ended = dt.sft(model=folder, data=records, lora=lora, steps=2, run_dir=tmp_path / "run", **RUN)
    exported = ended.folder / "export/step_2"
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(exported)
    merged = load(dt.merge(folder, exported, tmp_path / "merged"), dtype="f32")
    ids = [5, 17, new, 200, 9]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].float().numpy()
    np.testing.assert_allclose(merged.logits(ids), expected, atol=1e-4, rtol=1e-4)
    for name in ("embed", "head"):
        assert np.abs(merged.params[name][new] - before.params[name][new]).max() > 1e-3, name
    again = create(Sft, {"model": folder, "lora": lora, "from_adapter": str(exported), "steps": 1, "length": 48})
    objective = sft_objective(again)
    start = objective.initial(prepare(again, objective))
    np.testing.assert_allclose(start["embed"], merged.params["embed"], atol=1e-6)


@pytest.mark.thorough
def test_training_continues_from_an_adapter(tmp_path):
    folder = model_folder(tmp_path)
    first = dt.sft(model=folder, data=chats(), lora=LORA, steps=6, run_dir=tmp_path / "first", **RUN)
    again = dt.sft(
        model=folder, data=chats(), lora=LORA, from_adapter=str(first.folder / "export/step_6"), steps=2,
        run_dir=tmp_path / "again", **RUN,
    )  # fmt: skip
    assert losses(again)[0] < 0.7 * losses(first)[0]
    with refuses("lora.r", CheckpointError, naming="must be 8"):
        dt.sft(
            model=folder, data=chats(), lora={"r": 4}, from_adapter=str(first.folder / "export/step_6"), steps=2,
            run_dir=tmp_path / "other", **RUN,
        )  # fmt: skip


@pytest.mark.thorough
def test_microsteps_add_up_to_the_whole_batch(tmp_path):
    folder = model_folder(tmp_path)
    whole, parts = (
        dt.sft(
            model=folder,
            data=chats(),
            lora=LORA,
            steps=3,
            accumulate=n,
            run_dir=tmp_path / str(n),
            **RUN | {"batch": 16},
        )
        for n in (1, 2)
    )
    np.testing.assert_allclose(losses(whole), losses(parts), rtol=1e-4)


def test_samples_and_held_out_loss_are_in_the_report(tmp_path):
    ended = dt.sft(
        model=model_folder(tmp_path), data={"path": written(tmp_path), "held_out": 0.25}, lora=LORA, steps=4,
        run_dir=tmp_path / "run", samples={"every": 2, "prompts": ["say 3"], "tokens": 4},
        eval={"every": 2, "batches": 1}, **RUN,
    )  # fmt: skip
    page = (ended.folder / "report.html").read_text()
    assert "<h2>Samples</h2>" in page and "say 3" in page and "token accuracy" in page
    assert ended.metrics["held_out_loss"] > 0 and 0 <= ended.metrics["held_out_token_accuracy"] <= 1


def written(tmp_path, count: int = 24) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats(count)))
    return str(path)


def test_packed_weights_take_less_memory_in_the_plan(tmp_path):
    def planned(base: str) -> tuple[int, int]:
        settings = create(Sft, {"model": "qwen3-0.6b", "lora": LORA, "quantization": base, "steps": 1, "length": 64})
        ready = prepare(settings, sft_objective(settings))
        leaves = jax.tree.leaves(ready.objective.frozen.abstract(ready.cfg, ready.placement))
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
        axes = ready.derived.axes
        return ready.derived.memory.frozen * axes["fsdp"], held * axes["fsdp"]

    sizes = {base: planned(base) for base in ("bf16", "int8", "nf4")}
    assert all(planned == held for planned, held in sizes.values())
    assert sizes["nf4"][0] < 0.55 * sizes["bf16"][0] and sizes["int8"][0] < 0.8 * sizes["bf16"][0]


@pytest.mark.parametrize(
    ("given", "kind", "param", "code"),
    [
        ({"quantization": "nf4"}, RecipeError, "quantization", None),
        ({"lora": {"target_modules": ["c_attn"]}}, UserError, "lora.target_modules", None),
        ({"lora": {"rnk": 4}}, RecipeError, "lora.rnk", "unknown_key"),
        ({"samples": {"every": 2}}, RecipeError, "samples.every", None),
        ({"data": []}, UserError, "data.path", "no_examples"),
    ],
)
def test_bad_arguments_are_refused(given, kind, param, code, tmp_path):
    usual = {"model": model_folder(tmp_path), "data": chats(), "steps": 1, "length": 48, "run_dir": tmp_path / "run"}
    with refuses(param, kind, code):
        dt.sft(**(usual | given))


def test_frozen_weights_have_no_gradient_in_the_loss():
    import jax

    hidden, head = jnp.ones((1, 4, 8)) * 0.1, jnp.eye(16, 8)
    targets, mask = jnp.arange(4)[None], jnp.ones((1, 4))

    def loss(hidden, head, trains):
        return cross_entropy(hidden, head, targets, mask, trains_head=trains)[0]

    (ours, none), (theirs, _) = (jax.grad(loss, (0, 1))(hidden, head, trains) for trains in (False, True))
    np.testing.assert_array_equal(ours, theirs)
    assert not np.any(none)


def test_a_resumed_run_refuses_changed_data_at_the_same_path(tmp_path):
    data, how = (
        tmp_path / "chats.jsonl",
        dict(model=model_folder(tmp_path), steps=2, run_dir=tmp_path / "run", lora=LORA),
    )
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats()))
    dt.sft(data=data, **how, **RUN)
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats(25)[1:]))
    with refuses(None, CheckpointError, code="changed_inputs", naming="allow_changed_inputs=true"):
        dt.sft(data=data, **how, **RUN)
    again = dt.sft(data=data, checkpoint={"allow_changed_inputs": True}, **how, **RUN)
    assert again.step == 2 and "allow_changed_inputs: false" in (again.folder / "recipe.yaml").read_text()
