"""`dt.quantize`: quantise a model on texts, layer by layer, and write it as compressed-tensors.

Each layer is run on the outputs of the quantised layers before it, so that it makes up for their errors. Only the
hidden states of the texts and one layer's sums of inputs are held besides the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.choice import one_of
from dovetail.core.compute import Compute
from dovetail.core.errors import FileError, UserError
from dovetail.core.formats import ROUNDED, Format
from dovetail.core.reporter import Progress
from dovetail.core.spec import ParamSpec, is_spec, path_name
from dovetail.core.types import Packed, Params
from dovetail.io.compressed_tensors import WRITTEN
from dovetail.io.hub import resolve
from dovetail.io.load import Model, load, open_checkpoint, save, stored_dtype
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import embed, trunk
from dovetail.models.formats import rounded_formats
from dovetail.models.spec import spec
from dovetail.ops.loss import cross_entropy
from dovetail.ops.quant.weight import is_quantized, quantized, rounded
from dovetail.tune.quantize.inputs import Grams, check_layers, observe, outputs
from dovetail.tune.quantize.rounding import Rounding, WeightInputs, gptq, nearest
from dovetail.tune.quantize.smoothing import smoothed
from dovetail.tune.quantize.texts import rows_of

SCHEMES = tuple(name for name, form in ROUNDED.items() if form.name in WRITTEN)
METHODS = ("gptq", "awq", "rtn")
BATCH = 8  # rows that are run at a time


@dataclass(frozen=True)
class QuantizedModel:
    """Hold what `quantize` did: where the model is, and its held-out loss.

    Attributes:
        folder: The folder that was written.
        before: The mean loss of a held-out token with the plain weights; None without data.
        after: The same with the quantised weights.
        tokens: The held-out tokens.
        groups: The values that share a scale, each number once; empty if rows have one.
    """

    folder: Path
    before: float | None
    after: float | None
    tokens: int
    groups: tuple[int, ...]


def quantize(
    model: str | Path,
    out: str | Path,
    scheme: str = "int4",
    data: str = "",
    method: str = "gptq",
    *,
    samples: int = 128,
    length: int = 512,
    text_key: str = "text",
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantise a model and write it as a Hugging Face folder in the format of compressed-tensors.

        dt.quantize("smollm2-135m", "small", scheme="int4", data="texts.jsonl")

    Args:
        model: A folder, a name or a hub id.
        out: A new or empty folder.
        scheme: One of SCHEMES.
        data: Texts: a .txt or .jsonl file, a folder, a built-in corpus. One row in eight is held out.
        method: "gptq" compensates the error of each column in the others, "awq" scales the inputs of weights, "rtn"
            rounds to the nearest value and needs no data.
        samples: Rows of text that are used, at most.
        length: Tokens of a row.
        text_key: The field of a record that holds its text.
        progress: Called with a name, the layers done and all layers.

    Returns:
        The folder and the held-out losses.

    Raises:
        UserError: An argument is wrong, or there is too little text.
        UnsupportedError: The model cannot be calibrated, or not written.
    """
    one_of("scheme", scheme, SCHEMES)
    one_of("method", method, METHODS)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileError(f"{out} exists and is not an empty folder: choose another folder or remove it", param="out")
    if method != "rtn" and not data:
        raise UserError(f"--method {method} needs texts: add --data texts.jsonl, or use --method rtn", param="data")
    loaded = load(model, quantization="none", progress=progress)
    rows = _rows(loaded, data, samples, length, text_key)
    held_out, used = rows[::8], np.delete(rows, np.s_[::8], axis=0)
    formats = dict(rounded_formats(spec(loaded.config), scheme))
    before = _loss(loaded, loaded.params, held_out)
    params = _quantized(loaded, formats, method, used, progress)
    after = _loss(loaded, params, held_out)
    save(out, loaded.config, _stored(params, model), loaded.tokenizer)
    groups = tuple(sorted({form.group for form in formats.values() if form.group}))
    return QuantizedModel(out, before, after, held_out[:, 1:].size, groups)


def _rows(model: Model, data: str, samples: int, length: int, text_key: str) -> np.ndarray:
    if not data:
        return np.zeros((0, length), np.int32)
    if model.tokenizer is None:
        raise UserError("the model has no tokenizer to read texts with: add a tokenizer.json", param="model")
    return rows_of(data, model.tokenizer, min(length, model.config.max_len), samples, text_key)


