"""Define which weights a fine-tuning trains: all weights of the model, or adapters on frozen weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.choice import require
from dovetail.core.compute import compute_of
from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import Placement
from dovetail.core.spec import init, is_spec, leaves
from dovetail.core.training import TorchModel
from dovetail.core.types import Column, Params
from dovetail.io.hub import name_for_others, resolve
from dovetail.io.images.processor import copy_processor
from dovetail.io.load import config_of, find_processor, open_checkpoint
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.formats import rounded_formats
from dovetail.models.frozen import abstract_frozen
from dovetail.models.lora import OUTER, Lora, attach, input_dims, lora_spec, outer_names, saved_names
from dovetail.models.spec import spec
from dovetail.ops.adapter import row_norms
from dovetail.ops.quant.weight import is_quantized
from dovetail.train.external import external_frozen, model_config
from dovetail.train.images import image_columns
from dovetail.train.objective import Frozen, StepContext, export, whole
from dovetail.train.settings import check_causal
from dovetail.tune.sections import check_teacher
from dovetail.tune.settings import Tuning

S = TypeVar("S", bound=Tuning)

Model = Callable[[Params, StepContext], Params]  # (trained weights, step context) -> the model's weights


@dataclass(frozen=True)
class Policy:
    """The trained model, for an objective; the fields are those of train.objective.Objective."""

    specs: Callable[[ModelConfig], Any]
    params: Model
    frozen: Frozen | None = None
    initial: Callable[..., Params] | None = None
    export: Callable[..., None] = export
    trains_head: bool = True
    check: Callable[[ModelConfig], None] = check_causal
    beside: Callable[[ModelConfig, int | None], dict[str, int]] = lambda cfg, hbm: {}


def policy_of(settings: Tuning) -> Policy:
    """Return the policy of a recipe: with `lora`, adapters on frozen weights."""
    lora, check = settings.lora, functools.partial(check_model, settings)
    if lora is None:
        return Policy(
            spec, lambda params, ctx: params, export=functools.partial(_export, weights=settings.weights), check=check
        )
    return Policy(
        specs=functools.partial(lora_spec, lora=lora),
        params=lambda params, ctx: attach(ctx.frozen, params, lora, ctx.key),
        frozen=frozen_model(settings.weights, settings.held, settings.precision.compute),
        initial=functools.partial(_initial, settings=settings) if _begins(settings) else None,
        export=functools.partial(_export_adapter, lora=lora, base=name_for_others(settings.weights)),
        trains_head=_trains_head(settings),
        check=check,
        beside=functools.partial(beside_adapters, settings),
    )


def columns_of_images(settings: Tuning) -> dict[str, Column]:
    """Return the columns of batches with images; none if the data has no images."""
    return image_columns(model_config(settings.model).vision, settings.image_patches) if settings.image_patches else {}


def check_model(settings: Tuning, cfg: ModelConfig) -> None:
    """Refuse a model that cannot be trained with these settings, and a teacher that does not fit it."""
    if not settings.scores:
        check_causal(cfg)
    if settings.lora:
        lora_spec(cfg, settings.lora)
    if teacher_cfg := getattr(settings, "teacher_cfg", None):
        check_teacher(cfg, teacher_cfg)


def beside_adapters(settings: Tuning, cfg: ModelConfig, hbm: int | None = None) -> dict[str, int]:
    """Return further bytes per device: an adapted embedding or head is added to its base, with a gradient."""
    names = outer_names(cfg, settings.lora) if settings.lora else []
    itemsize = compute_of(settings.precision.compute).dtype.itemsize
    return {f"{OUTER[name]} with its adapter": cfg.vocab * cfg.dim * (itemsize + 4) for name in names}


def with_teacher_cfg(settings: S) -> S:
    """Return the settings with the config of their teacher, if they have one."""
    teacher = getattr(settings, "teacher", "")
    if not teacher:
        return settings
    if settings.image_patches:
        _check_teacher_images(settings.weights, teacher)
    return dataclasses.replace(settings, teacher_cfg=model_config(teacher))


def _check_teacher_images(student: str, teacher: str | TorchModel) -> None:
    """Refuse a teacher that does not take images as the student does: both are given the same patches and tokens."""
    require(isinstance(teacher, str), "teacher must not be a torch module for data with images", param="teacher")
    assert isinstance(teacher, str)
    own, theirs = (config_of(name).vision for name in (student, teacher))
    shapes = {(each.tower.patch_dim, each.tower.patches_per_feature) if each else None for each in (own, theirs)}
    tokenizers = (open_checkpoint(resolve(name))[2] for name in (student, teacher))
    given = [t and find_processor(name, t) for name, t in zip((student, teacher), tokenizers, strict=True)]
    require(
        theirs is not None and len(shapes) == 1 and given[0] == given[1],
        f"teacher must take images as the student does, and {teacher} "
        f"{'has another processor' if theirs else 'takes none'}: choose a teacher of the same family with the same "
        "preprocessor_config.json",
        param="teacher",
    )


def _begins(settings: Tuning) -> bool:
    """Return whether adapters start from a folder, or with values of the base weights."""
    lora = settings.lora
    return lora is not None and bool(settings.from_adapter or lora.use_dora or lora.modules_to_save)


def _trains_head(settings: Tuning) -> bool:
    lora, cfg = settings.lora, model_config(settings.model)
    assert lora is not None
    return ("embed" if cfg.tied else "head") in (*outer_names(cfg, lora), *saved_names(cfg, lora))


def kept_model(policy: Policy) -> Model:
    """Return the model of the training state's reference (`StepContext.reference`), without dropout."""

    def model(params: Params, ctx: StepContext) -> Params:
        assert ctx.reference is not None, "settings.step_models.reference is set"
        return policy.params(ctx.reference, dataclasses.replace(ctx, key=None))

    return model


