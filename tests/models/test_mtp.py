"""Multi-token prediction against the paper's equations in PyTorch, with transformers' own layers as its blocks."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from corners import corners
from reference_models import BASE, FAMILIES, reference
from refusals import refuses

from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.spec import abstract, init, leaves
from dovetail.core.types import Batch, Packed
from dovetail.io import hf
from dovetail.io.load import load, save
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import forward, unembed
from dovetail.models.mtp import ahead, mtp_copies, mtp_depth, mtp_hidden, mtp_spec, with_mtp
from dovetail.models.registry import parse_config, read_config
from dovetail.models.spec import spec
from dovetail.ops.loss import cross_entropy

pytestmark = pytest.mark.slow

VOCAB, DIM = BASE["vocab_size"], BASE["hidden_size"]


def with_depth(cfg: ModelConfig, depth: int) -> ModelConfig:
    return dataclasses.replace(cfg, source=json.dumps(cfg.to_hf() | dict(num_nextn_predict_layers=depth)))


def batch_of(documents: list[list[int]], length: int) -> Batch:
    """One row of documents laid end to end; a document's last token has no target."""
    row = {name: np.zeros(length, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    mask, at = np.zeros(length, np.float32), 0
    for i, tokens in enumerate(documents, start=1):
        here = slice(at, at + len(tokens))
        row["tokens"][here], row["targets"][here] = tokens, [*tokens[1:], 10**6]  # where masked, a target is anything
        row["positions"][here], row["segment_ids"][here] = np.arange(len(tokens)), i
        mask[here] = [1.0] * (len(tokens) - 1) + [0.0]
        at += len(tokens)
    return Batch(**{name: jnp.asarray(x)[None] for name, x in row.items()}, loss_mask=jnp.asarray(mask)[None])


def some_tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


DEPTHS = {"llama3.1": 2, "deepseek-v3": 1, "mixtral": 2}  # deepseek's first layer is of another kind


@functools.cache
def model(name: str):
    """(torch's model of two layers, cfg, params). Block k of the prediction is the trunk's k-th layer from the end."""
    depth = DEPTHS[name]
    theirs, folder = reference(name, num_hidden_layers=2)
    ours = load(folder, dtype="f32")
    cfg = with_depth(ours.config, depth)
    fresh = init(mtp_spec(cfg), jax.random.key(0), jnp.float32)
    spread = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)
    blocks = [p | dict(block=ours.params["layers"][-k]) for k, p in enumerate(spread, start=1)]
    return theirs, cfg, {**ours.params, "mtp": tuple(blocks)}


@functools.partial(jax.jit, static_argnames="cfg")
def predict(params, cfg, batch, ctx):
    hidden = forward(params, cfg, batch.tokens, batch.positions, ctx)[0]
    return [hidden for hidden, _, _ in mtp_hidden(params, cfg, hidden, batch, ctx)]


def predict_in_torch(theirs, cfg, params, tokens: list[int]) -> list[np.ndarray]:
    """Equations 21 to 23 for one document, place by place: only where t_{i+k} is there."""

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.norm_eps) * torch.tensor(np.asarray(weight))

    trunk, ids = theirs.model, torch.tensor([tokens])
    h, found = trunk(ids).last_hidden_state, []
    for k, p in enumerate(params["mtp"], start=1):
        n = len(tokens) - k
        both = torch.cat([norm(trunk.embed_tokens(ids[:, k:]), p["embed_norm"]), norm(h[:, :n], p["hidden_norm"])], -1)
        x = both @ torch.tensor(np.asarray(p["proj"])).T
        later = torch.full((1, 1, n, n), -torch.inf).triu(1)
        turns = trunk.rotary_emb(x, torch.arange(n)[None])
        layer = trunk.layers[len(trunk.layers) - k]
        h = norm(layer(x, attention_mask=later, position_embeddings=turns, position_ids=None), p["norm"])
        found.append(h[0].numpy())
    return found


@pytest.mark.parametrize(
    "name", ["llama3.1", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("deepseek-v3", "mixtral"))]
)
def test_the_papers_equations(name):
    theirs, cfg, params = model(name)
    tokens = some_tokens(0, 7)
    batch = batch_of([tokens], 7)
    ours = predict(params, cfg, batch, Packed(batch.segment_ids))
    with torch.no_grad():
        expected = predict_in_torch(theirs, cfg, params, tokens)
    for k, (a, b) in enumerate(zip(ours, expected, strict=True), start=1):
        assert b.std() > 0.1
        np.testing.assert_allclose(a[0, : 7 - k], b, atol=2e-5, rtol=1e-5)


def test_the_target_is_the_token_after_the_next():
    batch = batch_of([[11, 12, 13, 14], [21, 22], [31, 32, 33]], 11)
    one, two = ahead(batch, 1), ahead(batch, 2)
    assert one.tokens[0].tolist() == [12, 13, 14, 21, 22, 31, 32, 33, 0, 0, 0]
    assert one.loss_mask[0].tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert one.targets[0][one.loss_mask[0] > 0].tolist() == [13, 14, 33]
    assert two.targets[0][two.loss_mask[0] > 0].tolist() == [14]
    assert two.loss_mask[0].tolist() == [1] + [0] * 10
    assert ahead(batch, 3).loss_mask.sum() == 0
    np.testing.assert_array_equal(one.segment_ids, batch.segment_ids)
    np.testing.assert_array_equal(one.positions, batch.positions)


