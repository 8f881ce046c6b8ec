"""A torch module as teacher, as reference and as reward model."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from interop.torch.torch_models import classifier, gpt2
from refusals import refuses
from tune.rl import small_runs
from tune.small_models import RUN, chats, metrics, model_folder, pairs

import dovetail as dt
from dovetail.core.compute import compute_of
from dovetail.core.errors import RecipeError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.recipe import create, read
from dovetail.core.training import TorchModel
from dovetail.core.types import Batch
from dovetail.train.external import external_frozen, model_config
from dovetail.train.objective import StepContext
from dovetail.tune.distill import likeliest
from dovetail.tune.preference import target_logprobs
from dovetail.tune.rl.rewards.model_rewards import torch_scorer
from dovetail.tune.rl.rewards.reward import reward_of
from dovetail.tune.settings import Distill, Dpo

pytestmark = pytest.mark.slow

FILE = f"{Path(__file__).parent}/torch_models.py"
GPT2 = {"torch": f"{FILE}:gpt2"}


def losses(ended, name="loss"):
    return [line[name] for line in metrics(ended.folder) if name in line]


def test_a_frozen_module_has_the_logprobs_of_torch():
    cfg = model_config(TorchModel(**GPT2))
    placement = Placement(make_mesh({}, jax.devices()[:1]), TRAIN)
    ctx = StepContext(placement, compute_of("f32"), np.float32)
    frozen = external_frozen(cfg).load(cfg, placement)
    tokens = np.arange(40, 52, dtype=np.int32).reshape(2, 6)
    batch = Batch(tokens, tokens + 1, np.arange(6)[None].repeat(2, 0), np.ones_like(tokens), np.ones((2, 6)))
    with torch.no_grad():
        expected = torch.log_softmax(gpt2().eval()(torch.tensor(tokens)).logits, -1)
    both = jax.jit(lambda frozen: (target_logprobs(frozen, cfg, batch, ctx), likeliest(frozen, cfg, batch, ctx, 4)))
    found, (words, values) = both(frozen)
    np.testing.assert_allclose(found, expected.gather(2, torch.tensor(tokens + 1).long()[..., None])[..., 0], atol=1e-5)
    best = expected.topk(4)
    np.testing.assert_allclose(values, best.values, atol=1e-5)
    np.testing.assert_array_equal(words, best.indices)


@pytest.mark.thorough
def test_a_student_learns_from_a_torch_teacher(tmp_path):
    how = dict(model=model_folder(tmp_path), teacher=GPT2, data=chats(), steps=6, **RUN)
    live = dt.distill(run_dir=tmp_path / "live", distillation={"alpha": 1.0}, **how)
    found = losses(live, "divergence")
    assert live.code == 0 and found[-1] < 0.8 * found[0]


@pytest.mark.thorough
def test_a_teacher_on_disk_gives_the_same_losses(tmp_path):
    how = dict(model=model_folder(tmp_path), teacher=GPT2, data=chats(), steps=3, **RUN)
    live = dt.distill(run_dir=tmp_path / "live", distillation={"top_k": 32}, **how)
    disk = dt.distill(run_dir=tmp_path / "disk", distillation={"teacher": "disk", "top_k": 32}, **how)
    np.testing.assert_allclose(losses(live), losses(disk), rtol=1e-4)


@pytest.mark.thorough
def test_dpo_compares_with_a_torch_reference(tmp_path):
    """The column of the reference has torch's log-probabilities of the completions."""
    how = dict(model=model_folder(tmp_path), data=pairs(4), steps=2, **RUN, reference={"model": GPT2})
    ended = dt.dpo(run_dir=tmp_path / "run", preference={"reference": "disk"}, **how)
    assert ended.code == 0
    kept = np.load(tmp_path / "run/reference.npz")["reference"]
    tokenizer = dt.load(model_folder(tmp_path)).tokenizer
    ids = torch.tensor([tokenizer.encode("say 0 <0>")])
    with torch.no_grad():
        logprobs = torch.log_softmax(gpt2().eval()(ids).logits[0, :-1], -1)
    expected = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
    assert np.isclose(kept[:, None], expected[-2:], atol=1e-4).any(0).all()


@pytest.mark.thorough
def test_rl_with_a_torch_reward_model(tmp_path):
    model = {"torch": f"{FILE}:token_mean", "tokenizer": model_folder(tmp_path)}
    ended = small_runs.run(tmp_path, rewards=[{"kind": "model", "model": model}], steps=4)
    rewards = losses(ended, "reward")
    assert ended.code == 0 and rewards[-1] > rewards[0]


def test_scores_are_those_of_torch(tmp_path):
    scorer = torch_scorer(TorchModel(f"{FILE}:classifier", tokenizer=model_folder(tmp_path)))
    texts = ["say 1", "say 22 <22>", "x"]
    found = scorer.score(texts)
    with torch.no_grad():
        expected = [classifier()(torch.tensor([scorer.tokenizer.encode(text)])).logits.item() for text in texts]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with refuses("rewards.model.model.tokenizer", RecipeError):
        reward_of({"kind": "model", "model": {"torch": f"{FILE}:classifier"}})


def test_what_needs_known_layers_is_refused():
    given = {"model": "a", "teacher": GPT2, "distillation": {"features": {"weight": 1.0}}}
    with refuses("distillation.features.weight", RecipeError):
        read(Distill, given)
    with refuses("preference.reference", RecipeError):
        create(Dpo, {"model": "a", "reference": {"model": GPT2}, "preference": {"reference": "live"}})
    assert isinstance(read(Distill, {**given, "distillation": {}}).teacher, TorchModel)