def _stored(params: Params, model: str | Path) -> Params:
    """Return the weights with plain ones in the dtype of the checkpoint."""
    path = resolve(model)
    checkpoint, cfg, _ = open_checkpoint(path)
    dtype = stored_dtype(checkpoint, cfg, str(path))
    return jax.tree.map(lambda w: w.astype(dtype), params, is_leaf=is_quantized)


# --- layer by layer ---------------------------------------------------------------------------------------------------


def _quantized(
    model: Model, formats: Mapping[str, Format], method: str, rows: np.ndarray, progress: Progress | None
) -> Params:
    cfg, params, compute = model.config, dict(model.params), model.compute
    if method != "rtn":
        check_layers(cfg)
    specs, layers = spec(cfg)["layers"], list(params["layers"])
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)] if method != "rtn" else []
    states = [_embedded(params, cfg, each) for each in batches]
    for i, layer in enumerate(cfg.layers):
        at = f"layers.{i}."
        forms = {path.removeprefix(at): form for path, form in formats.items() if path.startswith(at)}
        if method == "rtn":
            layers[i] = _rounded(layers[i], specs[i], forms, {}, nearest)
        else:
            run = dict(cfg=cfg, layer=layer, compute=compute)
            grams = _by_weight([observe(layers[i], x, names=tuple(forms), **run) for x in states])
            if method == "awq":
                layers[i], grams = smoothed(layers[i], layer, cfg.norm_offset, forms, grams)
            layers[i] = _rounded(layers[i], specs[i], forms, grams, gptq if method == "gptq" else nearest)
            states = [outputs(layers[i], x, **run) for x in states]
        if progress:
            progress(f"quantise layer {i + 1}", i + 1, len(cfg.layers))
    return {**params, "layers": tuple(layers)}


def _by_weight(found: list[Grams]) -> Grams:
    """Return the sums over batches by the path of each weight."""
    sums = jax.tree.map(lambda *parts: functools.reduce(jnp.add, parts), *found)
    return {name: gram for names, gram in sums.items() for name in names.split("+")}


def _rounded(p: Params, specs: Any, forms: Mapping[str, Format], grams: Grams, rounding: Rounding) -> Params:
    """Return a layer's weights in their formats; a weight without a gram is rounded to the nearest values."""
    inputs = {
        id(gram): [WeightInputs(each) for each in (gram if gram.ndim == 3 else [gram])] for gram in grams.values()
    }

    def one(path: tuple, leaf: ParamSpec, weight: jax.Array) -> Any:
        name = path_name(path)
        if name not in forms:
            return weight
        leaf = replace(leaf, format=forms[name])
        if name not in grams:
            return rounded(leaf, weight)
        out, size = leaf.rows
        known = inputs[id(grams[name])]  # several for experts
        parts = jnp.split(weight.reshape(-1, size), len(known))
        each = [rounding(forms[name], rows, one) for rows, one in zip(parts, known, strict=True)]
        arrays = jax.tree.map(lambda *made: jnp.concatenate(made), *each)
        return quantized(leaf, {key: x.reshape(*out, -1) for key, x in arrays.items()}, weight.dtype)

    return jax.tree_util.tree_map_with_path(one, specs, p, is_leaf=is_spec)


@functools.partial(jax.jit, static_argnames="cfg")
def _embedded(params: Params, cfg: ModelConfig, tokens: jax.Array) -> jax.Array:
    return embed(params, cfg, tokens)


# --- held-out loss ----------------------------------------------------------------------------------------------------


def _loss(model: Model, params: Params, rows: np.ndarray) -> float | None:
    """Return the mean loss of a token of the rows, but the first of each; None without rows."""
    if not len(rows):
        return None
    sums = [_summed_loss(params, rows[i : i + 1], model.config, model.compute) for i in range(len(rows))]
    return float(np.sum(sums)) / (rows.shape[0] * (rows.shape[1] - 1))


@functools.partial(jax.jit, static_argnames=("cfg", "compute"))
def _summed_loss(params: Params, tokens: jax.Array, cfg: ModelConfig, compute: Compute) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = (positions < tokens.shape[1] - 1).astype(jnp.float32)
    head = params["embed"] if cfg.tied else params["head"]
    with compute.products():
        hidden, _ = trunk(params, cfg, tokens, positions, Packed(jnp.ones(tokens.shape, jnp.int32)))
        targets = jnp.roll(tokens, -1, axis=1)
        loss, _ = cross_entropy(hidden, head, targets, mask, scale=cfg.logit_scale, softcap=cfg.logit_softcap)
    return loss