def test_a_row_that_continues_in_the_next():
    """Cut within a document, the row's last token has a target, and so has the one before it at depth 1."""
    batch = batch_of([[11, 12, 13]], 3)
    batch = dataclasses.replace(batch, targets=jnp.asarray([[12, 13, 14]]), loss_mask=jnp.ones((1, 3)))
    one = ahead(batch, 1)
    assert one.targets[0].tolist()[:2] == [13, 14]
    assert one.loss_mask[0].tolist() == [1, 1, 0]


def test_masked_targets_stay_masked():
    """A prompt that does not count for the next token does not for later ones, though its tokens are read."""
    batch = dataclasses.replace(batch_of([[11, 12, 13, 14, 15]], 5), loss_mask=jnp.asarray([[0.0, 0, 1, 1, 0]]))
    assert ahead(batch, 1).loss_mask[0].tolist() == [0, 1, 1, 0, 0]
    assert ahead(batch, 1).tokens[0].tolist() == [12, 13, 14, 15, 0]


def test_documents_do_not_see_each_other():
    _, cfg, params = model("llama3.1")
    first, second = some_tokens(1, 6), some_tokens(2, 9)
    together = batch_of([first, second], 17)
    packed = predict(params, cfg, together, Packed(together.segment_ids))
    for tokens, start in ((first, 0), (second, 6)):
        alone = batch_of([tokens], len(tokens))
        hidden = predict(params, cfg, alone, Packed(alone.segment_ids))
        for k, (a, b) in enumerate(zip(packed, hidden, strict=True), start=1):
            end = len(tokens) - k  # past it stands the next document's token, and no target
            np.testing.assert_allclose(a[0, start : start + end], b[0, :end], atol=1e-5)


def mtp_loss(params, cfg, batch, ctx):
    """The extra loss alone, a mean over its targets."""
    trunk = forward(params, cfg, batch.tokens, batch.positions, ctx)[0]
    head = params["embed"] if cfg.tied else params["head"]
    total, count = jnp.float32(0), jnp.float32(0)
    for hidden, later, _ in mtp_hidden(params, cfg, trunk, batch, ctx):
        loss, _ = cross_entropy(hidden, head, later.targets, later.loss_mask, placement=ctx.placement)
        total, count = total + loss, count + later.loss_mask.sum()
    return total / count


@functools.partial(jax.jit, static_argnames="cfg")
def loss_and_gradient(params, cfg, batch, ctx):
    return jax.value_and_grad(mtp_loss)(params, cfg, batch, ctx)


def test_the_gradient_reaches_trunk_embedding_and_head():
    _, cfg, params = model("llama3.1")
    batch = batch_of([some_tokens(3, 9), some_tokens(4, 7)], 16)
    loss, gradient = loss_and_gradient(params, cfg, batch, Packed(batch.segment_ids))
    assert loss > 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-7, jax.tree_util.keystr(path)
    is_read = np.abs(gradient["embed"]).max(axis=1)[batch.tokens[0]] > 0
    assert is_read.tolist() == [True] * 8 + [False] + [True] * 6 + [False], "a document's last token is a target only"


def test_gradients_of_a_depth_precede_those_of_lower_layers():
    """And its weights for their output: else XLA holds both through the loop over the layers."""
    _, cfg, params = model("llama3.1")
    batch = batch_of([some_tokens(0, 7)], 7)
    traced = jax.make_jaxpr(jax.grad(lambda p: mtp_loss(p, cfg, batch, Packed(batch.segment_ids))))(params)
    barriers = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    weights = len(jax.tree.leaves(params["mtp"][0]))
    assert [len(eqn.outvars) for eqn in barriers] == [weights + 1] * 2 * DEPTHS["llama3.1"]


def test_the_loss_is_that_of_the_logits():
    _, cfg, params = model("llama3.1")
    cfg, params = with_depth(cfg, 1), params | dict(mtp=params["mtp"][:1])
    tokens = some_tokens(5, 8)
    batch = batch_of([tokens], 8)
    hidden = predict(params, cfg, batch, Packed(batch.segment_ids))[0]
    logp = jax.nn.log_softmax(unembed(params, cfg, hidden))[0]
    expected = -np.mean([logp[i, tokens[i + 2]] for i in range(6)])
    loss, _ = loss_and_gradient(params, cfg, batch, Packed(batch.segment_ids))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.thorough
