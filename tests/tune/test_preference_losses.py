"""Test each preference loss and its gradient on packed rows, against formulas in torch and TRL's functions."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from refusals import refuses
from torch.nn import functional as F

from dovetail.core.errors import RecipeError
from dovetail.train.step import synced
from dovetail.tune.preference import _chosen_nll, _judge
from dovetail.tune.preference_losses import Judged, bradley_terry, kto
from dovetail.tune.sections import LOSSES, READ_BY, Preference, ReferenceSettings
from dovetail.tune.segments import are_there, is_last, num_pairs, pairs, segment_sums

pytestmark = pytest.mark.slow

PAIRS, MOST, LENGTH = 7, 6, 40
SETTINGS = {
    "sigmoid": Preference("sigmoid", beta=0.3),
    "smoothed": Preference("sigmoid", beta=0.3, label_smoothing=0.2),
    "robust": Preference("robust", beta=0.3, label_smoothing=0.2),
    "hinge": Preference("hinge", beta=0.4),
    "ipo": Preference("ipo", beta=0.2),
    "orpo": Preference("orpo", beta=0.7),
    "simpo": Preference("simpo", beta=2.0, gamma=0.6),
    "simpo, smoothed": Preference("simpo", beta=2.0, gamma=0.6, label_smoothing=0.1),
}


def completions(seed: int, count: int = 2 * PAIRS) -> list[tuple[np.ndarray, np.ndarray]]:
    """(the policy's, the reference's) log-probabilities of each token of completions; chosen and rejected in turn."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        length = int(rng.integers(1, 7))
        policy = -rng.gamma(1.0, 1.0, length) - 1e-3
        found.append((policy, policy + 0.7 * rng.normal(size=length)))
    return found


def packed(documents: list[tuple[np.ndarray, ...]]) -> tuple[jax.Array, ...]:
    """(segment ids, each of a document's numbers, mask), each [rows, LENGTH]; every document has a prompt of two tokens
    whose numbers do not count, and the rows hold as many documents as MOST or fewer."""
    held = [documents[0:4], documents[4:10], documents[10:12], documents[12:]]
    width = len(documents[0])
    out = np.zeros((2 + width, len(held), LENGTH), np.float32)
    for row, few in enumerate(held):
        at = 0
        for number, document in enumerate(few, start=1):
            end = at + 2 + len(document[0])
            out[0, row, at:end], out[1 + width, row, at + 2 : end] = number, 1.0
            for i, values in enumerate(document):
                out[1 + i, row, at : at + 2], out[1 + i, row, at + 2 : end] = -9.0, values
            at = end
    return jnp.asarray(out[0], jnp.int32), *(jnp.asarray(x) for x in out[1:])


def of_documents(grads: jax.Array, mask: jax.Array) -> np.ndarray:
    """The numbers of counted tokens, document after document; nothing else may have a gradient."""
    assert not np.any(np.asarray(grads)[np.asarray(mask) == 0])
    return np.asarray(grads)[np.asarray(mask) > 0]


def compared(settings: Preference, seed: int = 0) -> tuple[float, np.ndarray, Any, list]:
    """(the mean loss, its gradient by tokens, all numbers, the completions)."""
    documents = completions(seed)
    ids, policy, reference, mask = packed(documents)
    there = pairs(are_there(ids, MOST)).rejected
    assert there.sum() == num_pairs(ids) == PAIRS

    def loss(policy: jax.Array) -> tuple[jax.Array, Judged]:
        off = 0.0 if settings.source == "none" else reference
        sums = segment_sums(jnp.where(mask > 0, policy - off, 0.0), ids, MOST)
        lengths = pairs(segment_sums(mask, ids, MOST))
        judged = _judge(settings, pairs(sums), lengths)
        logps = pairs(segment_sums(jnp.where(mask > 0, policy, 0.0), ids, MOST))
        written = _chosen_nll(settings, logps, there) / lengths.chosen.sum()
        return jnp.sum(jnp.where(there, judged.loss, 0.0)) / num_pairs(ids) + written, judged

    (value, judged), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy)
    found: Any = (np.asarray(x)[np.asarray(there)] for x in judged)
    return float(value), of_documents(grads, mask), Judged(*found), documents


