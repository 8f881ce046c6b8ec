"""Find the family of a config.json, and parse it into a ModelConfig."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import MissingFileError, UserError
from dovetail.core.recipe import SHIPPED
from dovetail.models import deepseek, gemma, gemma4, glm, gpt_oss, granite, llama, olmo, phi, qwen, siglip
from dovetail.models.attention import Attention
from dovetail.models.config import Layer, ModelConfig, is_scored, scored
from dovetail.models.family import Family, Fields, VisionFamily
from dovetail.models.towers import gemma3, gemma4_unified, qwen2_5_vl, qwen3_vl, smolvlm
from dovetail.models.towers import gemma4 as gemma4_vision
from dovetail.models.towers.vision import Vision

FAMILIES: dict[str, Family] = {
    model_type: family
    for module in (llama, qwen, gemma, gemma4, deepseek, olmo, gpt_oss, phi, granite, glm, siglip)
    for family in module.FAMILIES
    for model_type in family.model_types
}
VISION_FAMILIES: dict[str, VisionFamily] = {
    kind: family
    for module in (smolvlm, gemma3, gemma4_vision, gemma4_unified, qwen2_5_vl, qwen3_vl)
    for family in module.FAMILIES
    for kind in family.model_types
}


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return FAMILIES[config.family]


def vision_family_of(config: ModelConfig) -> VisionFamily | None:
    """Return the family of a model that sees images; None for a text model."""
    return VISION_FAMILIES[config.to_hf()["model_type"]] if config.vision else None


def parse_config(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Parse the contents of a config.json.

    Of a model with images (or sound) whose outer `model_type` is not in VISION_FAMILIES, the text model is read.
    """
    return _first_equal(_parsed(hf, where))


@functools.lru_cache(maxsize=64)
def _first_equal(cfg: ModelConfig) -> ModelConfig:
    """Return the config that was parsed first of those equal to it: caches tell one object apart without its layers."""
    return cfg


def _parsed(hf: dict[str, Any], where: str) -> ModelConfig:
    if not isinstance(hf, dict):
        raise UserError(f"{where}: a config is a JSON object; this is a {type(hf).__name__}")
    hf = _without_quantization(hf)
    if hf.get("model_type") == "siglip":  # its text_config is not a language model's
        return siglip.parse_siglip(Fields(hf, where))
    vision = VISION_FAMILIES.get(str(hf.get("model_type"))) if isinstance(hf.get("vision_config"), dict) else None
    inner = hf.get("text_config") or (hf if vision and vision.flat else None)
    if not isinstance(inner, dict):
        return _parse_text(hf, where)
    shared = ("tie_word_embeddings", "eos_token_id", "bos_token_id")
    outer = {k: hf[k] for k in shared if k in hf}
    if vision is None or is_scored(hf, where):
        scored_as = {"architectures": hf["architectures"]} if is_scored(hf, where) else {}
        return _parse_text({**outer, **inner, **scored_as}, where)
    tied = {k: v for k, v in outer.items() if k == "tie_word_embeddings"}  # of the two, transformers reads the outer
    text = _parse_text(vision.as_text({**outer, **inner, **tied}), where, vision.read_text)
    return _with_vision(text, vision, {"architectures": [vision.architecture], **hf}, where)


def _without_quantization(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config without `quantization_config`: how weights are stored is read with them (io.quant_config)."""
    inner = {k: _without_quantization(v) for k, v in hf.items() if k == "text_config" and isinstance(v, dict)}
    return {k: v for k, v in hf.items() if k != "quantization_config"} | inner


def _with_vision(text: ModelConfig, family: VisionFamily, hf: dict[str, Any], where: str) -> ModelConfig:
    """Return the text model with its tower, which `hf` describes."""
    outer, own = Fields(hf, where), Fields(hf["vision_config"], f"{where}: vision_config")
    outer.skip("text_config", "vision_config", "tie_word_embeddings")
    vision = family.parse(outer, own, text)
    outer.done()
    own.done()
    layers = (_seeing(layer, vision) for layer in text.layers)
    hf |= {key: None for key in family.dropped if key in hf}
    return replace(text, layers=tuple(layers), vision=vision, source=json.dumps(hf, sort_keys=True))


def _seeing(layer: Layer, vision: Vision) -> Layer:
    """Return the layer with its mask and its positions for images."""
    if not (isinstance(layer.attn, Attention) and layer.attn.rope):
        return layer
    rope = replace(layer.attn.rope, axes=vision.mrope)
    return replace(layer, attn=replace(layer.attn, block_mask=vision.masks(layer.attn.window), rope=rope))


def _parse_text(hf: dict[str, Any], where: str, read: Callable[[Fields], None] | None = None) -> ModelConfig:
    """Parse the config of a text model; `read` reads fields that its family does not know."""
    scores = is_scored(hf, where)
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        close = difflib.get_close_matches(str(kind), FAMILIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"{where}: the architecture {kind!r} is not supported.{hint} Supported: {', '.join(sorted(FAMILIES))}. "
            'Others run as PyTorch modules: `backend="torch"`, in a command `--backend torch` (docs/torch.md)',
            param="model_type",
        )
    family = FAMILIES[kind]
    hf = {**hf, "architectures": [family.architecture]}
    fields = Fields(hf, where)
    if read is not None:
        read(fields)
    cfg = family.parse(fields)
    return scored(cfg) if scores else cfg


def read_config(path: str | Path) -> ModelConfig:
    """Read a config.json file, or that of a folder."""
    path = Path(path)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"{path} is a LoRA adapter, not a model: merge it into its base (`dovetail merge BASE {path} OUT`), or "
            f"train it further with model=BASE and from_adapter={path}"
        )
    path = path / "config.json" if path.is_dir() else path
    return parse_config(read_json(path), str(path))


def read_json(path: Path) -> Any:
    """Return the contents of a config.json."""
    if not path.exists():
        raise MissingFileError(f"{path} does not exist: a model folder needs a config.json")
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not even text
        raise UserError(f"{path} is not valid JSON: {error}") from error


def shipped_models() -> tuple[str, ...]:
    """Return the names of the shipped architectures that have a recipe."""
    return tuple(sorted(path.stem for path in (SHIPPED / "models").glob("*.json")))


def shipped_shapes() -> tuple[str, ...]:
    """Return the names of the shipped architectures without a recipe: large models to plan with (`dovetail plan`)."""
    return tuple(sorted(path.stem for path in (SHIPPED / "shapes").glob("*.json")))


def read_model(name_or_path: str) -> ModelConfig:
    """Return the model that a recipe names: a shipped architecture, a config.json, or a folder with one."""
    for folder, names in (("models", shipped_models()), ("shapes", shipped_shapes())):
        if name_or_path in names:
            return read_config(SHIPPED / folder / f"{name_or_path}.json")
    path = Path(name_or_path).expanduser()
    if not path.exists():
        known = (*shipped_models(), *shipped_shapes())
        raise UserError(
            f"model {name_or_path!r} is neither shipped nor a folder with a config.json."
            f"{did_you_mean(name_or_path, known)} Shipped: {', '.join(known)}",
            param="model",
        )
    return read_config(path)