def test_the_loss_is_positive_and_falls():
    """From chance, on a text whose next tokens but one can be learnt: never zero, and lower at the end."""
    cfg = parse_config(
        dict(model_type="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    )  # fmt: skip
    params = init(with_mtp(spec(cfg), cfg), jax.random.key(1), jnp.float32)
    batch = batch_of([[(3 * i) % 32 for i in range(24)], [(5 * i + 1) % 32 for i in range(24)]], 48)
    losses = []
    for _ in range(30):
        loss, gradient = loss_and_gradient(params, cfg, batch, Packed(batch.segment_ids))
        params = jax.tree.map(lambda p, g: p - 0.02 * jnp.sign(g), params, gradient)
        losses.append(float(loss))
    assert abs(losses[0] - np.log(32)) < 0.2
    assert 0 < losses[-1] < 0.5 * losses[0]


@pytest.mark.thorough  # tests/train/test_meshes.py has one of them
@pytest.mark.parametrize("axes", [dict(context=2, tensor=2, fsdp=2), dict(expert=2, context=4)], ids=str)
@pytest.mark.parametrize("name", ["llama3.1", "deepseek-v3"])
def test_on_a_mesh(name, axes):
    """Documents and their targets go on across the slices of a row."""
    _, cfg, params = model(name)
    rows = [batch_of([some_tokens(i, 13), some_tokens(9 + i, 11)], 24) for i in range(4)]
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    placement = Placement(make_mesh(axes), TRAIN)
    specs = spec(cfg) | dict(mtp=mtp_spec(cfg))
    cut = jax.tree.map(jax.device_put, params, placement.shardings(specs))
    ours = loss_and_gradient(cut, cfg, batch, Packed(batch.segment_ids, placement=placement))
    theirs = loss_and_gradient(params, cfg, batch, Packed(batch.segment_ids))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max())), ours, theirs)


# ------------------------------------------------------------------------------------------------------ checkpoints


def config(name: str) -> ModelConfig:
    kind, options = FAMILIES[name]
    return parse_config(getattr(transformers, kind)(**(BASE | options)).to_dict())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_supports_mtp(name):
    """Also where the last layer reads another's keys, or has an embedding of its own."""
    cfg = config(name)
    assert mtp_depth(cfg) == 1
    params = abstract(with_mtp(spec(cfg), cfg), jnp.float32)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    batch = Batch(tokens, tokens, tokens, tokens, jax.ShapeDtypeStruct((2, 16), jnp.float32))
    found = jax.eval_shape(functools.partial(predict, cfg=cfg), params, batch=batch, ctx=Packed(tokens))
    assert [x.shape for x in found] == [(2, 16, cfg.dim)]


def test_names_are_those_of_published_checkpoints():
    """DeepSeek-V3 has 61 layers and one after them; here there are 2."""
    cfg = config("deepseek-v3")
    names = {name for _, leaf in leaves(mtp_spec(cfg)) for name in leaf.stored.names} | set(mtp_copies(cfg))
    own = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.norm.weight",
           "shared_head.head.weight"]  # fmt: skip
    trunk = {name.removeprefix("model.layers.1.") for name in hf.name_table(cfg) if name.startswith("model.layers.1.")}
    assert "mlp.experts.7.down_proj.weight" in trunk
    assert names == {f"model.layers.2.{name}" for name in [*own, *trunk]}
    assert mtp_copies(cfg) == {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }


def test_a_tied_head_is_copied_from_the_embedding():
    assert set(mtp_copies(config("smollm2")).values()) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("name", corners(["llama3.1", "deepseek-v3"], ["llama3.1"]))
def test_save_and_load_round_trip(name, tmp_path):
    """In the folder that a run exports; it is one more layer, and the embedding and the head once more."""
    _, cfg, params = model(name)
    save(tmp_path / "out", cfg, params, None)
    folder = SafetensorFolder(tmp_path / "out")
    assert hf.has_mtp(folder) and not hf.has_mtp(SafetensorFolder(reference(name, num_hidden_layers=2)[1]))
    read = read_config(tmp_path / "out")
    again = hf.read_params(folder, read, jnp.float32, "here", mtp=True)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    for copy, original in mtp_copies(cfg).items():
        np.testing.assert_array_equal(folder.read(copy), folder.read(original))


@pytest.mark.parametrize("name", ["llama3.1", "deepseek-v3"])
def test_the_model_is_loaded_without_its_mtp_layers(name, tmp_path):
    """By `load`, whether or not the config says that there are such layers, and by transformers."""
    theirs, cfg, params = model(name)
    save(tmp_path / "out", cfg, params, None)
    tokens = some_tokens(6, 9)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
        np.testing.assert_array_equal(loaded(torch.tensor([tokens])).logits[0].numpy(), expected)
    np.testing.assert_allclose(load(tmp_path / "out", dtype="f32").logits(tokens), expected, atol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("num_nextn_predict_layers") == DEPTHS[name]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert "mtp" not in load(tmp_path / "out", dtype="f32").params


def test_an_extra_layer_is_refused(tmp_path):
    """Only what multi-token prediction left behind is passed over."""
    ours = load(reference("llama3.1", num_hidden_layers=2)[1], dtype="f32")
    save(tmp_path / "out", ours.config, ours.params, None)
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | dict(num_hidden_layers=1)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with refuses(None, CheckpointError, naming="model.layers.1."):
        load(tmp_path / "out", dtype="f32")
