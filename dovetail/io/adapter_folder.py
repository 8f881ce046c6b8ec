"""Read and check the folder of a LoRA adapter as PEFT writes it.

This module imports no jax, so that a server can check its adapters before it starts an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.core.errors import CheckpointError
from dovetail.io.hub import name_here
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tokenizer_files import read_templates

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# what an adapter may be asked to do besides, and we do not
REFUSED = ("layers_to_transform", "layer_replication", "trainable_token_indices")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json; raise CheckpointError for an adapter that cannot be used."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is not an adapter: expected {CONFIG} and {WEIGHTS} as PEFT writes them, found no {name}"
            )
    try:
        raw = json.loads((folder / CONFIG).read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"{folder / CONFIG} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder / CONFIG}: expected a JSON object, got {type(raw).__name__}")
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder} is an adapter of kind {raw.get('peft_type')}; LORA is the kind that can be used"
        )
    for name in REFUSED:
        if raw.get(name):
            raise CheckpointError(f"{folder}: {name}={raw[name]!r} is not supported; train the adapter without it")
    if raw.get("bias", "none") != "none" or raw.get("lora_bias"):
        raise CheckpointError(f"{folder}: it has biases, which are not supported; train the adapter with bias='none'")
    if raw.get("target_parameters") and raw.get("use_dora"):
        raise CheckpointError(
            f"{folder}: use_dora and target_parameters do not go together; train the adapter with one"
        )
    _check_numbers(folder, raw)
    return raw


def base_of(folder: str | Path) -> str | None:
    """Return the base model that an adapter names, for `hub.resolve`; None if `folder` is a model or no folder."""
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() or (path / "config.json").is_file():
        return None
    base = read_adapter_config(path).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise CheckpointError(
            f"{path} is a LoRA adapter whose {CONFIG} names no base_model_name_or_path: name its base yourself, such "
            f"as `dovetail serve BASE --lora-modules {path.resolve().name}={path}`"
        )
    return name_here(base)


def adapter_tokenizer(folder: str | Path, base: Tokenizer | None) -> Tokenizer | None:
    """Return the tokenizer that an adapter was trained with.

    It is the adapter's own, or the base model's with the chat template in the adapter's folder.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    templates = read_templates(folder)
    return base.with_templates(templates) if base and templates else base


def check_servable(folder: Path, most: int | None) -> None:
    """Raise CheckpointError for an adapter that an engine does not serve.

    What depends on the model (modules, shapes) is checked when the adapter is read.

    Args:
        folder: The adapter's folder.
        most: The maximum rank that the engine has room for; None for any.
    """
    raw = read_adapter_config(folder)
    SafetensorFolder(folder)  # reads the headers
    if raw.get("use_dora"):
        raise CheckpointError(
            f"{folder} is a DoRA adapter, which is not served: merge it into the model (`dovetail merge`)"
        )
    named = [*(raw.get("modules_to_save") or ()), *(raw.get("target_modules") or ())]
    if outer := sorted({name.rpartition(".")[2] for name in named} & {"embed_tokens", "lm_head"}):
        raise CheckpointError(
            f"{folder} is an adapter for {' and '.join(outer)} too, which is not served: merge it into the model "
            "(`dovetail merge`)"
        )
    rank = max(raw["r"], *(raw.get("rank_pattern") or {}).values(), 0)
    if most is not None and rank > most:
        raise CheckpointError(
            f"{folder}: the adapter's rank is {rank}, and there is room for {most}: raise max_lora_rank"
        )


def _check_numbers(folder: Path, raw: dict[str, Any]) -> None:
    for name, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
        value = raw.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{folder / CONFIG}: {name} must be a number above 0, got {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        values = raw.get(name) or {}
        if not isinstance(values, dict) or not all(isinstance(each, int | float) for each in values.values()):
            raise CheckpointError(f"{folder / CONFIG}: {name} must map names to numbers, got {values!r:.80}")