def by_formula(settings: Preference, documents: list) -> tuple[float, np.ndarray]:
    """The same in torch and f64, pair by pair."""
    tokens = [torch.tensor(policy, requires_grad=True) for policy, _ in documents]
    refs = [torch.tensor(ref) for _, ref in documents]
    b, e, losses = settings.beta, settings.label_smoothing, []
    for w, l, ref_w, ref_l in zip(tokens[0::2], tokens[1::2], refs[0::2], refs[1::2], strict=True):
        d = (w.sum() - ref_w.sum()) - (l.sum() - ref_l.sum())
        match settings.loss_type:
            case "sigmoid":
                one = -(1 - e) * torch.log(torch.sigmoid(b * d)) - e * torch.log(torch.sigmoid(-b * d))
            case "robust":
                right, wrong = -torch.log(torch.sigmoid(b * d)), -torch.log(torch.sigmoid(-b * d))
                one = ((1 - e) * right - e * wrong) / (1 - 2 * e)
            case "hinge":
                one = torch.clamp(1 - b * d, min=0)
            case "ipo":
                one = ((w - ref_w).mean() - (l - ref_l).mean() - 1 / (2 * b)) ** 2
            case "orpo":
                p, q = torch.exp(w.mean()), torch.exp(l.mean())
                one = -w.mean() - b * torch.log(torch.sigmoid(torch.log(p / (1 - p) / (q / (1 - q)))))
            case _:
                x = b * w.mean() - b * l.mean() - settings.gamma
                one = -(1 - e) * torch.log(torch.sigmoid(x)) - e * torch.log(torch.sigmoid(-x))
        losses.append(one)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), np.concatenate([x.grad.numpy() for x in tokens if x.grad is not None])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_and_gradients_equal_the_formulas(name, seed):
    value, grads, judged, documents = compared(SETTINGS[name], seed)
    want, want_grads = by_formula(SETTINGS[name], documents)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads, want_grads, rtol=2e-5, atol=1e-6)
    assert judged.loss.shape == (PAIRS,) and np.any(judged.chosen > judged.rejected)


def test_extreme_log_probabilities_give_finite_losses():
    """A completion of probability 1, or one that is not there, must not spoil the others' gradients."""
    for name, settings in SETTINGS.items():

        def loss(x: jax.Array, settings: Preference = settings) -> jax.Array:
            ones = jnp.ones(x.shape)
            return _judge(settings, pairs(x), pairs(ones)).loss.sum()

        for sums in (jnp.zeros((1, 4)), jnp.asarray([[0.0, -1e4]]), jnp.asarray([[-1e4, 0.0]])):
            assert np.all(np.isfinite(jax.grad(loss)(sums))), name


# --- KTO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [0.0, 0.4])
def test_kto_equals_the_formula(kl):
    rng = np.random.default_rng(2)
    ratio, label = rng.normal(size=9), np.sign(rng.normal(size=9))

    def loss(ratio: jax.Array, kl: jax.Array) -> jax.Array:
        return kto(ratio, jnp.asarray(label), kl, beta=0.5, desirable=1.3, undesirable=0.7).loss.mean()

    value, (grad, no_grad) = jax.value_and_grad(loss, (0, 1))(jnp.asarray(ratio, jnp.float32), jnp.asarray(kl))
    x = torch.tensor(ratio, requires_grad=True)
    good, bad = 1.3 * (1 - torch.sigmoid(0.5 * (x - kl))), 0.7 * (1 - torch.sigmoid(0.5 * (kl - x)))
    want = torch.where(torch.tensor(label) > 0, good, bad).mean()
    want.backward()
    assert x.grad is not None and no_grad == 0
    np.testing.assert_allclose(value, want.item(), rtol=1e-6)
    np.testing.assert_allclose(grad, x.grad, rtol=1e-5, atol=1e-7)


