"""Test `dovetail draft` and dt.draft: as typed, resumed, written, and what a drafter learns from a simple target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.conftest import small_tokenizer
from engine.test_speculation import Always
from refusals import refuses
from tune.small_models import CONFIG, metrics, model_folder
from typer.testing import CliRunner

import dovetail as dt
from dovetail.cli.main import app
from dovetail.core.errors import FileError, RecipeError
from dovetail.core.spec import init
from dovetail.core.types import Batch, Packed, Paged
from dovetail.engine.request.params import SamplingParams
from dovetail.io.draft_folder import load_draft
from dovetail.io.load import load, save
from dovetail.models.decoder import init_cache, tapped
from dovetail.models.draft.draft import DraftCall, Target
from dovetail.models.mtp import with_mtp
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.tune.draft import answers
from dovetail.tune.draft.accepted import answer_tokens, decode

pytestmark = pytest.mark.slow

LETTERS = "QZXJVWKY"
SMALL = dict(
    batch=8, length=64, precision={"compute": "f32"}, answers={"max_tokens": 12}, optimizer={"lr": 1e-2}, show=False,
    schedule={"name": "constant"},
)  # fmt: skip
LONG = pytest.mark.thorough
KINDS = [
    "dspark",
    pytest.param("dflash", marks=LONG),
    pytest.param("dflash2", marks=LONG),
    pytest.param("eagle3", marks=LONG),
    pytest.param("mtp", marks=LONG),
]


def prompts(count: int = 24) -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(count)]


def cycling_model(place: Path) -> str:
    """Write a model that goes through LETTERS in a circle; it starts at the letter that the last token decides."""
    folder = place / "cycling"
    cfg, tokenizer = parse_config(CONFIG, "here"), small_tokenizer()
    letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
    params = init(spec(cfg), jax.random.key(0), jnp.float32, 0.1)
    for layer in params["layers"]:
        layer["attn"]["o"], layer["mlp"]["down"] = layer["attn"]["o"] * 0, layer["mlp"]["down"] * 0
    place_of = np.arange(cfg.vocab) % len(letters)
    place_of[letters] = np.arange(len(letters))
    params["embed"] = jnp.eye(cfg.dim)[place_of]
    head = np.zeros((cfg.vocab, cfg.dim), np.float32)
    head[letters, (np.arange(len(letters)) - 1) % len(letters)] = 2.0
    save(folder, cfg, params | {"head": jnp.asarray(head)}, tokenizer)
    return str(folder)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_as_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts()))
    words = ["draft", model_folder(tmp_path), "--data", "prompts.jsonl", "--kind", "dspark", "--out", "drafter"]
    words += ["steps=2", "length=64", "batch=8", "answers.max_tokens=12", "precision.compute=f32", "drafter.vocab=100"]
    out = CliRunner().invoke(app, words, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert out.exit_code == 0 and "held out accepted length" in out.output, out.output
    cfg = parse_config(CONFIG, "here")
    model, params = load_draft("drafter", cfg, jnp.float32)
    assert (model.most, params["head"].shape) == (5, (100, cfg.dim))
    config = json.loads(Path("drafter/config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dspark"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    ids = np.arange(100) + np.asarray(params["d2t"])
    np.testing.assert_array_equal(params["head"], load(model_folder(tmp_path), jnp.float32).params["head"][ids])
    with refuses("out", FileError):
        dt.draft(model=model_folder(tmp_path), data=prompts(), out="drafter")


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_and_does_not_answer_again(kind, tmp_path, monkeypatch):
    given = dict(model=model_folder(tmp_path), data=prompts(), drafter={"kind": kind, "vocab": 0}, **SMALL)
    straight = dt.draft(steps=4, run_dir=tmp_path / "straight", **given)
    dt.draft(steps=2, run_dir=tmp_path / "resumed", **given)
    monkeypatch.setattr(answers, "LLM", None)
    resumed = dt.draft(steps=4, run_dir=tmp_path / "resumed", **given)
    assert (resumed.trained, resumed.step) == (2, 4)
    one, other = (metrics(ended.folder) for ended in (straight, resumed))
    steps = [[line for line in lines if "loss" in line] for lines in (one, other)]
    assert [line["loss"] for line in steps[0]] == [line["loss"] for line in steps[1]]
    cfg = parse_config(CONFIG, "here")
    a, b = (load_draft(ended.folder / "export/step_4", cfg, jnp.float32)[1] for ended in (straight, resumed))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@LONG
def test_hidden_states_in_the_step_are_those_of_the_disk(tmp_path):
    losses = []
    for states in ("disk", "live"):
        drafter = {"hidden_states": states, "anchors": 8}
        ended = dt.draft(
            model=model_folder(tmp_path), data=prompts(), drafter=drafter, steps=2, run_dir=tmp_path / states, **SMALL
        )
        losses.append([line["loss"] for line in metrics(ended.folder) if "loss" in line])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_answers_that_records_have_are_kept_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "LLM", None)
    records = [{"messages": [*row["messages"], {"role": "assistant", "content": "QZ"}]} for row in prompts(4)]
    records.append({"prompt": "say", "completion": " QZX"})
    given = SMALL | {"answers": {"keep": True}}
    ended = dt.draft(model=model_folder(tmp_path), data=records, steps=1, run_dir=tmp_path / "run", **given)
    rows = [json.loads(line) for line in (ended.folder / "answers.jsonl").read_text().splitlines()][1:]
    assert rows == records


@pytest.mark.parametrize(
    "changes, param, kind",
    [
        (dict(drafter={"kind": "mtp", "layers": 2}), "drafter.layers", RecipeError),
        (dict(drafter={"kind": "mtp", "taps": [1]}), "drafter.taps", RecipeError),
        (dict(drafter={"kind": "dsparc"}), "drafter.kind", RecipeError),
        (dict(drafter={"l1": 2.0}), "drafter.l1", RecipeError),
        (dict(lora={"r": 4}), "lora", RecipeError),
    ],
)
def test_refusals(changes, param, kind, tmp_path):
    with refuses(param, kind):
        dt.draft(model="smollm2-135m", data=prompts(), run_dir=tmp_path / "run", **changes)


# --- what is learnt ---------------------------------------------------------------------------------------------------


def test_simulated_decoding_counts_steps():
    #        prompt   answer of 6 tokens  | the next document: prompt, answer of 3
    mask = [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]]
    segments = [[1] * 9 + [2] * 5]
    zeros = jnp.zeros((1, 14), jnp.int32)
    batch = Batch(zeros, zeros, zeros, jnp.asarray(segments), jnp.asarray(mask, jnp.float32))
    starts = answer_tokens(batch)
    assert np.flatnonzero(starts[0]).tolist() == [3, 4, 5, 6, 7, 11, 12]
    accepted = jnp.zeros((1, 14)).at[0, 3].set(2).at[0, 11].set(1)
    assert [float(x) for x in decode(starts, accepted)] == [7.0, 1 + 2 + 1]


def steps_in_pages(model, params, target: Target, tokens: list[int], first: int, count: int) -> tuple[int, int]:
    """Return (tokens gained, steps) of decoding `tokens` from the answer's first token on, with pages as an engine."""
    T, page = len(tokens), 4
    row = jnp.asarray(tokens, jnp.int32)[None]
    _, _, taps = tapped(target.params, target.cfg, row, jnp.arange(T)[None], Packed(jnp.ones((1, T), jnp.int32)),
                        taps=model.taps)  # fmt: skip
    tables = jnp.arange(-(-(T + count + 1) // page), dtype=jnp.int32)[None]
    cfg = dataclasses.replace(target.cfg, layers=model.layers)
    cache, at, done, steps = init_cache(cfg, tables.shape[1], page, jnp.float32), first, 0, 0
    while at < T - 1:
        new = at - done  # tokens that the target has computed since the last step
        ctx = Paged(tables, jnp.asarray([at]), jnp.asarray([0, new]), jnp.ones(1, jnp.int32))
        cache, _ = model.absorb(DraftCall(params, target, row[0, done:at], ctx, cache), taps[0, done:at], None)
        ctx = Paged(tables, jnp.asarray([at + 1]), jnp.asarray([0, 1]), jnp.ones(1, jnp.int32))
        pick = lambda j, logits: jnp.argmax(logits, -1).astype(jnp.int32)  # noqa: E731
        drafts, cache = model.draft(DraftCall(params, target, row[0, at : at + 1], ctx, cache), None, count, pick)
        right = 0
        while right < count and at + 1 + right < T and int(drafts[right, 0]) == tokens[at + 1 + right]:
            right += 1
        done, at, steps = at, at + right + 1, steps + 1
    return T - 1 - first, steps


@pytest.mark.parametrize("kind", ["dspark", *(pytest.param(kind, marks=LONG) for kind in ("dflash", "dflash2"))])
def test_a_drafter_of_a_predictable_target_is_accepted(kind, tmp_path):
    folder = cycling_model(tmp_path)
    given = SMALL | {"drafter": {"kind": kind, "vocab": 0, "markov_rank": 8, "num_speculative_tokens": 4}}
    ended = dt.draft(
        model=folder, data={"path": _written(tmp_path), "held_out": 0.1}, steps=60, run_dir=tmp_path / "run",
        eval={"every": 60, "batches": 1}, **given,
    )  # fmt: skip
    reported = ended.metrics["held_out_accepted_length"]
    assert reported > 2
    target, tokenizer = load(folder, jnp.float32), small_tokenizer()
    model, params = load_draft(ended.folder / "export/step_60", target.config, jnp.float32)
    rows = [json.loads(line) for line in (ended.folder / "answers.jsonl").read_text().splitlines()][1:]
    found = []
    for row in rows[:2]:
        prompt = tokenizer.encode_chat(row["messages"][:-1])
        tokens = [*prompt, *tokenizer.encode(row["messages"][-1]["content"])]
        found.append(steps_in_pages(model, params, Target(target.params, target.config), tokens, len(prompt), 4))
    gained, steps = np.sum(found, axis=0)
    assert gained / steps > 2


def test_an_mtp_layer_is_trained_as_it_is_served(tmp_path):
    """The metric on held-out prompts is what the folder gains in an engine."""
    folder = cycling_model(tmp_path)
    given = SMALL | {"drafter": {"kind": "mtp", "num_speculative_tokens": 4}}
    ended = dt.draft(
        model=folder, data={"path": _written(tmp_path), "held_out": 0.1}, steps=60, run_dir=tmp_path / "run",
        eval={"every": 60, "batches": 1}, out=tmp_path / "drafter", **given,
    )  # fmt: skip
    reported = ended.metrics["held_out_accepted_length"]
    assert reported > 2
    config = {"method": "mtp", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 4}
    llm = dt.LLM(folder, dtype="f32", max_model_len=64, max_num_seqs=1, speculative_config=config)
    llm.runner.steps.all([llm.runner.buckets.verify(1, 4)])
    llm.engine.speculator.length = Always((4,))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for row in prompts(40)[-3:]:
        llm.chat(row["messages"], params)
    counts = llm.engine.stats().speculation
    assert 1 + counts.accepted_tokens / counts.drafts > 2


@LONG
def test_the_mtp_layer_of_a_checkpoint_is_trained_further(tmp_path):
    cfg = parse_config(CONFIG | {"num_nextn_predict_layers": 1}, "here")
    params = init(with_mtp(spec(cfg), cfg), jax.random.key(0), jnp.float32, 0.1)
    save(tmp_path / "model", cfg, params, small_tokenizer())
    given = SMALL | {"drafter": {"kind": "mtp"}, "optimizer": {"lr": 1e-12}}
    ended = dt.draft(model=str(tmp_path / "model"), data=prompts(), steps=1, run_dir=tmp_path / "run", **given)
    _, found = load_draft(ended.folder / "export/step_1", cfg, jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found["mtp"], params["mtp"])


def _written(place: Path) -> str:
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts(40)))
    return str(path)
