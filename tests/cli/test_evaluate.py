"""`dovetail eval`: log-probabilities equal transformers', and lm-eval's tasks run on local files."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
import typer
from reference_models import reference
from refusals import refuses
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from dovetail.cli import evaluate
from dovetail.cli.eval_model import Bytes, EvalModel, sampling
from dovetail.core.errors import MissingFileError, MissingPackageError
from dovetail.engine.llm import LLM
from dovetail.io.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

LETTERS = [chr(c) for c in range(33, 127)]
VOCAB = 160  # of the reference models
SMALL = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)


def model():
    return reference("llama3.2", num_hidden_layers=1)


def letters(add_bos: bool, size: int = VOCAB) -> Tokenizer:
    """Ids: <s> 1, </s> 2, then a letter each (ByteLevel writes a space as Ġ, a line's end as Ċ), a pair, and others."""
    words = ["<unk>", "<s>", "</s>", *LETTERS, "Ġ", "Ċ", "is"]
    vocab = {word: i for i, word in enumerate(words + [f"filler{i}" for i in range(size - len(words))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("i", "s")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, bos="<s>", eos="</s>", add_bos=add_bos, add_eos=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(model()[1], path)
    letters(add_bos=True).save(path)
    return path


@pytest.fixture(scope="module")
def eval_model(folder) -> EvalModel:
    return EvalModel(LLM(folder, **SMALL))


def their_logprobs(ids: list[int]) -> np.ndarray:
    """Return the log-probability of each id after the first, by transformers."""
    with torch.no_grad():
        logits = model()[0](torch.tensor([ids])).logits[0].double()
    every = torch.log_softmax(logits, -1)[:-1]
    return every[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


@pytest.mark.parametrize("context, continuation", [("the cat ", "sat"), ("this", " is it"), ("a", "b"), ("", "abc")])
def test_a_continuation_scores_as_in_transformers(eval_model, context, continuation):
    before, after = eval_model.pair(context, continuation)
    assert eval_model.tokenizer.decode(before + after).strip() == (context + continuation).strip()
    ((logprob, _),) = eval_model.score([(before, after)])
    assert logprob == pytest.approx(their_logprobs(before + after)[-len(after) :].sum(), abs=1e-4)


def test_spaces_before_a_continuation_belong_to_it(eval_model):
    before, after = eval_model.pair("the cat ", "sat")
    assert (eval_model.tokenizer.decode(before), eval_model.tokenizer.decode(after)) == ("the cat", " sat")
    assert before[0] == eval_model.tokenizer.bos_id
    assert eval_model.pair("", "abc")[0] == [eval_model.tokenizer.bos_id]


def test_greedy_is_what_generation_would_write(eval_model):
    text = eval_model.complete([("the cat", {"until": [], "max_gen_toks": 1})])
    prompt = eval_model.encode("the cat")
    best = int(model()[0](torch.tensor([prompt])).logits[0, -1].argmax())
    assert (
        eval_model.score([(prompt, [best])])[0].greedy
        and not eval_model.score([(prompt, [(best + 1) % VOCAB])])[0].greedy
    )
    assert text == [eval_model.tokenizer.decode([best])]


def test_a_long_text_is_scored_in_windows_each_token_once(eval_model):
    text = "the cat is on the mat and the dog is not " * 4
    ids = [eval_model.tokenizer.bos_id, *eval_model.tokenizer.encode(text, add_special=False)]
    assert len(ids) > 2 * eval_model.longest
    windows = list(eval_model.windows(ids))
    assert [token for _, after in windows for token in after] == ids[1:]
    assert all(len(before) + len(after) <= eval_model.longest and before for before, after in windows)
    assert len(windows[-1][0]) + len(windows[-1][1]) == eval_model.longest  # it reaches back as far as it can
    expected = sum(their_logprobs([*before, *after])[len(before) - 1 :].sum() for before, after in windows)
    assert eval_model.rolling([text, "a"])[0] == pytest.approx(expected, abs=1e-3)


def test_a_long_context_loses_its_beginning_and_a_long_continuation_is_refused(eval_model):
    context, after = list(range(3, 90)), [5, 6]
    ((logprob, _),) = eval_model.score([(context, after)])
    assert logprob == pytest.approx(their_logprobs([*context, *after][-eval_model.longest :])[-2:].sum(), abs=1e-4)
    with refuses("--max-model-len", naming="63 tokens"):
        eval_model.score([([1], [5] * 63)])


def test_generation_arguments_are_honoured_or_refused():
    params, until = sampling({"until": "\n", "max_gen_toks": 7, "do_sample": False, "temperature": 0.7, "top_k": 3})
    assert (params.max_tokens, params.temperature, params.top_k, params.stop, until) == (7, 0.0, 3, ("\n",), ["\n"])
    assert sampling({"do_sample": True})[0].temperature == 1.0
    assert sampling({"temperature": 0.5}, engine_stops=False)[0].temperature == 0.5
    with refuses("num_beams"):
        sampling({"num_beams": 4})
    with refuses(naming="penalty_alpha"):
        sampling({"penalty_alpha": 0.6})


@pytest.mark.thorough
def test_stop_strings_end_an_answer(eval_model):
    whole = eval_model.complete([("the cat", {"until": [], "max_gen_toks": 12})])[0]
    stop = whole[2:4]
    assert eval_model.complete([("the cat", {"until": [stop], "max_gen_toks": 12})]) == [whole[: whole.find(stop)]]
    assert len(eval_model.complete([("the cat " * 20, {"max_gen_toks": 20})])) == 1  # cut to leave room for the answer


@pytest.mark.thorough
def test_a_padded_vocabulary_is_supported(folder, tmp_path):
    """This model's most probable tokens are often beyond the tokenizer's."""
    path = tmp_path / "padded"
    shutil.copytree(folder, path)
    letters(add_bos=True, size=101).save(path)
    eval_model = EvalModel(LLM(path, **SMALL))
    (score,) = eval_model.score([eval_model.pair("the cat", " sat")])
    before, after = eval_model.pair("the cat", " sat")
    assert score.logprob == pytest.approx(their_logprobs(before + after)[-len(after) :].sum(), abs=1e-4)
    assert all(isinstance(text, str) for text in eval_model.complete([("a", {}), ("the cat", {"max_gen_toks": 20})]))


# --- the loss task ----------------------------------------------------------------------------------------------------


def test_held_out_loss_is_the_mean_over_all_tokens(eval_model):
    texts = ["the cat sat", "a dog is here"]
    nats, tokens, ends = 0.0, 0, 0.0
    for text in texts:
        logprobs = their_logprobs([1, *eval_model.tokenizer.encode(text, add_special=False), 2])
        nats, tokens, ends = nats - logprobs.sum(), tokens + len(logprobs), ends - logprobs[-1]
    rows = {row.metric: row.value for row in evaluate.held_out(eval_model, texts)}
    assert rows["tokens"] == tokens and rows["loss"] == pytest.approx(nats / tokens, abs=1e-5)
    assert rows["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    size = sum(len(text) for text in texts)
    assert rows["bits_per_byte"] == pytest.approx((nats - ends) / size / math.log(2), abs=1e-4)


def test_without_bos_the_first_token_is_not_scored(eval_model):
    bare = EvalModel(eval_model.llm, letters(add_bos=False))
    rows = {row.metric: row.value for row in evaluate.held_out(bare, ["abcd"])}
    logprobs = their_logprobs([*bare.tokenizer.encode("abcd", add_special=False), 2])
    assert rows["tokens"] == 4 and rows["loss"] == pytest.approx(-logprobs.mean(), abs=1e-5)
    assert rows["bits_per_byte"] == pytest.approx(-logprobs[:-1].sum() / 3 / math.log(2), abs=1e-4)


def test_the_command_measures_a_jsonl_file(folder, tmp_path):
    data, out = tmp_path / "held_out.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "a dog", "")))
    options = ["--tasks", "loss", "--data", str(data), "--json", str(out), "--max-model-len", "64"]
    shown = run(str(folder), *options)
    assert "bits_per_byte" in shown and "perplexity" in shown
    results = json.loads(out.read_text())["results"]
    assert results[0]["metric"] == "loss" and results[0]["count"] == 2 and 0 < results[0]["value"] < 20


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(evaluate.evaluate)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.thorough
def test_a_byte_model_needs_no_tokenizer_file():
    eval_model = EvalModel(LLM(reference("llama3.2", num_hidden_layers=1, vocab_size=257)[1], **SMALL), Bytes())
    rows = {row.metric: row.value for row in evaluate.held_out(eval_model, ["héllo"])}
    assert rows["tokens"] == 6  # seven ids with the end, the first not scored
    (answer,) = eval_model.complete([("ab", {"until": ["\n"], "max_gen_toks": 4})])
    assert isinstance(answer, str) and "\n" not in answer
    with refuses("--tokenizer", naming="--tokenizer bytes"):
        EvalModel(eval_model.llm)


@pytest.mark.parametrize(
    "content, param, naming",
    [
        ("", "--data", "data.jsonl"),
        ('{"words": "a"}\n', "--text-key", "line 1 of"),
        ('{"text": 3}\n', "--text-key", "line 1 of"),
    ],
)
def test_unreadable_data_is_refused_with_the_line(tmp_path, content, param, naming):
    (tmp_path / "data.jsonl").write_text(content)
    with refuses(param, naming=naming):
        evaluate.documents(str(tmp_path / "data.jsonl"), "text", None)


def test_wrong_options_are_refused_before_a_model_is_loaded(tmp_path):
    for arguments, param in (
        (dict(names=[], data="", tokenizer=""), "--tasks"),
        (dict(names=["loss"], data="", tokenizer=""), "--data"),
        (dict(names=["loss"], data="x", tokenizer="words"), "--tokenizer"),
    ):
        with refuses(param):
            evaluate._check(**arguments)
    with refuses("--tasks", MissingFileError, naming="none.yaml"):
        evaluate._check([str(tmp_path / "none.yaml")], "", "")


def test_eval_of_a_run_uses_its_last_export(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with refuses(naming="--export-hf"):
        evaluate.newest_export(str(tmp_path))
    for step in (9, 100):
        (tmp_path / "export" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "export" / f"step_{step}" / "config.json").write_text("{}")
    assert evaluate.newest_export(str(tmp_path)).endswith("step_100")
    assert evaluate.newest_export("smollm2-135m") == "smollm2-135m"


# --- lm-eval ----------------------------------------------------------------------------------------------------------

CHOICES = """
task: two_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTIONS = [
    dict(question="the cat", choices=["sat", "is"], answer=0),
    dict(question="a dog", choices=["is here", "no"], answer=1),
]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task of local files; what lm-eval's packages keep goes to the test's own folder."""
    pytest.importorskip("lm_eval")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (tmp_path / "two.yaml").write_text(CHOICES)
    return tmp_path / "two.yaml"


@pytest.mark.filterwarnings("ignore")  # lm-eval's packages have their own
def test_a_local_task_runs_end_to_end(eval_model, task):
    (row,) = evaluate.run_tasks(eval_model, [str(task)], "tiny")
    right = 0
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:
            before, after = eval_model.pair(question["question"], f" {choice}")
            scores.append(their_logprobs(before + after)[-len(after) :].sum())
        right += int(np.argmax(scores)) == question["answer"]
    assert (row.task, row.metric, row.count) == ("two_questions", "acc", 2)
    assert row.value == right / 2


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_the_lm_eval_adapter_answers_every_kind_of_request(eval_model, task):
    from lm_eval.api.instance import Instance

    from dovetail.cli.eval_model import lm_eval_model

    model = lm_eval_model(eval_model, "tiny")

    def ask(kind: str, *arguments) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    (scored,) = model.loglikelihood([ask("loglikelihood", "the cat", " sat")])
    before, after = eval_model.pair("the cat", " sat")
    assert scored[0] == pytest.approx(their_logprobs(before + after)[-len(after) :].sum(), abs=1e-4)
    (rolled,) = model.loglikelihood_rolling([ask("loglikelihood_rolling", "the cat")])
    assert rolled == pytest.approx(their_logprobs(eval_model.encode("the cat")).sum(), abs=1e-4)
    (answer,) = model.generate_until([ask("generate_until", "the cat", {"until": ["\n"], "max_gen_toks": 3})])
    assert isinstance(answer, str)


def test_without_lm_eval_its_tasks_say_how_to_get_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with refuses(None, MissingPackageError, naming="pip install 'dovetail[eval]'"):
        evaluate._check(["hellaswag"], "", "")