# --- reward models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [0.0, 0.8])
@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_bradley_terry_equals_the_formula(margin, centering):
    scores = np.random.default_rng(3).normal(size=(2, 9)).astype(np.float32)

    def loss(x: jax.Array) -> jax.Array:
        return bradley_terry(x[0], x[1], margin=margin, centering=centering).loss.mean()

    value, grad = jax.value_and_grad(loss)(jnp.asarray(scores))
    x = torch.tensor(scores, requires_grad=True)
    want = (-F.logsigmoid(x[0] - x[1] - margin) + centering * (x[0] + x[1]) ** 2).mean()
    want.backward()
    assert x.grad is not None
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad, rtol=1e-5, atol=1e-7)


# --- TRL's own --------------------------------------------------------------------------------------------------------


TRAINERS = {
    "DPO": "trainer.dpo_trainer",
    "KTO": "trainer.kto_trainer",
    "Reward": "trainer.reward_trainer",
    "CPO": "experimental.cpo.cpo_trainer",
    "ORPO": "experimental.orpo.orpo_trainer",
}


@pytest.fixture(scope="module")
def trl() -> Any:
    """The trainers, whose methods are called without one: what they read of themselves is given to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: pytest.importorskip(f"trl.{path}") for name, path in TRAINERS.items()}
    return SimpleNamespace(**{name: getattr(module, f"{name}Trainer") for name, module in found.items()})


def trainer(**fields: Any) -> Any:
    kept = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    metrics = {"train": defaultdict(list)}
    own = dict(model=SimpleNamespace(training=True), accelerator=kept, aux_loss_enabled=False, _metrics=metrics)
    return SimpleNamespace(**own, _total_train_tokens=0, _tp_size=1, **fields)


def padded(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, whether they count) [N, longest], of which the latter has a token more before them."""
    longest = max(len(row) for row in rows)
    values, mask = np.zeros((len(rows), longest)), np.zeros((len(rows), 1 + longest))
    for i, row in enumerate(rows):
        values[i, : len(row)], mask[i, 1 : 1 + len(row)] = row, 1
    return torch.tensor(values), torch.tensor(mask).long()


def answers(logps: torch.Tensor) -> Any:
    """A model that gives these log-probabilities."""
    zeros, no = torch.zeros_like(logps), torch.zeros_like(logps, dtype=torch.bool)
    return lambda **_: SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=no)