def frozen_model(weights: str | TorchModel, held: str, compute: str) -> Frozen:
    """Return the frozen weights of a model, in a storage format of models.frozen.HELD; of a torch module, unpacked."""
    dtype = compute_of(held if held in ("bf16", "f32") else compute).dtype
    if isinstance(weights, TorchModel):
        return external_frozen(model_config(weights), dtype)

    def load(cfg: ModelConfig, placement: Placement) -> Params:
        from dovetail.io.hf import read_params

        path = resolve(weights)
        source, _, _ = open_checkpoint(path)
        return read_params(source, cfg, dtype, str(path), placement, formats=rounded_formats(spec(cfg), held))

    return Frozen(lambda cfg, placement: abstract_frozen(cfg, held, dtype, placement), load)


def _initial(ready: Any, settings: Tuning, base: Callable[[Any], Params] = lambda ready: ready.frozen) -> Params:
    """Return initial values of adapters: those of a folder, or new ones with the base's row norms as magnitudes.

    Other trained weights are initialised in train.state. `base` returns the base weights, where there are further
    frozen weights.
    """
    lora, dtype = settings.lora, compute_of(settings.precision.params).dtype
    assert lora is not None
    if settings.from_adapter:
        given = _read_adapter(settings.from_adapter, ready.cfg, lora)
        abstract = {name: ready.abstract_state.params[name] for name in given}
        return jax.tree.map(lambda x, leaf: jax.device_put(np.asarray(x, leaf.dtype), leaf.sharding), given, abstract)
    saved = saved_names(ready.cfg, lora)
    adapters = {name: ready.specs[name] for name in lora_spec(ready.cfg, lora) if name not in saved}
    places = {name: jax.tree.map(lambda leaf: leaf.sharding, ready.abstract_state.params[name]) for name in adapters}
    new = init(adapters, jax.random.key(settings.seed), dtype, shardings=places)
    adapted = _projections(ready, base(ready)) if lora.use_dora else []
    norms = {path: row_norms(w.dense() if is_quantized(w) else w, dims) for path, w, dims in adapted}
    whole = {name: _copied(base(ready)[name], ready.abstract_state.params[name]) for name in saved}

    def one(path: tuple, x: jax.Array) -> jax.Array:
        *above, last = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        return jax.device_put(norms[".".join(above)], x.sharding) if last == "magnitude" else x

    return jax.tree_util.tree_map_with_path(one, new) | whole


