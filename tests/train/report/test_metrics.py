"""Test a run's metrics: metrics.jsonl through crashes, TensorBoard, wandb, and the terminal."""

import io
import json
import re
import sys
from types import SimpleNamespace

import pytest
from refusals import refuses
from rich.console import Console

from dovetail.core.errors import MissingPackageError, RecipeError
from dovetail.core.reporter import Reporter
from dovetail.core.training import Training
from dovetail.train.report.goodput import Goodput, added, split
from dovetail.train.report.live import Live, StepStatus
from dovetail.train.report.loggers import check_loggers
from dovetail.train.report.metrics import AVERAGED, Passage, RunMetrics, Work, drop_after


def metrics(folder, step: int = 0, **options) -> RunMetrics:
    show = options.pop("show", False)
    return RunMetrics(folder, steps=10, step=step, **{"reporter": Reporter(show), "report_to": (), **options})


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record(to: RunMetrics, first: int, last: int) -> None:
    for step in range(first, last + 1):
        to.record(step, {"loss": 10.0 - step, "lr": 1e-3, "grad_norm": 0.5}, seconds=0.5, tokens=2000)


def test_one_line_per_step_with_speed_and_mfu(tmp_path):
    goodput = Goodput(clock=iter([0.0, 1.0] + [4.0] * 100).__next__)
    goodput.begin()
    goodput.step(1)
    with metrics(tmp_path, work=Work(full=3e9, causal=2e9, peak=1e14), goodput=goodput) as run:
        record(run, 1, 2)
    first, second = lines(tmp_path)
    assert (first["step"], second["step"]) == (1, 2) and first["loss"] == 9.0
    assert first["tokens_per_second"] == 4000 and first["seconds"] == 0.5
    assert first["mfu_causal"] == pytest.approx(0.08) and first["mfu_full"] == pytest.approx(0.12)
    assert first["goodput"] == pytest.approx(0.75)
    assert "mfu_causal" not in Work(1.0, 1.0).mfu(5.0)  # an unknown chip


def test_the_held_out_loss_names_its_weights(tmp_path, capsys):
    with metrics(tmp_path, show=True, report_to=("tensorboard",)) as run:
        run.evaluated(4, {"held_out_loss": 3.0})
        run.evaluated(5, {"held_out_loss": 2.0}, weights=AVERAGED)
    said = capsys.readouterr().err
    assert "step 4: held out loss 3.0000\n" in said
    assert "step 5: held out loss 2.0000 (of the averaged weights)\n" in said
    assert [line["weights"] for line in lines(tmp_path)] == ["trained", "averaged"]


def test_after_a_crash_each_step_is_recorded_once(tmp_path):
    run = metrics(tmp_path)
    record(run, 1, 6)
    run.evaluated(4, {"held_out_loss": 3.0})
    run.evaluated(6, {"held_out_loss": 2.0})
    run.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "los')  # killed amid a line
    with metrics(tmp_path, step=4) as resumed:
        record(resumed, 5, 8)
    found = lines(tmp_path)
    assert [line["step"] for line in found if "kind" not in line] == list(range(1, 9))
    assert [(line["step"], line["held_out_loss"]) for line in found if line.get("kind") == "eval"] == [(4, 3.0)]
    assert not list(tmp_path.glob(".*"))


def test_a_rollback_removes_the_lines_after_it(tmp_path):
    with metrics(tmp_path) as run:
        record(run, 1, 5)
        run.rewind(2)
        record(run, 3, 4)
        with pytest.raises(RuntimeError, match="step 4 was recorded already"):
            record(run, 4, 4)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_a_complete_file_is_not_rewritten(tmp_path):
    with metrics(tmp_path) as run:
        record(run, 1, 3)
    before = (tmp_path / "metrics.jsonl").stat()
    drop_after(tmp_path / "metrics.jsonl", 3)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before.st_ino
    drop_after(tmp_path / "absent.jsonl", 3)


def test_a_nan_loss_is_valid_json(tmp_path):
    with metrics(tmp_path) as run:
        run.record(1, {"loss": float("nan"), "grad_norm": float("inf")}, 1.0, 10)
    (line,) = lines(tmp_path)
    assert line["loss"] is None and line["grad_norm"] is None


def test_another_process_writes_nothing(tmp_path, capsys):
    with metrics(tmp_path / "run", first=False, show=True, report_to=("tensorboard",)) as run:
        record(run, 1, 2)
        run.evaluated(2, {"held_out_loss": 1.0})
        run.rewind(1)
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


def test_tensorboard_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    with metrics(tmp_path, report_to=("tensorboard",)) as run:
        record(run, 1, 3)
        run.evaluated(3, {"held_out_loss": 1.0})
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert content.count(b"train/loss") == 3 and content.count(b"eval/held_out_loss") == 1


