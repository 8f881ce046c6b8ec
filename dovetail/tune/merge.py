"""An adapter written into the weights that it belongs to, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.compute import compute_of
from dovetail.core.errors import UserError
from dovetail.io.adapter_folder import adapter_tokenizer
from dovetail.io.hf import read_params
from dovetail.io.hub import Progress, resolve
from dovetail.io.load import open_checkpoint, save, stored_dtype
from dovetail.io.peft import read_adapter
from dovetail.models.lora import merge as merged
from dovetail.models.score import scored


def merge(
    model: str | Path, adapter: str | Path, to: str | Path, dtype: Any = None, progress: Progress | None = None
) -> Path:
    """The weights of `model` with the adapter in them, in the model's own dtype unless one is given. With an adapter of
    a reward model it becomes one.

    dt.merge("smollm2-135m", "runs/chat/export/step_200", "merged")
    """
    to = Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not an empty folder: choose another place or remove it")
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
    return to
