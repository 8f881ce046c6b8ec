"""Train a drafter for speculative decoding: `dt.draft` and `dovetail draft`."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.compute import compute_of
from dovetail.core.errors import FileError
from dovetail.core.reporter import Reporter
from dovetail.core.spec import init
from dovetail.core.types import Params
from dovetail.data.example_rows import ExampleLoader
from dovetail.io.draft_folder import own_mtp, save_draft
from dovetail.io.load import load, whole_folder
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.draft.dflash import DFlash
from dovetail.models.draft.draft import DraftModel
from dovetail.models.draft.eagle3 import Eagle3
from dovetail.models.draft.mtp import Mtp
from dovetail.models.mtp import mtp_layer
from dovetail.train.external import model_config
from dovetail.train.launch import Ended
from dovetail.train.objective import Objective, whole
from dovetail.train.settings import check_causal
from dovetail.tune.draft.answers import answered
from dovetail.tune.draft.blocks import TrainedBlocks
from dovetail.tune.draft.chains import TrainedChains, TrainedMtp, check_chain
from dovetail.tune.draft.new import NewDraft, draft_config, new_draft, with_given
from dovetail.tune.draft.objective import DraftObjective, Trained
from dovetail.tune.draft.states import States, frozen_part
from dovetail.tune.draft_sections import DrafterSettings
from dovetail.tune.policy import head_of
from dovetail.tune.run import given_settings, tune_settings
from dovetail.tune.settings import Draft


def draft(
    recipe: str | Path | Draft | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    out: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Train a drafter for speculative decoding, on the model's own answers to prompts.

        dt.draft(model="smollm2-135m", data="prompts.jsonl", drafter={"kind": "dspark"}, out="drafter")

    Args:
        recipe: As in `dt.sft`; `model` is the model to draft for.
        data: Records with `messages` or a `prompt`.
        run_dir: As in `dt.sft`.
        out: A new or empty folder for the finished drafter; default: only the run's own export.
        show: Whether to print progress.
        **overrides: Recipe keys to change.

    Returns:
        The ended run; its metric `held_out_accepted_length` is the tokens per step on held-out prompts.

    Raises:
        RecipeError: A key is unknown or has a value that it cannot have.
        UserError: The data or the model cannot be used.
    """
    settings, records, folder = given_settings(Draft, recipe, data, run_dir, overrides)
    return draft_settings(settings, folder, out, records=records, reporter=Reporter(show))


def draft_settings(
    settings: Draft,
    folder: Path,
    out: str | Path = "",
    *,
    records: Sequence[Any] | None = None,
    reporter: Reporter | None = None,
    **how: Any,
) -> Ended:
    """Run the settings in `folder`; for `how` see train.launch."""
    if out and Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise FileError(f"{out} exists and is not an empty folder: choose another folder, or remove it", param="out")
    if settings.drafter.kind == "mtp":
        layer = mtp_layer(model_config(settings.model))
        check_chain(layer, settings.drafter.num_speculative_tokens, "drafter.num_speculative_tokens")
    reporter = reporter or Reporter()
    rows = functools.partial(answered, folder=folder, records=records, reporter=reporter)
    ended = tune_settings(
        settings, folder, draft_objective, records=rows, settle=with_model, reporter=reporter, **how
    )  # fmt: skip
    if out and ended.code == 0 and jax.process_index() == 0:
        with whole_folder(Path(out)) as beside:
            shutil.copytree(folder / "export" / f"step_{ended.step}", beside, dirs_exist_ok=True)
        reporter.line(f"the drafter is in {out}")
    return ended


def with_model(settings: Draft, rows: ExampleLoader) -> Draft:
    """Return the settings with the drafter's vocabulary, which the answers decide, and its model."""
    cfg = model_config(settings.model)
    count = settings.drafter.vocab_size
    ids = frequent_tokens(rows, count) if 0 < count < cfg.vocab else ()
    settings = dataclasses.replace(settings, vocab_ids=ids)
    return dataclasses.replace(settings, model_to_train=new_draft(_config(settings, cfg), cfg))