def test_a_passage_is_shown_above_the_line_and_in_tensorboard(tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    with metrics(tmp_path, report_to=("tensorboard",), show=True) as run:
        run.show(3, Passage("completions", "what was written", "**what** was written"))
    (events,) = (path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file())
    content = events.read_bytes()
    assert b"train/completions" in content and b"**what** was written" in content
    assert "what was written\n" in capsys.readouterr().err


class FakeWandb(SimpleNamespace):
    """What is used of wandb, kept in lists."""

    def __init__(self):
        super().__init__(begun=[], logged=[], finished=0, errors=SimpleNamespace(Error=RuntimeError), Html=str)

    def init(self, **given):
        self.begun.append(given)
        return SimpleNamespace(define_metric=lambda *a, **k: None, log=self.logged.append, finish=self.finish)

    def finish(self):
        self.finished += 1


def test_wandb_logs_beside_tensorboard_and_resumes_its_run(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("dovetail.train.report.loggers.find_spec", lambda name: name)
    for step in (0, 1):
        with metrics(tmp_path, step, report_to=("tensorboard", "wandb"), config={"batch": 8}) as run:
            run.record(step + 1, {"loss": 2.5}, 1.0, 10)
            run.evaluated(step + 1, {"held_out_loss": 3.5})
    assert (tmp_path / "tensorboard").exists() and fake.finished == 2
    first, again = fake.begun
    assert first["id"] == again["id"] and first["resume"] == "allow" and first["config"] == {"batch": 8}
    train, held_out = fake.logged[:2]
    assert (train["step"], train["train/loss"], held_out["eval/held_out_loss"]) == (1, 2.5, 3.5)


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with metrics(tmp_path, report_to=("wandb",)) as run:
        run.record(1, {"loss": 2.5}, 1.0, 10)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_missing_and_unknown_loggers_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr("dovetail.train.report.loggers.find_spec", lambda name: None)
    with refuses("report_to", MissingPackageError, naming="wandb"):
        check_loggers(("tensorboard", "wandb"))
    with refuses("report_to", RecipeError):
        Training(model="x", batch=1, length=8, steps=1, report_to=("mlflow",))


def test_a_missing_tensorboard_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with metrics(tmp_path, report_to=("tensorboard",), show=True) as run:
        record(run, 1, 10)
    assert capsys.readouterr().err.count("pip install tensorboardX") == 1
    assert len(lines(tmp_path)) == 10


def test_the_environment_is_recorded_without_paths(tmp_path):
    metrics(tmp_path).close()
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["steps"] == 10 and kept["environment"]["backend"] == "cpu"
    assert "/" not in kept["environment"]["command"].split()[0]


# --- the live line ----------------------------------------------------------------------------------------------------


def drawn(steps: int, upto: int, *, terminal: bool, clock=lambda: 0.0, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False)
    live = Live(reporter := Reporter(console=console), steps, 0, clock)
    for step in range(1, upto + 1):
        values = {"loss": 2.5, "lr": 3e-4, "grad_norm": 0.51}
        live.show(StepStatus(step, values, 48434.0, 0.5, 0.403, 0.443, 61.2 * 2**30, 0.97))
    reporter.note("step 5: held out loss 2.4000")
    live.close()
    return out.getvalue()


def test_the_live_line_shows_every_figure():
    text = drawn(7300, 100, terminal=True)
    for part in ("100/7,300", "loss 2.5000", "lr 3.00e-04", "grad 0.51", "48.4k tok/s", "40.3% (44.3% full)"):
        assert part in text
    for part in ("1:00:00 left", "61.2 GiB", "goodput 97%", "held out loss 2.4000"):
        assert part in text


def test_without_a_terminal_plain_lines_are_printed_at_intervals():
    text = drawn(1000, 1000, terminal=False)
    shown = [line for line in text.splitlines() if line.startswith("step ")]
    assert 20 <= len(shown) <= 22 and "\x1b" not in text
    assert shown[0].startswith("step 1/1,000  loss 2.5000") and shown[-1].startswith("step 1,000/1,000")


def test_a_slow_run_prints_every_30_seconds_and_at_its_end():
    seconds = iter(range(0, 100_000, 5)).__next__
    text = drawn(10_000, 99, terminal=False, clock=lambda: float(seconds()))
    shown = [line for line in text.splitlines() if line.startswith("step ")]
    assert 10 <= len(shown) <= 40 and shown[-1].startswith("step 99/10,000")


REWARDED = {"loss": 0.01, "reward": 0.4123, "reward_std": 0.31, "kl": 0.0021, "completion_length": 118.2, "lr": 1e-6}
SPENT = {"rollout_seconds": 0.6, "reward_seconds": 0.05, "sync_seconds": 0.03, "rollout_tokens_per_second": 61234.0}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_with_rewards_shows_them_and_its_time_split(tmp_path, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False)
    with metrics(tmp_path, reporter=Reporter(console=console)) as run:
        run.record(1, REWARDED | SPENT, seconds=1.0, tokens=5000)
        run.evaluated(1, {"held_out_reward": 0.5, "held_out_pass@1": 0.384})
        run.record(2, REWARDED | dict.fromkeys(SPENT, 0.0), seconds=1.0, tokens=5000)  # a second update on them
        run.record(3, REWARDED | SPENT, seconds=1.0, tokens=5000)
    last = out.getvalue()[out.getvalue().rindex("reward 0.4123") :]
    assert "reward 0.4123 ±0.31  pass@1 38.4%  kl 0.0021  length 118" in last and "lr" not in last
    speed = "5k tok/s, 1 s per step: rollout 40% (61.2k tok/s), reward 3%, sync 2%, train 55%"
    assert speed in last and ("\x1b" in out.getvalue()) == terminal
    lines_ = out.getvalue().splitlines()
    assert not terminal or all(len(re.sub(r"\x1b[^a-zA-Z]*[a-zA-Z]", "", line)) <= 100 for line in lines_)


def test_the_parts_of_several_steps_are_added():
    assert split({"seconds": 2.0, "loss": 1.0}) == {}
    assert split({"seconds": 2.0, "rollout_seconds": 0.5}) == {"rollout": 0.5, "train": 1.5}
    assert split({"seconds": 1.0, "rollout_seconds": 1.5})["train"] == 0.0  # it was sampled beside the training
    assert added([{"a_seconds": 1.0, "reward": 3.0}, {"a_seconds": 2.0, "b_seconds": 1.0}, {}]) == {
        "a_seconds": 3.0, "b_seconds": 1.0,
    }  # fmt: skip