TRLS = {name: SETTINGS[name] for name in ("sigmoid", "robust", "hinge", "ipo")} | {
    "apo_zero": Preference("apo_zero", beta=0.3),
    "apo_down": Preference("apo_down", beta=0.3),
    "bco_pair": Preference("bco_pair", beta=0.3),
    "dpo and sft": Preference(("sigmoid", "sft"), beta=0.3),
    "mpo": Preference(("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0), beta=0.3),
}


@pytest.mark.parametrize("name", TRLS)
def test_dpo_equals_trls(trl, name):
    settings = TRLS[name]
    value, grads, judged, documents = compared(settings)
    ordered = documents[0::2] + documents[1::2]  # TRL's batches have the chosen ones first
    logps, mask = padded([policy for policy, _ in ordered])
    refs, _ = padded([ref for _, ref in ordered])
    logps.requires_grad_(True)
    own = trainer(
        ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[*settings.weights],
        loss_weights=[*settings.weights.values()], beta=settings.beta, label_smoothing=settings.label_smoothing,
        use_weighting=False,
    )  # fmt: skip
    chosen, rejected = refs.sum(dim=1).chunk(2)
    inputs = dict(input_ids=torch.ones_like(mask), attention_mask=mask, completion_mask=mask)
    inputs |= dict(ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    loss = trl.DPO._compute_loss(own, answers(logps), inputs, False)
    loss.backward()
    assert logps.grad is not None
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    theirs = [row[row_mask[1:] > 0].numpy() for row, row_mask in zip(logps.grad, mask, strict=True)]
    in_turn = [x for pair in zip(theirs[:PAIRS], theirs[PAIRS:], strict=True) for x in pair]
    np.testing.assert_allclose(grads, np.concatenate(in_turn), rtol=2e-5, atol=1e-6)
    told = own._metrics["train"]
    accuracy = (judged.chosen > judged.rejected).mean()
    np.testing.assert_allclose(accuracy, told["rewards/accuracies"][0], rtol=1e-6)
    if name != "ipo":  # whose rewards are averages here, as what it compares is
        np.testing.assert_allclose((judged.chosen - judged.rejected).mean(), told["rewards/margins"][0], rtol=1e-4)


def means(documents: list) -> torch.Tensor:
    return torch.tensor([policy.mean() for policy, _ in documents], dtype=torch.float32)


def test_orpo_equals_trls(trl):
    _, _, judged, documents = compared(SETTINGS["orpo"])
    chosen, rejected = means(documents[0::2]), means(documents[1::2])
    odds, *rewards, _, _ = trl.ORPO.odds_ratio_loss(trainer(beta=0.7), chosen, rejected)
    np.testing.assert_allclose(judged.loss, (-chosen - odds).numpy(), rtol=1e-5)
    np.testing.assert_allclose([judged.chosen, judged.rejected], [x.numpy() for x in rewards], rtol=1e-5)


@pytest.mark.parametrize("name", ["simpo", "simpo, smoothed"])
def test_simpo_equals_trls(trl, name):
    settings = SETTINGS[name]
    _, _, judged, documents = compared(settings)
    own = trainer(alpha=0.0, loss_type="simpo", beta=2.0, simpo_gamma=0.6, label_smoothing=settings.label_smoothing)
    losses, *rewards = trl.CPO.cpo_loss(own, means(documents[0::2]), means(documents[1::2]))
    np.testing.assert_allclose(judged.loss, losses.numpy(), rtol=1e-5)
    np.testing.assert_allclose([judged.chosen, judged.rejected], [x.numpy() for x in rewards], rtol=1e-5)


def test_kto_equals_trls(trl):
    documents, apart = completions(4, 9), completions(5, 9)
    label = np.sign(np.random.default_rng(6).normal(size=9))
    logps, mask = padded([policy for policy, _ in documents])
    logps.requires_grad_(True)
    ratio = jnp.asarray([(policy - ref).sum() for policy, ref in documents])
    kl = max(0.0, float(np.mean([(policy - ref).sum() for policy, ref in apart])))
    assert kl > 0
    own = trainer(
        calculate_KL=True, precompute_ref_logps=True, loss_type="kto", beta=0.5, desirable_weight=1.3,
        undesirable_weight=0.7, _compute_kl_logps=lambda *_: torch.tensor([policy.sum() for policy, _ in apart]),
    )  # fmt: skip
    inputs = dict(
        label=torch.tensor(label > 0), input_ids=torch.ones_like(mask), attention_mask=mask, completion_mask=mask,
        ref_logps=torch.tensor([ref.sum() for _, ref in documents]),
        ref_KL_logps=torch.tensor([ref.sum() for _, ref in apart]),
    )  # fmt: skip
    loss = trl.KTO._compute_loss(own, answers(logps), inputs, False)
    loss.backward()

    def ours(ratio: jax.Array) -> jax.Array:
        rated = kto(ratio, jnp.asarray(label), jnp.asarray(kl), beta=0.5, desirable=1.3, undesirable=0.7)
        return rated.loss.mean()

    value, grad = jax.value_and_grad(ours)(ratio)
    assert logps.grad is not None
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, logps.grad[:, 0].numpy(), rtol=1e-4, atol=1e-7)


def test_a_sync_of_the_reference_equals_trls(trl):
    from trl.trainer.callbacks import SyncRefModelCallback

    rng = np.random.default_rng(0)
    old, new = ({"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)} for _ in range(2))
    theirs, policy = ([torch.nn.Parameter(torch.tensor(x)) for x in each.values()] for each in (old, new))
    model, target = torch.nn.ParameterList(policy), torch.nn.ParameterList(theirs)
    SyncRefModelCallback._sync_target_model(model, target, 0.6)
    settings = ReferenceSettings(sync_every=3)  # mixup_alpha: TRL's default
    kept = jax.tree.map(jnp.asarray, old)
    for step in (1, 2):
        kept = synced(kept, new, jnp.asarray(step), settings)
    assert all(np.array_equal(kept[name], np.asarray(old[name], np.float32)) for name in old)
    kept = synced(kept, new, jnp.asarray(3), settings)
    for name, want in zip(old, target, strict=True):
        np.testing.assert_allclose(kept[name], want.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("centering", [None, 0.1])
def test_the_loss_of_a_reward_model_equals_trls(trl, centering):
    rng = np.random.default_rng(7)
    scores, margin = torch.tensor(rng.normal(size=(8, 1)), requires_grad=True), torch.tensor(rng.random(4))
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=centering))
    inputs = dict(margin=margin, attention_mask=torch.ones(8, 3))
    loss = trl.Reward.compute_loss(own, lambda **_: SimpleNamespace(logits=scores), inputs)
    loss.backward()
    assert scores.grad is not None

    def ours(x: jax.Array) -> jax.Array:
        return bradley_terry(x[:4], x[4:], margin=jnp.asarray(margin.numpy()), centering=centering or 0.0).loss.mean()

    value, grad = jax.value_and_grad(ours)(jnp.asarray(scores.detach().numpy()[:, 0]))
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(grad, scores.grad[:, 0], rtol=1e-5, atol=1e-7)


# --- documents of packed rows -----------------------------------------------------------------------------------------


def test_sums_over_documents():
    ids = jnp.asarray([[1, 1, 2, 2, 2, 3, 0], [1, 0, 0, 0, 0, 0, 0]])
    values = jnp.arange(14.0).reshape(2, 7)
    sums = segment_sums(values, ids, 4)
    np.testing.assert_array_equal(sums, [[1, 9, 5, 0], [7, 0, 0, 0]])
    np.testing.assert_array_equal(are_there(ids, 4), sums > 0)
    np.testing.assert_array_equal(is_last(ids), [[0, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0]])
    assert num_pairs(ids) == 1
    with pytest.raises(AssertionError, match="`most` must be even"):
        pairs(segment_sums(values, ids, 3))


def test_more_documents_than_declared_give_nan():
    sums = segment_sums(jnp.ones((2, 3)), jnp.asarray([[1, 2, 3], [1, 2, 2]]), 2)
    np.testing.assert_array_equal(sums, [[np.nan, np.nan], [1, 2]])
    assert np.all(are_there(jnp.asarray([[1, 2, 3]]), 2))


WRONG = [
    ("loss_type", dict(loss_type="sigmoit")),
    ("beta", dict(beta=0.0)),
    ("label_smoothing", dict(label_smoothing=0.5)),
    ("label_smoothing", dict(loss_type="ipo", label_smoothing=0.1)),
    ("label_smoothing", dict(loss_type="robust")),
    ("reference", dict(loss_type="orpo", reference="live")),
    ("reference", dict(loss_type="kto", reference="none")),
    ("gamma", dict(loss_type="simpo", gamma=-1.0)),
    ("loss_type", dict(loss_type=("sigmoid", "kto"))),
    ("loss_type", dict(loss_type="sft")),
    ("loss_type", dict(loss_type=("ipo", "ipo"))),
    ("loss_weights", dict(loss_type=("sigmoid", "sft"), loss_weights=(1.0,))),
    ("loss_weights", dict(loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.0))),
]


@pytest.mark.parametrize(("param", "given"), WRONG)
def test_preference_settings_are_checked(param, given):
    with refuses(param, RecipeError):
        Preference(**given)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("key", READ_BY)
def test_keys_that_the_loss_does_not_read_are_refused(key, loss):
    given = {"loss_type": (loss, "sigmoid") if loss == "sft" else loss, key: 0.7}
    given |= {"label_smoothing": 0.1} if loss == "robust" else {}
    if loss == READ_BY[key]:
        assert getattr(Preference(**given), key) == 0.7
    else:
        with refuses(key, RecipeError, naming=READ_BY[key]):
            Preference(**given)
