"""Test whole runs in this process, with and without faults."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from refusals import refuses
from train.runs import Numbers, metrics, not_a_number, run, settings_for, weights

from dovetail.core.errors import CheckpointError
from dovetail.core.reporter import Reporter
from dovetail.train import run as runs
from dovetail.train import step as step_module
from dovetail.train.guard.exits import PREEMPTED, QUARANTINE, TROUBLE
from dovetail.train.next_token import next_token
from dovetail.train.prepare import prepare
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.summary import read, summary
from dovetail.train.rows import Opened

# Of a damaged checkpoint's other reads tensorstore tells an event loop that Orbax has closed by then.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.slow,
]


def records(folder: Path) -> list[dict]:
    path = folder / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_learns_evaluates_saves_exports_and_reports(tmp_path):
    import transformers

    settings = settings_for(
        tmp_path, steps=60, data={"sources": [{"path": "x"}], "held_out": 0.1}, eval={"every": 30, "batches": 2},
        checkpoint={"every": 30, "export_hf": 60}, ema=0.5,
    )  # fmt: skip
    code, one = run(settings, tmp_path / "run")
    assert code == 0 and one.checkpoints.steps() == [30, 60]
    said = metrics(tmp_path / "run")
    trained = [line for line in said if "grad_norm" in line]
    assert [line["step"] for line in trained] == list(range(1, 61)) and trained[-1]["loss"] < 0.5 * trained[0]["loss"]
    held_out = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    held_out = [line["held_out_loss"] for line in held_out if "held_out_loss" in line]
    assert len(held_out) == 2 and held_out[1] < held_out[0]
    found = read(tmp_path / "run")
    assert found.evals[-1]["weights"] == "averaged"
    assert dict(summary(found))["held-out loss"] == f"{held_out[1]:.4f} (averaged weights)"
    assert "held out, averaged weights" in (tmp_path / "run/report.html").read_text()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/export/step_60")
    np.testing.assert_allclose(theirs.model.embed_tokens.weight.detach().numpy(), np.asarray(one.at.state.ema["embed"]))
    assert "<svg" in (tmp_path / "run/report.html").read_text()
    assert one.goodput.share > 0


@pytest.mark.parametrize("compute", ["f32", pytest.param("bf16", marks=pytest.mark.thorough)])
def test_a_resumed_run_is_bitwise_the_straight_run(tmp_path, compute):
    settings = settings_for(tmp_path, precision={"compute": compute})
    _, straight = run(settings, tmp_path / "straight")
    signalled = []

    def stop_once(index, batch):
        if index == 5 and not signalled:
            signalled.append(os.kill(os.getpid(), signal.SIGTERM))
        return batch

    code, first = run(settings, tmp_path / "cut", stop_once)
    assert code == PREEMPTED and 4 < first.at.step < 12 and first.checkpoints.latest() == first.at.step
    code, second = run(settings, tmp_path / "cut")
    assert code == 0 and metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
    for a, b in zip(weights(straight), weights(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_changes_of_the_recipe_are_reported_and_applied(tmp_path):
    run(settings_for(tmp_path), tmp_path / "run")
    changed = settings_for(tmp_path, steps=14, optimizer={"lr": 3e-4}, log_every=2)
    first, second = [], []
    code, one = run(changed, tmp_path / "run", lines=first)
    assert code == 0 and one.at.step == 14 and metrics(tmp_path / "run")[-1]["lr"] < 3.1e-4
    (line,) = [text for text in first if "the recipe has changed" in text]
    assert "steps 12 -> 14" in line and "optimizer.lr 0.01 -> 0.0003" in line and "log_every 1 -> 2" in line
    run(changed, tmp_path / "run", lines=second)
    assert not [text for text in second if "the recipe has changed" in text]
    with refuses(None, CheckpointError, code="changed_rows", naming="(batch 8 -> 4)"):
        run(settings_for(tmp_path, batch=4), tmp_path / "run")


def test_steps_without_a_checkpoint_count_as_lost(tmp_path):
    """A run killed before its first checkpoint starts again, and its steps do not count as goodput."""
    settings, path = settings_for(tmp_path, steps=4), tmp_path / "goodput.json"
    with Goodput(path) as ledger:
        ledger.begin()
        time.sleep(0.01)
        ledger.step(3)
    again = Goodput(path)
    ready = prepare(settings, next_token(settings), jax.devices()[:1])
    runs.run(ready, tmp_path / "run", Opened(Numbers(settings)), goodput=again, reporter=Reporter(show=False))
    kinds = {kind: seconds for kind, seconds, _ in again.table()}
    assert kinds["lost"] >= 0.01 and again.starts == 2 and "other" not in kinds


def test_a_bad_batch_is_replayed_skipped_and_recorded(tmp_path):
    settings = settings_for(tmp_path)
    code, one = run(settings, tmp_path / "run", not_a_number(6))
    (record,) = records(tmp_path / "run")
    assert code == 0 and record["batch"] == 6 and record["what"] == "skip" and record["kind"] == "non-finite loss"
    assert one.at.step == 12 and one.at.cursor == 13  # twelve updates from thirteen batches
    assert all(np.isfinite(leaf).all() for leaf in weights(one))
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))


def test_consecutive_bad_batches_roll_the_run_back(tmp_path):
    code, one = run(settings_for(tmp_path), tmp_path / "run", not_a_number(5, 6, 7))
    assert code == 0 and [r["what"] for r in records(tmp_path / "run")] == ["skip", "skip", "rollback"]
    assert one.at.step == 12 and one.at.cursor == 4 + 8 + 4  # batches 4 to 7 are passed over
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))


def test_endless_bad_batches_stop_the_run(tmp_path):
    code, _ = run(settings_for(tmp_path), tmp_path / "run", not_a_number(*range(5, 200)))
    assert code == TROUBLE and records(tmp_path / "run")[-1]["what"] == "stop"
    assert all(record["what"] != "quarantine" for record in records(tmp_path / "run"))


def test_a_damaged_newest_checkpoint_is_skipped(tmp_path):
    settings = settings_for(tmp_path)
    _, straight = run(settings, tmp_path / "run")
    newest = max((tmp_path / "run/checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    code, again = run(settings, tmp_path / "run")
    assert code == 0 and metrics(tmp_path / "run")[-1]["step"] == 12
    for a, b in zip(weights(straight), weights(again), strict=True):
        np.testing.assert_array_equal(a, b)


def flipped_once(monkeypatch, device: int, at_call: int):
    """One device's copy of one gradient has a high bit flipped, once."""
    calls, real = [], step_module.gradients

    def flip(index):
        if index == device:
            calls.append(index)
        return np.float32(2.0**60 if index == device and len(calls) == at_call else 1.0)

    def gradients(params, cfg, objective, batch, ctx, *rest):
        grads, *more = real(params, cfg, objective, batch, ctx, *rest)

        def local(g):
            where = jax.lax.axis_index("data")
            return g * jax.pure_callback(flip, jax.ShapeDtypeStruct((), jnp.float32), where)

        whole = PartitionSpec()
        mapped = jax.shard_map(local, mesh=ctx.placement.mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return {**grads, "norm": mapped(grads["norm"])}, *more

    monkeypatch.setattr(step_module, "gradients", gradients)


def test_a_flipped_bit_names_the_device_and_is_not_saved(tmp_path, monkeypatch):
    flipped_once(monkeypatch, device=2, at_call=7)
    code, one = run(settings_for(tmp_path, mesh={"data": 4}), tmp_path / "run", devices=4)
    (record,) = records(tmp_path / "run")
    assert code == QUARANTINE and record["what"] == "quarantine"
    assert record["at_fault"]["devices"] == [jax.devices()[2].id]
    assert one.checkpoints.latest() == 4  # the last before the fault


def test_another_recipes_folder_is_refused(tmp_path):
    run(settings_for(tmp_path, steps=4), tmp_path / "run")
    with refuses(None, CheckpointError, code="changed_rows"):
        run(settings_for(tmp_path, steps=4, batch=4), tmp_path / "run")