def _config(settings: Draft, cfg: ModelConfig) -> dict[str, Any]:
    return draft_config(settings.drafter, cfg, settings.weights, len(settings.vocab_ids))


def frequent_tokens(rows: ExampleLoader, count: int) -> tuple[int, ...]:
    """Return the most frequent trained tokens, and further ones of the lowest numbers up to `count`, ascending."""
    counts: Counter[int] = Counter()
    examples = rows.examples
    for document in range(len(examples)):
        size = int(examples.offsets[document + 1] - examples.offsets[document])
        counts.update(examples.read(document, 0, size)[examples.trained(document)].tolist())
    found = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:count]
    known, others = set(found), iter(range(rows.vocab_size))
    while len(found) < count:
        token = next(others)
        if token not in known:
            found.append(token)
    return tuple(sorted(found))


def draft_objective(settings: Draft) -> Objective:
    """Return the objective of a recipe that trains a drafter."""
    new, cfg = settings.model_to_train, model_config(settings.model)
    assert isinstance(new, NewDraft), "with_model fills it in"
    states = States(new.model.taps, settings.drafter.hidden_states == "live", settings.vocab_ids)
    one = DraftObjective(_trained(new.model, settings.drafter), settings.drafter, states)
    return Objective(
        one.measure,
        columns=states.columns(cfg),
        specs=lambda cfg: new.trained_spec(),
        held_out=one.held_out,
        frozen=frozen_part(settings),
        initial=functools.partial(_initial_mtp, settings=settings, new=new) if isinstance(new.model, Mtp) else _initial,
        export=functools.partial(_export, settings=settings, new=new),
        check=check_causal,
    )


def _trained(model: DraftModel, settings: DrafterSettings) -> Trained:
    if isinstance(model, DFlash):
        return TrainedBlocks(model)
    if isinstance(model, Mtp):
        return TrainedMtp(model, settings.num_speculative_tokens)
    assert isinstance(model, Eagle3)
    return TrainedChains(model, settings.num_speculative_tokens)


def _initial(ready: Any) -> Params:
    """Return the target's last norm, which has the scale that its head expects; the other weights are random."""
    abstract = ready.abstract_state.params["norm"]
    weight = ready.frozen["norm"] + ready.cfg.norm_offset  # a drafter's norm has no offset
    return {"norm": jax.device_put(jnp.array(weight, abstract.dtype, copy=True), abstract.sharding)}


def _initial_mtp(ready: Any, settings: Draft, new: NewDraft) -> Params:
    """Return the MTP layer of the target's checkpoint, or a random one with the target's last norm."""
    specs, dtype = new.trained_spec(), compute_of(settings.precision.params).dtype
    if (own := own_mtp(settings.weights, ready.cfg)) is not None:
        return own.read(dtype, ready.placement)
    shardings = ready.placement.shardings(specs)
    (layer,) = init(specs, jax.random.key(settings.seed), dtype, shardings=shardings)["mtp"]
    weight = jnp.array(ready.frozen["norm"], dtype, copy=True)
    return {"mtp": (layer | {"norm": jax.device_put(weight, shardings["mtp"][0]["norm"])},)}


def _export(
    folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any, *, settings: Draft,
    new: NewDraft,
) -> None:  # fmt: skip
    """Write the drafter in the format of `speculators`. All processes call it and the first writes."""
    host = jax.tree.map(lambda x: np.asarray(whole(x.astype(dtype))), params)
    if jax.process_index():
        return
    if new.given:
        target = load(settings.weights, dtype).params
        host = with_given(new, host, head_of(target, cfg), settings.vocab_ids)
        host = jax.tree.map(np.asarray, host)
    if folder.exists():
        shutil.rmtree(folder)
    save_draft(folder, new.model, host, _config(settings, cfg) | {"dtype": str(jnp.dtype(dtype))})
