"""Draft models that propose chains: the engine's draft tokens are those after reading each sequence in one call."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from draft_cases import Follower, computed, random_params
from engine.engines import GREEDY, OPTIONS, mixed_prompts, variant
from engine.test_draft_models import DRAFTS, draft_folder, drafting, target_folder
from engine.test_speculation import same
from tune.small_models import CONFIG

from dovetail.engine.llm import LLM
from dovetail.io.draft_folder import load_draft, open_draft, save_draft
from dovetail.io.load import load, save
from dovetail.models.draft.registry import parse_draft
from dovetail.models.mtp import with_mtp
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

PROMPTS = mixed_prompts(9, least=6, most=12)  # more tokens than a step takes: some come in two parts
MODEL = CONFIG | dict(num_hidden_layers=5, vocab_size=160)
EAGLE3 = dict(
    speculators_model_type="eagle3", draft_vocab_size=40, transformer_layer_config=MODEL | dict(num_hidden_layers=1)
)


def folders(place, kind: str) -> tuple[str, dict]:
    """Return a target, and the speculative config of a kind of draft model for it."""
    if kind == "assistant":
        return target_folder(kind, place), dict(model=draft_folder(kind, place))
    cfg = parse_config(MODEL | dict(num_nextn_predict_layers=2 if kind == "mtp of two depths" else 1))
    save(place / "model", cfg, random_params(with_mtp(spec(cfg), cfg), seed=1), None)
    if kind != "eagle3":
        return str(place / "model"), dict(method="mtp")
    draft = parse_draft(EAGLE3, cfg, "here")
    params = random_params(draft.spec(), seed=2) | {"d2t": jnp.arange(40, dtype=jnp.int32) // 2}
    save_draft(place / "draft", draft, params, EAGLE3)
    return str(place / "model"), dict(model=str(place / "draft"))


def recorded(draft, found: list):
    """Return the draft model as one that appends (newest token, its position, draft tokens) of each row to `found`."""

    def note(tokens, kv_lens, num_seqs, drafted):
        found.extend((int(tokens[i]), int(kv_lens[i]) - 1, drafted[:, i].tolist()) for i in range(num_seqs[0]))

    class Recorded(type(draft)):
        def draft(self, call, carried, count, pick):
            drafted, cache = super().draft(call, carried, count, pick)
            jax.debug.callback(note, call.tokens, call.ctx.kv_lens, call.ctx.num_seqs, drafted)
            return drafted, cache

    return Recorded(**{field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp of two depths", "assistant"])
def test_draft_tokens_are_those_of_one_call(kind, tmp_path, monkeypatch):
    found, model, config = [], *folders(tmp_path, kind)

    def open_recorded(*given):
        opened = open_draft(*given)
        return dataclasses.replace(opened, draft=recorded(opened.draft, found))

    monkeypatch.setattr("dovetail.engine.spec.draft_weights.open_draft", open_recorded)
    llm = LLM(model, **OPTIONS, dtype="f32", speculative_config=config | dict(num_speculative_tokens=DRAFTS))
    llm.runner.steps.all([llm.runner.buckets.verify(rows, DRAFTS) for rows in (1, 2, 4, 8)])
    expected = variant(llm).generate(PROMPTS, GREEDY)
    engine = drafting(llm)
    for _ in range(2):  # the second time, with prefix hits
        same(expected, engine.generate(PROMPTS, GREEDY))
    jax.effects_barrier()
    sequences = [[*prompt, *out.outputs[0].token_ids] for prompt, out in zip(PROMPTS, expected, strict=True)]
    wanted = drafts_in_one_call(model, config, sequences)
    own = [row for row in found if row[:2] in wanted]
    assert len(own) > 50
    wrong = [row for row in own if not any(row[2][: len(drafts)] == drafts for drafts in wanted[row[:2]])]
    assert not wrong, (len(wrong), len(own), wrong[:5])


def drafts_in_one_call(model: str, config: dict, sequences: list[list[int]]) -> dict[tuple[int, int], list[list[int]]]:
    """Return the draft tokens after each token at each position of sequences whose tokens are absorbed in one call."""
    target = load(model, dtype="f32")
    draft, params = load_draft(config.get("model", model), target.config, jnp.float32, method=config.get("method"))
    wanted: dict[tuple[int, int], list[list[int]]] = {}
    for tokens in sequences:
        model, seen, pages = computed(target.params, target.config, tokens, draft.taps)
        follower = Follower(draft, params, model)
        for n in range(1, len(tokens)):
            s = follower.sequence(tokens[: n + 1], seen[:n], shared=pages)
            follower.absorb((s, 0, n))
            drafted = follower.propose(s, count=DRAFTS)[0][:, 0].tolist()
            # the engine gives a row no pages past its last token, and does not verify draft tokens there
            wanted.setdefault((tokens[n], n), []).append(drafted[: len(tokens) - 1 - n])
    return wanted
