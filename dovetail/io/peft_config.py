"""Read and write adapter_config.json: PEFT's settings of a LoRA adapter, and its rules for single weights by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.errors import CheckpointError
from dovetail.core.files import write_atomic
from dovetail.io.adapter_folder import CONFIG, read_adapter_config
from dovetail.models.lora import ALL, OUTER, Lora

LAYER = re.compile(r"^model\.layers\.\d+\.")


@dataclass(frozen=True)
class AdapterConfig:
    """Hold the settings of an adapter and the contents of its file."""

    folder: Path
    lora: Lora
    raw: dict[str, Any]  # adapter_config.json

    def is_parameter(self, name: str) -> bool:
        """Return whether `target_parameters` names it."""
        return any(_ends(name, target) for target in self.raw.get("target_parameters") or ())

    def check_parameters(self, known: Iterable[str]) -> None:
        """Raise CheckpointError unless each of `target_parameters` is known.

        PEFT nests what it adapts in one module, so that one more would change the names of the others.
        """
        known = list(known)
        for target in self.raw.get("target_parameters") or ():
            if not any(_ends(name, target) for name in known):
                raise CheckpointError(
                    f"{self.folder}: target_parameters names {target}, and this model has no projection that is called "
                    "so and can be adapted; train the adapter without it"
                )

    def gain(self, name: str, down: int, up: int) -> float:
        """Return the scale of one weight's update with these ranks, relative to the adapter's."""
        wanted = _pattern(self.raw.get("rank_pattern"), name, self.lora.r)
        if not down == up == wanted:
            raise CheckpointError(f"{self.folder}: {name} has ranks {down} and {up} and its config says {wanted}")
        alpha = _pattern(self.raw.get("alpha_pattern"), name, self.lora.lora_alpha)
        return alpha / (math.sqrt(down) if self.lora.use_rslora else down) / self.lora.scale


def read_config(folder: Path) -> AdapterConfig:
    """Return the settings of the adapter in a folder."""
    raw = read_adapter_config(folder)
    targets = raw.get("target_modules") or [ALL]
    targets = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    lora = Lora(
        raw["r"], float(raw["lora_alpha"]), targets, float(raw.get("lora_dropout") or 0),
        bool(raw.get("use_rslora")), bool(raw.get("use_dora")),
        tuple(name for name in OUTER.values() if any(_ends(each, name) for each in raw.get("modules_to_save") or ())),
    )  # fmt: skip
    return AdapterConfig(folder, lora, raw)


def write_config(
    folder: Path, lora: Lora, base: str, ranks: dict[str, int], parameters: dict[str, int], known: Iterable[str],
    saved: list[str], tied: bool, whole: bool = False,
) -> None:  # fmt: skip
    """Write adapter_config.json.

    Args:
        folder: The adapter's folder.
        lora: The adapter's settings.
        base: The name of the base model.
        ranks: The ranks of modules by name.
        parameters: The ranks of parameters by name.
        known: All parameters of the model, adapted or not.
        saved: Modules that are written whole.
        tied: Whether embeddings and head stay one weight.
        whole: Whether modules are named in full: the last parts of names may be those of a vision tower too.
    """
    odd = _by_end({name: rank for name, rank in (ranks | parameters).items() if rank != lora.r})
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if "score" in saved else "CAUSAL_LM",
        "base_model_name_or_path": base, "r": lora.r, "lora_alpha": lora.lora_alpha,
        # PEFT has no dropout for parameters, and in an adapter that is trained already it does nothing
        "lora_dropout": 0.0 if parameters else lora.lora_dropout,
        "target_modules": sorted({module if whole else module.rpartition(".")[2] for module in ranks}), "bias": "none",
        "use_rslora": lora.use_rslora, "use_dora": lora.use_dora, "rank_pattern": odd,
        "alpha_pattern": {m: lora.scale * (math.sqrt(rank) if lora.use_rslora else rank) for m, rank in odd.items()},
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    if parameters:
        config["target_parameters"] = list(_by_end({name: name in parameters for name in known}, only=True))
    if saved:
        config["modules_to_save"] = saved
    if tied:
        config["ensure_weight_tying"] = True
    write_atomic(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _by_end(values: dict[str, Any], only: Any = None) -> dict[str, Any]:
    """Return the values with one key, without the layer's number, for what is the same in all layers.

    `only` filters values.
    """
    ends: dict[str, set[Any]] = {}
    for name, value in values.items():
        ends.setdefault(LAYER.sub("", name), set()).add(value)
    short = {end if len(ends[end := LAYER.sub("", name)]) == 1 else name: value for name, value in values.items()}
    return {name: value for name, value in short.items() if only is None or value == only}


def _ends(name: str, target: str) -> bool:
    """Apply PEFT's rule for `target_parameters`."""
    return name == target or name.endswith(f".{target}")


def _pattern(patterns: dict[str, Any] | None, name: str, otherwise: Any) -> Any:
    """Apply PEFT's rule for patterns: a key is a pattern of the end of a name."""
    found = [value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)]
    return found[0] if found else otherwise
