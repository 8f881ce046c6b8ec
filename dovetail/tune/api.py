"""Public functions of fine-tuning: `dt.sft`, `dt.dpo`, `dt.reward`, `dt.distill` and `dt.merge`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.compute import compute_of
from dovetail.core.errors import FileError
from dovetail.core.reporter import Progress
from dovetail.io.adapter_folder import adapter_tokenizer
from dovetail.io.hf import read_params
from dovetail.io.hub import resolve
from dovetail.io.images.processor import copy_processor
from dovetail.io.load import open_checkpoint, save, stored_dtype
from dovetail.io.peft import read_adapter
from dovetail.models.config import scored
from dovetail.models.lora import merge as merged
from dovetail.train.launch import Ended
from dovetail.train.objective import Objective
from dovetail.tune.distill import distill_objective
from dovetail.tune.preference import dpo_objective
from dovetail.tune.reward import reward_objective
from dovetail.tune.run import tune
from dovetail.tune.settings import Distill, Dpo, Reward, Sft
from dovetail.tune.sft import sft_objective

# By the name of the command: settings -> the objective of a training step.
OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "sft": sft_objective, "dpo": dpo_objective, "reward": reward_objective, "distill": distill_objective,
}  # fmt: skip


def sft(
    recipe: str | Path | Sft | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Fine-tune a model on conversations, or on prompts with completions.

        dt.sft(model="smollm2-135m", data="chats.jsonl", lora={"r": 16}, steps=200, run_dir="runs/chat")
        dt.sft(model="smollm2-135m", data=[{"messages": [...]}, ...], steps=200)

    Args:
        recipe: A YAML file, the name of a shipped recipe, or settings. Without one, `model` must be given.
        data: A file, a folder, a list of records, or the keys of a recipe's `data` section as a dict.
        run_dir: The folder of the run; a run that is already there continues. Default: below the working folder.
        show: Whether to print progress.
        **overrides: Recipe keys to change, such as `steps=200` or `optimizer={"lr": 1e-4}`.

    Returns:
        The ended run: its folder, its last step and its metrics.

    Raises:
        RecipeError: A key is unknown or has a value that it cannot have.
        UserError: The data or the model cannot be used.
    """
    return tune(Sft, sft_objective, recipe, data, run_dir, show=show, overrides=overrides)


def dpo(
    recipe: str | Path | Dpo | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Train a model on preferences, with DPO or a related loss.

        dt.dpo(model="smollm2-135m", data="pairs.jsonl", lora={"r": 16}, preference={"beta": 0.1}, steps=200)

    Args:
        recipe: As in `dt.sft`.
        data: Records with `prompt`, `chosen` and `rejected`; for `preference.loss_type=kto`, with `prompt`,
            `completion` and `label`.
        run_dir: As in `dt.sft`.
        show: Whether to print progress.
        **overrides: Recipe keys to change.

    Returns:
        The ended run.

    Raises:
        RecipeError: A key is unknown or has a value that it cannot have.
        UserError: The data or the model cannot be used.
    """
    return tune(Dpo, dpo_objective, recipe, data, run_dir, show=show, overrides=overrides)


def reward(
    recipe: str | Path | Reward | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Train a reward model, which gives a score to an answer, on pairs of answers.

        dt.reward(model="smollm2-135m", data="pairs.jsonl", epochs=1, run_dir="runs/judge")
        dt.LLM("runs/judge/export/step_120").score([[{"role": "user", ...}, {"role": "assistant", ...}], ...])

    Args:
        recipe: As in `dt.sft`.
        data: Records with `prompt`, `chosen` and `rejected`.
        run_dir: As in `dt.sft`.
        show: Whether to print progress.
        **overrides: Recipe keys to change.

    Returns:
        The ended run.

    Raises:
        RecipeError: A key is unknown or has a value that it cannot have.
        UserError: The data or the model cannot be used.
    """
    return tune(Reward, reward_objective, recipe, data, run_dir, show=show, overrides=overrides)


def distill(
    recipe: str | Path | Distill | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Train a student model on the token distributions of a teacher model.

        dt.distill(model="student", teacher="teacher", data="chats.jsonl", distillation={"alpha": 0.9}, steps=200)

    Args:
        recipe: As in `dt.sft`.
        data: As in `dt.sft`.
        run_dir: As in `dt.sft`.
        show: Whether to print progress.
        **overrides: Recipe keys to change.

    Returns:
        The ended run.

    Raises:
        RecipeError: A key is unknown or has a value that it cannot have.
        UserError: The data, the student or the teacher cannot be used.
    """
    return tune(Distill, distill_objective, recipe, data, run_dir, show=show, overrides=overrides)


def merge(
    model: str | Path, adapter: str | Path, to: str | Path, dtype: Any = None, progress: Progress | None = None
) -> Path:
    """Write a model with an adapter merged into its weights, as a Hugging Face folder.

    The adapter of a reward model makes the result a reward model.

        dt.merge("smollm2-135m", "runs/chat/export/step_200", "merged")

    Args:
        model: The adapter's base model: a folder, a name or a hub id.
        adapter: A folder in PEFT's format.
        to: A new or empty folder.
        dtype: bf16, f32 or f16; default: the model's own.
        progress: Called with (name, bytes read, bytes in all) while weights are read.

    Returns:
        The folder `to`.

    Raises:
        FileError: `to` exists and is not an empty folder.
        CheckpointError: The adapter does not belong to the model.
    """
    to = Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileError(f"{to} exists and is not an empty folder: choose another folder, or remove it", param="to")
    path = resolve(model, progress)
    source, cfg, tokenizer = open_checkpoint(path)
    lora, adapters = read_adapter(adapter, cfg, score=True)
    kept = stored_dtype(source, cfg, str(path)) if dtype is None else compute_of(dtype).dtype
    with jax.default_device(jax.devices("cpu")[0]):
        params = read_params(source, cfg, kept, str(path), progress=progress)
        if "score" in adapters:
            cfg, params = scored(cfg), {name: part for name, part in params.items() if name not in ("head", "score")}
            params["score"] = jnp.asarray(adapters.pop("score"), kept)
        whole = merged(params, jax.tree.map(jnp.asarray, adapters), cfg, lora)
    save(to, cfg, whole, adapter_tokenizer(adapter, tokenizer))
    copy_processor(path, to)
    return to
