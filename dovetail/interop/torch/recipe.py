"""Build the torch module that a recipe names, as a model that the training loop runs (models.external)."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import RecipeError, UserError
from dovetail.core.imported import ImportedFunction
from dovetail.core.spec import ParamSpec
from dovetail.core.training import TorchModel
from dovetail.core.types import Batch, Params
from dovetail.interop.torch.function import ModuleFunction, from_module
from dovetail.interop.torch.state import save_module
from dovetail.models.config import ModelConfig
from dovetail.models.external import ExternalModel, weight_spec

if TYPE_CHECKING:
    import torch

UNLIMITED = 1 << 30  # positions of a module that does not say


def torch_config(model: TorchModel) -> ModelConfig:
    """Return the config of the module that a recipe names. The module is built once per process.

    Raises:
        RecipeError: The function cannot be imported, or does not return a torch module that maps tokens to logits.
    """
    return _built(model.torch, json.dumps(dict(model.args), sort_keys=True))


@functools.lru_cache(maxsize=8)
def _built(location: str, args: str) -> ModelConfig:
    module = build_module(TorchModel(location, json.loads(args)))
    params, apply = from_module(module)
    tables = table_names(module)
    model = ExternalModel(
        weights={name: weight_spec(name, x.shape, name in tables) for name, x in params.items()},
        constants={name: weight_spec(name, x.shape, dtype=str(x.dtype)) for name, x in apply.buffers.items()},
        logits=functools.partial(_logits, apply, accepted(module)),
        load=lambda: {name: np.asarray(x) for name, x in {**params, **apply.buffers}.items()},
        save=functools.partial(save_module, module),
    )
    vocab = _vocab(model, params, apply.buffers, location)
    config = getattr(module, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or UNLIMITED
    source = json.dumps({"torch": location, "args": json.loads(args)}, sort_keys=True)
    return ModelConfig("torch", vocab, 0, (), longest, 0.0, external=model, source=source)


def build_module(model: TorchModel) -> torch.nn.Module:
    """Import and call the function that a recipe names.

    Raises:
        RecipeError: It cannot be imported, refuses its arguments, or does not return a torch module.
    """
    try:
        import torch
    except ImportError as error:
        raise RecipeError("a torch module requires torch: `pip install 'dovetail[torch]'`", param="model") from error
    try:
        module = ImportedFunction.parse(model.torch)(**model.args)
    except (UserError, TypeError) as error:
        raise RecipeError(f"model.torch={model.torch} cannot be built: {error}", param="model.torch") from error
    if not isinstance(module, torch.nn.Module):
        raise RecipeError(
            f"model.torch={model.torch} must return a torch.nn.Module, got {type(module).__name__}", param="model.torch"
        )
    return module


def table_names(module: torch.nn.Module) -> set[str]:
    """Return the names of weights that are looked up only: those of embeddings that are not tied to an output layer."""
    import torch

    found, multiplied = {}, set()
    for path, child in module.named_modules():
        for name, weight in child.named_parameters(path, recurse=False):
            if isinstance(child, torch.nn.Embedding):
                found[id(weight)] = name
            else:
                multiplied.add(id(weight))
    return {name for key, name in found.items() if key not in multiplied}


def accepted(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the arguments of the module's forward pass."""
    return frozenset(inspect.signature(module.forward).parameters)


def _logits(
    apply: ModuleFunction,
    takes: frozenset[str],
    params: Params,
    constants: Params,
    batch: Batch,
    key: jax.Array | None = None,
    packed: bool = True,
) -> jax.Array:
    """Run the module on token rows.

    In packed rows, a module that takes `attention_mask` and `position_ids`, as those of transformers do, sees the
    documents of a row apart. Any other sees the row as one text.
    """
    given: dict[str, Any] = {}
    if packed and "attention_mask" in takes:
        dtype = next(iter(params.values())).dtype
        given["attention_mask"] = document_mask(batch.segment_ids, dtype)
    if packed and "position_ids" in takes:
        given["position_ids"] = batch.positions
    if "use_cache" in takes:
        given["use_cache"] = False
    found, _ = apply.with_buffers(params, constants, batch.tokens, rng=key, **given)
    return logits_of(found)


def document_mask(segment_ids: jax.Array, dtype: Any) -> jax.Array:
    """Return [B, 1, T, T]: 0 where a token sees another, an earlier one of its document or itself, else very low."""
    T = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen = same & jnp.tril(jnp.ones((T, T), bool))
    return jnp.where(seen, 0.0, jnp.finfo(dtype).min).astype(dtype)[:, None]


def logits_of(found: Any) -> jax.Array:
    """Return the logits of what a module returned: an array, an object or a dict with `logits`, or a tuple."""
    if isinstance(found, Mapping):
        return found["logits"]
    found = getattr(found, "logits", found)
    return found[0] if isinstance(found, tuple | list) else found


def _vocab(model: ExternalModel, params: Params, constants: Params, location: str) -> int:
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    batch: Any = Batch(ids, ids, ids, ids, jax.ShapeDtypeStruct((1, 2), jnp.float32))  # pyright: ignore
    try:
        found: Any = jax.eval_shape(model.logits, params, constants, batch)
    except UserError:
        raise
    except Exception as error:  # a module's own, of any type
        found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if getattr(found, "ndim", 0) != 3 or found.shape[:2] != (1, 2):
        raise RecipeError(
            f"model.torch={location} must map tokens [B, T] to logits [B, T, V], got {getattr(found, 'shape', found)} "
            "for tokens of shape (1, 2)",
            param="model.torch",
        )
    return found.shape[-1]


def specs_of(module: torch.nn.Module) -> dict[str, ParamSpec]:
    """Declare the trainable weights of a module, for shardings and optimizers."""
    tables = table_names(module)
    named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    return {name: weight_spec(name, tuple(weight.shape), name in tables) for name, weight in named}
