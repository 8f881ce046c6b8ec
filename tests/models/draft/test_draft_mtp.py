"""Multi-token prediction in pages against its equations, dense: with a layer in numpy, and with models.block packed."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import Follower, after_attention, as_numpy, attention, entries_of, follow_in_chunks, random_params, rms
from refusals import refuses
from safetensors.numpy import load_file

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.core.types import Packed
from dovetail.io.draft_folder import load_draft, save_draft
from dovetail.io.load import load, save
from dovetail.models.block import Residual, block
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import unembed
from dovetail.models.draft.draft import Target
from dovetail.models.draft.mtp import NEXTN, QWEN, SPECULATORS, Mtp
from dovetail.models.draft.registry import parse_draft
from dovetail.models.mtp import mtp_layer, with_mtp
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

pytestmark = pytest.mark.slow

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128, num_hidden_layers=2,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1,
    n_group=4, topk_group=2,
)  # fmt: skip
CONFIGS = {
    "deepseek": SIZES | LATENT | dict(model_type="deepseek_v3", num_nextn_predict_layers=1),
    "deepseek of three depths": SIZES | LATENT | dict(model_type="deepseek_v3", num_nextn_predict_layers=3),
    "glm": SIZES
    | dict(
        model_type="glm4_moe",
        num_nextn_predict_layers=1,
        use_qk_norm=True,
        attention_bias=True,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
    "llama of two depths": SIZES | dict(model_type="llama", num_nextn_predict_layers=2),
    "qwen": SIZES | dict(model_type="qwen3", mtp_num_hidden_layers=1),
}
COUNT = 4


def follower(name: str, names: str | None = None) -> Follower:
    cfg = parse_config(CONFIGS[name])
    draft = Mtp(cfg, names or (QWEN if name == "qwen" else NEXTN))
    return Follower(draft, random_params(draft.spec(), seed=2), target(cfg))


@functools.cache
def target(cfg: ModelConfig) -> Target:
    return Target(random_params(spec(cfg), seed=1), cfg)


def sequence_data(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, SIZES["vocab_size"], length + 1), rng.normal(size=(length, SIZES["hidden_size"]))


def expected(f: Follower, tokens: np.ndarray, hidden: np.ndarray, count: int) -> np.ndarray:
    """Return the logits [count, V] after the newest token: h^k from h^{k-1} and the tokens k later."""
    tokens, depth, found = list(tokens), f.draft.depth, []
    for j in range(count):
        k = min(j + 1, depth)
        last = one_depth(f, k - 1, np.asarray(tokens[k : k + len(hidden)]), hidden)
        logits = np.asarray(unembed(f.target.params, f.target.cfg, jnp.asarray(last[-1], jnp.float32)))
        found.append(logits)
        tokens.append(int(logits.argmax()))
        hidden = last if j + 1 < depth else np.concatenate([hidden, last[-1:]])  # the last depth runs on its own output
    return np.stack(found)


def one_depth(f: Follower, k: int, tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    cfg, p = f.target.cfg, as_numpy(f.params["mtp"][k])
    token = as_numpy(f.target.params["embed"])[tokens]
    if f.draft.names == NEXTN:
        token[0] = 0
    eps = cfg.norm_eps
    both = np.concatenate([rms(token, p["embed_norm"], eps), rms(hidden, p["hidden_norm"], eps)], -1)
    return rms(dense_block(f, k, p["block"], both @ p["proj"].T), p["norm"], eps)


def dense_block(f: Follower, k: int, p: dict, x: np.ndarray) -> np.ndarray:
    cfg, layer = f.target.cfg, mtp_layer(f.target.cfg)
    if cfg.family in ("llama", "qwen3"):
        x = x + attention(p["attn"], layer.attn, rms(x, p["attn_norm"], cfg.norm_eps), cfg.norm_eps)
        return after_attention(p, x, cfg.norm_eps)
    ctx, table = Packed(jnp.ones((1, len(x)), jnp.int32)), layer.attn.rope.tables(jnp.arange(len(x))[None])
    stream = Residual(jnp.asarray(x, jnp.float32)[None])
    return np.asarray(block(f.params["mtp"][k]["block"], stream, table, ctx, None, None, cfg=cfg, layer=layer)[0].x[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_after_chunks_are_those_of_the_equations(name):
    f = follower(name)
    data = [sequence_data(length, seed) for seed, length in enumerate((13, 7, 4))]
    sequences = [f.sequence(*one) for one in data]
    follow_in_chunks(f, sequences)
    tokens, logits = f.propose(*sequences, count=COUNT)
    for row, one in enumerate(data):
        wanted = expected(f, *one, COUNT)
        np.testing.assert_allclose(logits[:, row], wanted, atol=2e-4, rtol=1e-4)
        assert tokens[:, row].tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("length", [1, 2])
def test_depths_beyond_the_start_of_a_sequence_write_nothing(length):
    f = follower("llama of two depths")
    s = f.sequence(*sequence_data(length, 0))
    before = [np.asarray(layer) for layer in f.cache]
    f.absorb((s, 0, length))
    for k, (now, old) in enumerate(zip(f.cache, before, strict=True), start=1):
        changed = (np.asarray(now) != old).any(axis=tuple(range(2, old.ndim)))
        wanted = np.zeros_like(changed)
        wanted[s.pages[0], : max(0, length - k)] = True
        np.testing.assert_array_equal(changed, wanted)
    _, logits = f.propose(s, count=3)
    np.testing.assert_allclose(logits[:, 0], expected(f, s.tokens, s.tapped, 3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("deepseek", (11, 13)),
        ("llama of two depths", (11, 13)),
        ("llama of two depths", (9, 10, 13)),
        ("deepseek of three depths", (9, 10, 13)),
    ],
)
def test_a_prefix_hit_leaves_the_entries_before_its_first_tokens(name, ends):
    f = follower(name)
    tokens, hidden = sequence_data(13, 0)
    first = f.sequence(tokens, hidden)
    f.absorb((first, 0, 13))
    kept = entries_of(f.cache, first.pages)
    # 8 tokens are shared, and the next ones are equal
    other, states = tokens.copy(), np.concatenate([hidden[:11], sequence_data(2, 1)[1]])
    other[11:] = (tokens[11:] + 1) % SIZES["vocab_size"]
    second = f.sequence(other, states, shared=first.pages[:2])
    for start, end in itertools.pairwise((8, *ends)):
        f.absorb((second, start, end))
        _, logits = f.propose(replace(second, tokens=other[: end + 1]), count=COUNT)
        count = COUNT if end > 9 else 2  # the third depth's entry 7 is of token 10, not of the one drafted in its place
        wanted = expected(f, other[: end + 1], states[:end], count)
        np.testing.assert_allclose(logits[:count, 0], wanted, atol=2e-4, rtol=1e-4)
    for now, old in zip(entries_of(f.cache, first.pages), kept, strict=True):
        np.testing.assert_array_equal(now, old)
    _, logits = f.propose(first, count=COUNT)
    np.testing.assert_allclose(logits[:, 0], expected(f, tokens, hidden, COUNT), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["glm", pytest.param("deepseek", marks=pytest.mark.thorough)])
def test_the_drafts_of_a_published_checkpoint_are_those_of_transformers(name, tmp_path):
    """The folder also has the copies of embedding and head. As in vLLM, the first pair has no token: here neither."""
    import torch
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    cfg = parse_config(CONFIGS[name])
    save(tmp_path, cfg, random_params(with_mtp(spec(cfg), cfg), seed=1), None)
    stored = load_file(tmp_path / "model.safetensors")
    assert {f"model.layers.2.{name}.weight" for name in PUBLISHED} <= stored.keys()
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    main.config.num_mtp_layers = 1
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]
    theirs = MtpModel.from_pretrained(main)
    tokens, hidden = sequence_data(9, 0)
    with torch.no_grad():
        embeddings = main.get_input_embeddings()(torch.tensor(tokens[None, 1:]))
        embeddings[:, 0] = 0
        places, cache = torch.arange(1, 10)[None], MtpCache(config=theirs.config)
        states = theirs.forward_layer(0, torch.tensor(hidden[None]).float(), places, cache, inputs_embeds=embeddings)
        logits = main.lm_head(states)[0]
    draft, params = load_draft(tmp_path, cfg, jnp.float32, method="mtp")
    f = Follower(draft, params, Target(load(tmp_path, dtype="f32").params, cfg))
    for n in (1, 4, 9):
        s = f.sequence(tokens[: n + 1], hidden[:n])
        f.absorb((s, 0, n))
        np.testing.assert_allclose(f.propose(s, count=1)[1][0, 0], logits[n - 1], atol=1e-4, rtol=1e-4)


PUBLISHED = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens",
             "mlp.experts.7.up_proj", "mlp.shared_experts.gate_proj")  # fmt: skip


def config(**layer) -> dict:
    return dict(
        speculators_model_type="mtp", num_nextn_predict_layers=1, transformer_layer_config=CONFIGS["qwen"] | layer,
        speculators_config=dict(algorithm="mtp", default_proposal_method="greedy",
                                proposal_methods=[dict(proposal_type="greedy", speculative_tokens=1)],
                                verifier=dict(name_or_path=None, architectures=["Qwen3ForCausalLM"])),
    )  # fmt: skip


def test_drafts_for_another_model_are_refused():
    cfg = parse_config(CONFIGS["qwen"])
    assert parse_draft(config(), cfg, "here") == Mtp(cfg, SPECULATORS)
    with refuses("hidden_size", CheckpointError):
        parse_draft(config(hidden_size=64), cfg, "here")
    with refuses("transformer_layer_config", CheckpointError):
        parse_draft(config(intermediate_size=64), cfg, "here")
    with refuses("verifier", CheckpointError):
        parse_draft(config(), parse_config(CONFIGS["glm"]), "here")
    with refuses(kind=UnsupportedError):
        Mtp(parse_config(CONFIGS["llama of two depths"]), QWEN)


def test_the_first_draft_is_that_of_speculators(tmp_path):
    core = pytest.importorskip("speculators.models.mtp.core", exc_type=ImportError)
    import torch
    from safetensors.torch import load_file
    from speculators.models.mtp.config import MTPSpeculatorConfig

    f = follower("qwen", SPECULATORS)
    save_draft(tmp_path / "draft", f.draft, f.params, config())
    theirs = core.MTPDraftModel(MTPSpeculatorConfig(**json.loads((tmp_path / "draft" / "config.json").read_text())))
    state = load_file(tmp_path / "draft" / "model.safetensors")
    state |= {name: torch.tensor(np.asarray(f.target.params[key])) for name, key in HELD.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and missing == ["verifier_lm_head.weight"]
    tokens, hidden = sequence_data(9, 0)
    with torch.no_grad():
        given = dict(input_ids=torch.tensor(tokens[None]), hidden_states=torch.tensor(hidden[None]).float())
        logits = theirs(**given)[0][0]
    for n in (1, 4, 8):
        s = f.sequence(tokens[: n + 1], hidden[:n])
        f.absorb((s, 0, n))
        np.testing.assert_allclose(f.propose(s, count=1)[1][0, 0], logits[0, n - 1], atol=1e-4, rtol=1e-4)


HELD = {"embed_tokens.weight": "embed", "lm_head.weight": "head"}