def _copied(weight: jax.Array, abstract: Any) -> jax.Array:
    """Return a copy with the abstract array's dtype and sharding: a step donates its buffers."""
    return jax.device_put(jnp.array(weight, abstract.dtype, copy=True), abstract.sharding)


def _projections(ready: Any, base: Params) -> list[tuple[str, Any, int]]:
    """Return (path, the base's weight, its input dims) of each weight with an adapter."""
    specs, found = dict(leaves(spec(ready.cfg))), []
    ends = [path.rpartition(".") for path, _ in leaves(ready.specs)]
    adapted = {above for above, _, last in ends if last == "lora_a"}
    for path in sorted(adapted):
        weight: Any = base
        for name in path.split("."):
            weight = weight[int(name) if isinstance(weight, tuple) else name]
        found.append((path, weight, input_dims(specs[path])))
    return found


def _read_adapter(folder: str, cfg: ModelConfig, lora: Lora) -> Params:
    """Return the adapter of a folder; refuse one that does not match the settings."""
    from dovetail.io.peft import read_adapter

    theirs, tree = read_adapter(folder, cfg, score=cfg.scored)
    for what in ("r", "use_dora"):
        if getattr(theirs, what) != getattr(lora, what):
            raise CheckpointError(
                f"lora.{what} must be {getattr(theirs, what)}, as in from_adapter={folder}; got {getattr(lora, what)}",
                param=f"lora.{what}",
            )
    adapters, wanted = {name: part for name, part in tree.items() if name != "score"}, lora_spec(cfg, lora)
    if jax.tree.structure(wanted, is_leaf=is_spec) != jax.tree.structure(adapters):
        raise CheckpointError(
            f"from_adapter={folder} adapts other weights than lora.target_modules and modules_to_save: set them to "
            f"[{', '.join(theirs.target_modules)}] and [{', '.join(theirs.modules_to_save)}]",
            param="lora.target_modules",
        )
    for (path, leaf), x in zip(leaves(wanted), jax.tree.leaves(adapters), strict=True):
        if x.shape != leaf.shape:
            raise CheckpointError(
                f"{path} must have shape {list(leaf.shape)}, got {list(x.shape)} in from_adapter={folder}: use an "
                f"adapter with r={lora.r} everywhere",
                param="from_adapter",
            )
    scale = theirs.scale / lora.scale  # the same update at another alpha
    return jax.tree_util.tree_map_with_path(lambda path, x: x * scale if path[-1].key == "lora_b" else x, tree)


def _export(
    folder: Path,
    cfg: ModelConfig,
    params: Params,
    tokenizer: Tokenizer | None,
    dtype: Any,
    *,
    weights: str,
    scheme: str = "",
) -> None:
    """Write all weights, beside the image processor of the model that they were trained from."""
    export(folder, cfg, params, tokenizer, dtype, scheme)
    if cfg.vision and jax.process_index() == 0:
        copy_processor(resolve(weights), folder)


def _export_adapter(
    folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any, *, lora: Lora, base: str
) -> None:
    """Write adapters in PEFT's format, in f32."""
    from dovetail.io.peft import save_adapter

    host = jax.tree.map(lambda x: np.asarray(whole(x.astype(jnp.float32))), params)
    if jax.process_index() == 0:
        save_adapter(folder, cfg, host, lora, base)
        if tokenizer:
            tokenizer.save(folder)


def head_of(params: Params, cfg: ModelConfig) -> Any:
    """Return the output head [vocab, D]."""
    return params["embed"] if cfg.tied else params["head"]


def unembed_of(cfg: ModelConfig, ctx: StepContext) -> dict[str, Any]:
    """Return the keywords of ops.token_loss that describe the unembedding."""
    return dict(scale=cfg.logit_scale, softcap=cfg.logit_softcap, dtype=ctx.logits, placement=ctx.placement)
