"""Test the storage plan: bytes as jax has them, seconds and dollars."""

import jax
import pytest
from refusals import refuses

from dovetail.core import recipe
from dovetail.core.cloud import per_gb, transfer
from dovetail.models.registry import read_model
from dovetail.plan.cost import plan_storage, state_bytes, token_bytes
from dovetail.train.next_token import next_token
from dovetail.train.prepare import prepare
from dovetail.train.settings import Pretrain


@pytest.mark.parametrize("override", ["optimizer.name=adamw", "optimizer.name=muon", "ema=0.999"])
def test_a_checkpoint_has_the_bytes_of_the_state(override):
    settings = recipe.load("tiny", [override], Pretrain)
    ready = prepare(settings, next_token(settings), jax.devices()[:1])
    form = ready.abstract_state
    held = [leaf for tree in (form.params, form.opt, form.ema) for leaf in jax.tree.leaves(tree)]
    real = sum(leaf.size * leaf.dtype.itemsize for leaf in held)
    assert state_bytes(ready.cfg, settings) == pytest.approx(real, rel=0.001)  # beside it, counters


def test_saving_takes_all_hosts_and_restoring_what_each_holds():
    cfg, settings = read_model("llama3-8b"), recipe.load("llama3-8b", ["checkpoint.every=1000"], Pretrain)
    one = plan_storage(cfg, settings, hosts=1, bandwidth=1e9)
    many = plan_storage(cfg, settings, hosts=16, devices_per_host=4, bandwidth=1e9)
    assert one.state == pytest.approx(12 * 8.03e9, rel=0.01)  # f32 masters and two moments
    assert one.save_seconds == pytest.approx(96.4, rel=0.01) and many.save_seconds == one.save_seconds / 16
    apart = recipe.change(settings, ["mesh.data=8", "mesh.fsdp=8"])
    again = plan_storage(cfg, apart, hosts=16, devices_per_host=4, mesh=apart.mesh, bandwidth=1e9)
    assert again.restore_seconds == one.state / 2 / 1e9  # the state is split over 8, of which a host has 4


def test_tokens_on_disk():
    assert token_bytes(49_152) == 2 and token_bytes(128_256) == 4
    settings = recipe.load("smollm2-135m", ["tokens=1B"], Pretrain)
    assert plan_storage(read_model("smollm2-135m"), settings).data == pytest.approx(2e9, rel=0.001)


def test_another_region_is_warned_of_and_costs():
    cfg, settings = read_model("llama3-1b"), recipe.load("llama3-1b", [], Pretrain)
    here = plan_storage(cfg, settings, bucket="us-central2", zone="us-central2-b")
    there = plan_storage(cfg, settings, bucket="us-east5", zone="us-central2-b")
    far = plan_storage(cfg, settings, bucket="us-east5", zone="europe-west4-a")
    assert here.carried == 0 and not here.warning and here.month > 0 and here.operations > 0
    assert there.carried == pytest.approx(0.02 * (there.data + there.saves * there.state) / 1e9)
    assert "the bucket is in us-east5 and the machines are in us-central2" in there.warning
    assert far.carried == 4 * there.carried
    with refuses("bandwidth", naming="above 0"):
        plan_storage(cfg, settings, bandwidth=0)


def test_costs_of_traffic():
    assert per_gb("us", "us-east5-b") == 0 and per_gb("us", "europe-west4-a") == 0.08
    assert transfer(1000, "us-east5", "us-east5-b") == pytest.approx(0.05)  # reads alone
