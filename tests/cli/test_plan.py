"""`dovetail plan serve`, `rl`, `storage` and `--calibrate`: tables, JSON and refusals."""

import json
import shlex
import shutil

import pytest
from refusals import refuses
from typer.testing import CliRunner

from dovetail.cli.bench_serve import busiest, decode_step, describe, parse_metrics
from dovetail.cli.info import info
from dovetail.cli.main import app as main
from dovetail.cli.plan import app
from dovetail.core.errors import CheckpointError
from dovetail.core.recipe import SHIPPED
from dovetail.io import hub
from dovetail.io.load import servable
from dovetail.models.registry import read_model, shipped_models, shipped_shapes
from dovetail.plan.prediction import Prediction
from dovetail.train.report.metrics import save_prediction

pytestmark = pytest.mark.slow

GEMMA = ("serve", "gemma3-27b", "--on", "v6e-8", "--in", "2048", "--out", "512", "--concurrency", "64")


def run(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(args), env={"COLUMNS": "160"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_serving_as_a_table_with_its_arithmetic(home):
    said = run(*GEMMA, "--explain", "--per-day", "1M")
    assert said.startswith("fits: on v6e-8; fastest: 1 replica of 8 devices, KV pages for ")
    assert "v6e-8: 1 slice of 8 chips" in said and "27B weights in bf16" in said
    assert "cost: $21.60 per hour; $" in said and "$2.70 per chip and hour on demand, list of Google Cloud" in said
    for words in ("1 x 8", "2 x 4", "4 x 2", "20 of 64", "critical batch", "1,000,000 requests per day", "per day ($"):
        assert words in said, words
    assert "weights read: 6.75 GB / 1.64 TB/s = 4.12 ms" in said
    assert (
        "start it: dovetail serve google/gemma-3-27b-it --tensor-parallel-size 8 --max-num-seqs 64 --max-model-len 2560"
        in said
    )


def test_serving_as_json_and_as_a_picture(home, tmp_path):
    plot = tmp_path / "frontier.svg"
    found = json.loads(run(*GEMMA, "--json", "--plot", str(plot), "--price", "1"))
    assert found["dollars_per_hour"] == 8 and [plan["tensor"] for plan in found["plans"]] == [8, 4, 2]
    best = found["plans"][0]
    assert best["holds_all"] and best["at"]["batch"] == 64 and best["critical_batch"] == pytest.approx(560, rel=0.01)
    rates = [point["output_tokens_per_second"]["best"] for point in found["frontier"]]
    assert rates == sorted(rates) and plot.read_text().count("<polyline") == 3
    with refuses("--plot", naming="frontier.svg"):
        run(*GEMMA, "--plot", "frontier.png")
    with refuses("--price", naming="--spot"):
        run(*GEMMA, "--price", "1", "--spot")


def test_quantised_weights_and_kv_pages_are_planned(home):
    said = run("serve", "llama3-70b", "--on", "v5e-8", "--dtype", "int8")
    assert "KV in bf16" in said and "--quantization int8" in said.rpartition("start it: ")[2]
    said = run("serve", "llama3-70b", "--on", "v5e-8", "--dtype", "int8", "--kv", "int8")
    assert "--quantization int8 --kv-cache-dtype int8" in said.rpartition("start it: ")[2]
    said = run("serve", "llama3-70b", "--on", "v5e-8", "--dtype", "int8", "--kv", "int4")
    assert "not served by Dovetail: the engine has no KV pages in int4" in said and "start it:" not in said
    with refuses("dtype", naming="must be one of bf16"):
        run("serve", "llama3-8b", "--on", "h200x1", "--dtype", "int3")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit_the_screen(home, columns):
    done = CliRunner().invoke(app, [*GEMMA], env={"COLUMNS": str(columns), "TERM": "dumb"})
    lines = done.output.splitlines()
    assert done.exit_code == 0 and "…" not in done.output, "a cell was cut"
    assert max(map(len, lines[:-1])) <= columns and lines[-1].startswith("start it: ")


def test_serving_over_several_machines_is_planned_and_said_not_to_run(home):
    said = " ".join(
        run("serve", "llama3-70b", "--on", "v5e-4x4", "--dtype", "int8", "--in", "1024", "--out", "256").split()
    )
    assert "fits: on 2 machines of v5litepod-16 together, on no single one" in said
    assert "1 x 16" in said and "2 x 8" in said
    assert "not served by Dovetail: a replica spans" in said and "start it:" not in said
    assert "one machine of v5litepod-8 or " in said


# --- the command that it ends with ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*shipped_models(), *shipped_shapes()])
def test_the_model_that_serves_a_shipped_architecture(name):
    source, why = servable(name)
    assert source in hub.CATALOGUE or hub.HUB_ID.fullmatch(source) if source else "serve" in why


def test_the_command_that_is_printed_runs_as_typed(home, monkeypatch):
    """Run it up to the download: `dovetail serve` can fetch the model that is named."""
    asked = []

    def resolve(model, progress=None):
        asked.append(model)
        raise FileNotFoundError("that is all that this test has to see")

    monkeypatch.setattr(hub, "resolve", resolve)
    for model, on in (("llama3-8b", "v5e-4"), ("smollm2-135m", "cpu")):
        line = run("serve", model, "--on", on, "--in", "1024", "--out", "256").splitlines()[-1]
        command = shlex.split(line.removeprefix("start it: "))
        done = CliRunner().invoke(main, command[1:])
        assert command[0] == "dovetail" and isinstance(done.exception, FileNotFoundError), done.output
    assert asked == ["meta-llama/Meta-Llama-3-8B-Instruct", "smollm2-135m"]


def test_a_folder_is_served_from_where_it_is_and_without_weights_it_is_said(home, tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    shutil.copy(SHIPPED / "models" / "smollm2-135m.json", folder / "config.json")
    asked = ("serve", str(folder), "--on", "v5e-1", "--in", "128", "--out", "64", "--concurrency", "4")
    assert "cannot be started:" in run(*asked) and "holds no *.safetensors" in run(*asked)
    assert servable(str(folder / "config.json"))[0] == ""
    (folder / "model.safetensors").touch()
    assert servable(str(folder)) == servable(str(folder / "config.json")) == (str(folder), "")


def test_a_draft_model_is_counted_and_one_of_another_model_is_refused(home, tmp_path):
    layer = read_model("tiny").to_hf() | dict(num_hidden_layers=1)
    config = dict(speculators_model_type="eagle3", draft_vocab_size=64, transformer_layer_config=layer)
    (tmp_path / "config.json").write_text(json.dumps(config))
    speculation = "--speculative-config", json.dumps(dict(model=str(tmp_path)))
    asked = ("--on", "v5e-1", "--in", "128", "--out", "64", "--concurrency", "4")
    said, plain = run("serve", "tiny", *asked, *speculation), run("serve", "tiny", *asked)
    assert "draft model: 0.00" in said and "GiB, 0.25 KiB per token\n" in said and "draft" not in plain
    found, without = (json.loads(run("serve", "tiny", *asked, "--json", *more)) for more in (speculation, ()))
    assert "draft" not in without and found["draft"]["per_token"] == 256
    memory, alone = (each["plans"][0]["memory"] for each in (found, without))
    assert memory["weights"] - alone["weights"] == found["draft"]["weights"]
    assert memory["per_token"] - alone["per_token"] == 256
    with refuses("hidden_size", CheckpointError, naming="another model"):
        run("serve", "llama3-8b", *asked, *speculation)
    with refuses("speculative_config.method", CheckpointError, naming="tiny has no MTP layers"):
        run("serve", "tiny", *asked, "--speculative-config", '{"method": "mtp"}')
    itself = run("serve", "tiny", *asked, "--speculative-config", '{"model": "tiny"}')
    assert f"{alone['per_token'] // 1024} KiB per token" in itself


def test_plan_and_info_take_what_compile_takes(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dovetail.io.load.fetch_config", lambda name: SHIPPED / "models" / "tiny.json")
    for model in ("qwen3-8b", str(SHIPPED / "models" / "qwen3-0.6b.json"), "org/name"):
        info(model, backend="jax")
        assert "attention heads" in capsys.readouterr().out
        assert "fits" in run("serve", model, "--on", "v5p-8", "--in", "128", "--out", "64", "--concurrency", "4")
        assert "fits" in run("train", model, "--on", "v5p-8")
        assert "checkpoint" in run("storage", model)
    assert "run:  1,000 steps" in run("rl", "org/name", "--on", "h200x1")
    with refuses("model", naming="Did you mean 'llama3-70b'?"):
        run("serve", "lama3-70b", "--on", "v5p-8")


def test_the_cpu_here_is_planned_in_f32(home):
    said = run("serve", "smollm2-135m", "--on", "cpu", "--in", "128", "--out", "64", "--concurrency", "8")
    assert "weights in f32" in said and "no public price of CPU" in said


def test_rl_shares_the_devices(home):
    said = run("rl", "smollm2-135m", "--on", "h200x8", "num_generations=16", "loss.beta=0.01")
    for words in ("colocated on 8", "split: 4 train, 4 sample, overlapped", "reference", "sync", "engine.devices="):
        assert words in said, words
    lines = said.splitlines()
    assert lines[0].startswith("fits: 8 ways to share h200x8; fastest: split: ") and lines[1].startswith("step: ")
    assert lines[2].startswith("run:  1,000 steps: ") and " minutes, $" in lines[2]
    found = json.loads(run("rl", "smollm2-135m", "--on", "h200x1", "--json", "steps=40", "updates=4", "--price", "2"))
    step, cost = found[0]["seconds"]["step"]["best"], found[0]["run"]
    assert cost["steps"] == 10 and cost["dollars"]["best"] == pytest.approx(10 * step * 2 / 3600)
    assert found[0]["seconds"]["step"]["best"] > 0 and "engine's pages" in found[0]["memory"]


def test_storage_warns_of_another_region(home):
    said = run("storage", "llama3-1b", "--on", "v4-64", "--bucket", "us-east5", "--zone", "us-central2-b")
    assert "14.8 GB: weights in f32 and optimizer state" in said and "8 hosts at 1 GB/s each" in said
    assert "warning: the bucket is in us-east5 and the machines are in us-central2" in said
    with refuses("--zone"):
        run("storage", "llama3-1b", "--bucket", "us", "--zone", "mars-1")
    with refuses("--bucket"):
        run("storage", "llama3-1b", "--bucket", "moon", "--zone", "us-central2-b")
    found = json.loads(run("storage", "llama3-405b", "--tokens", "15T", "--json"))
    assert found["data"] == pytest.approx(60e12, rel=0.001) and found["state"] == pytest.approx(4.87e12, rel=0.01)


def fake_run(folder, steps: int = 8) -> None:
    folder.mkdir()
    lines = [{"step": i + 1, "seconds": 9.0 if i == 0 else 0.8, "tokens": 100, "time": 1.8e9} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_calibrates_later_plans(home, tmp_path):
    folder = tmp_path / "first"
    fake_run(folder)
    with refuses("--calibrate", naming="prediction.json"):
        run("--calibrate", str(folder))
    save_prediction(folder, Prediction("H200", 1, products=0.44, memory=0.1, links=0.0, best=0.44, worst=1.2))
    said = run("--calibrate", str(folder))
    assert "a step takes 800 ms on 1 x H200, bound by products" in said and "55% of peak in products" in said
    assert (home / "calibration.json").is_file() and "/first" in said
    reads = Prediction("H200", 1, products=0.1, memory=0.6, links=0.0, best=0.6, worst=1.2)
    fake_run(tmp_path / "second")
    save_prediction(tmp_path / "second", reads)
    run("--calibrate", str(tmp_path / "second"))
    said = run("serve", "llama3-8b", "--on", "h200x1")
    assert "and 1 more: 55% of peak in products, 75% of peak in memory" in said
    found = json.loads(run("serve", "llama3-8b", "--on", "h200x1", "--json"))
    step = found["plans"][0]["at"]["decode_seconds"]
    assert step["best"] < step["likely"] < step["worst"]


def test_a_too_short_run_cannot_calibrate(home, tmp_path):
    fake_run(tmp_path / "short", steps=2)
    save_prediction(tmp_path / "short", Prediction("H200", 1, 0.4, 0.1, 0.0, 0.4, 1.0))
    with refuses("--calibrate", naming="at least 4 reports"):
        run("--calibrate", str(tmp_path / "short"))


def test_an_rl_run_cannot_calibrate(home, tmp_path):
    fake_run(tmp_path / "rl")
    file = tmp_path / "rl" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"tokens"', '"rollout_seconds": 0.2, "tokens"'))
    save_prediction(tmp_path / "rl", Prediction("H200", 1, 0.4, 0.1, 0.0, 0.4, 1.0))
    with refuses("--calibrate", naming="RL run"):
        run("--calibrate", str(tmp_path / "rl"))


def test_bench_reads_the_servers_decode_metrics():
    text = (
        'vllm:num_requests_running{engine="0"} 8\ndovetail:decode_step_seconds{engine="0"} 0.004\n'
        'dovetail:predicted_decode_step_seconds_least{engine="0"} 0.003\n'
        'dovetail:predicted_decode_step_seconds_most{engine="0"} 0.01\n'
    )
    seen = decode_step(parse_metrics(text))
    assert seen and seen == {"running": 8, "measured": 0.004, "least": 0.003, "most": 0.01}
    assert decode_step(parse_metrics("vllm:num_requests_running 1\n")) is None and busiest([]) == {}
    assert describe(busiest([seen, {**seen, "running": 2}])) == (
        "the server's decode step with 8 running: 4 ms, predicted 3 to 10"
    )
