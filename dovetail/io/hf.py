"""Read and write weights under Hugging Face's names, through the one table that models.spec carries."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np

from dovetail.core.errors import CheckpointError
from dovetail.core.formats import Format
from dovetail.core.mesh import Placement, array_shardings, param_sharding
from dovetail.core.reporter import Progress
from dovetail.core.spec import ParamSpec, is_spec, leaf_dtype, leaves, num_bytes
from dovetail.core.types import Params
from dovetail.io.compressed_tensors import check_writable, encode, quantization_config
from dovetail.models.config import ModelConfig
from dovetail.models.family import VisionFamily
from dovetail.models.formats import Formats, may_quantize, with_formats
from dovetail.models.mtp import mtp_copies, with_mtp
from dovetail.models.registry import family_of, vision_family_of
from dovetail.models.spec import VISION, spec
from dovetail.ops.quant.weight import is_quantized, quantized, rounded

MTP = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")  # the one tensor that no other kind of layer has
FLOATS = {np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


class TensorSource(Protocol):
    """Read tensors by Hugging Face's names."""

    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return (shape, dtype) by name, without reading a tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return a tensor; a quantised one is unpacked."""
        ...


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """Read tensors of which some are quantised, also as they are stored."""

    def formats(self) -> dict[str, Format]:
        """Return the formats of the quantised tensors by name."""
        ...

    def packed(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a quantised tensor (core.formats)."""
        ...


class StoredPart:
    """Place one of our weights in one stored tensor; `index` is its index in the weight's leading dim, or None."""

    def __init__(self, path: str, spec: ParamSpec, index: int | None):
        self.path, self.spec, self.index = path, spec, index


def name_table(cfg: ModelConfig, mtp: bool = False) -> dict[str, list[StoredPart]]:
    """Return the parts of our weights by stored tensor name; with `mtp`, those of models.mtp too."""
    return _parts(_specs(cfg, mtp))


def _parts(specs: Any) -> dict[str, list[StoredPart]]:
    table: dict[str, list[StoredPart]] = {}
    for path, leaf in leaves(specs):
        for i, name in enumerate(leaf.stored.names):
            table.setdefault(name, []).append(StoredPart(path, leaf, i if len(leaf.stored.names) > 1 else None))
    return table


def match_names(source: TensorSource, cfg: ModelConfig, where: str, mtp: bool = False) -> dict[str, str]:
    """Return the checkpoint's own name for each name of our table; list every disagreement in one CheckpointError."""
    later = "|".join(str(i) for i in _mtp_layers(source.tensors(), cfg))
    vision = vision_family_of(cfg)
    unused = [*(vision or family_of(cfg)).unused, rf"model\.layers\.({later})\..*", r"mtp\..*"]
    unused += [r"lm_head\.weight"] if cfg.tied else []
    fits = f"{where} does not fit its config ({cfg.family}, {len(cfg.layers)} layers)."
    return match_specs(source, _specs(cfg, mtp), fits, unused, functools.partial(plain_name, vision=vision))


def match_specs(
    source: TensorSource,
    specs: Any,
    refusal: str,
    unused: Iterable[str] = (),
    plain: Callable[[str], str] = str,
) -> dict[str, str]:
    """Return the checkpoint's own name for each stored name of a tree of specs.

    Args:
        source: The checkpoint.
        specs: The tree.
        refusal: The first sentence of the error.
        unused: Patterns of tensors that may be there and are not read.
        plain: Maps a checkpoint's name to the specs' name for it.

    Raises:
        CheckpointError: The names, shapes or types differ; every difference is listed.
    """
    table, found, unused = _parts(specs), source.tensors(), list(unused)
    names: dict[str, str] = {}
    unmapped, repeated = [], []
    for stored in found:
        name = plain(stored)
        if name in names:
            repeated.append(f"{names[name]} and {stored}")
        elif name in table:
            names[name] = stored
        elif not any(re.fullmatch(p, name) for p in unused):
            unmapped.append(stored)
    problems = [("missing", [n for n in table if n not in names]), ("not of this model", unmapped)]
    wrong, coded = [], []
    for name, stored in names.items():
        leaf, (shape, dtype) = table[name][0].spec, found[stored]
        if shape != leaf.stored.shape:
            wrong.append(f"{stored} {list(shape)}, expected {list(leaf.stored.shape)}")
        if not _has_kind(leaf, np.dtype(dtype)):
            coded.append(f"{stored} {np.dtype(dtype).name}")
    problems += [("of another shape", wrong), ("stored twice", repeated), ("not plain floats", coded)]
    report = "; ".join(f"{kind}: {', '.join(items)}" for kind, items in problems if items)
    if report:
        raise CheckpointError(f"{refusal} {report}")
    return names


def _has_kind(leaf: ParamSpec, dtype: np.dtype) -> bool:
    """Return whether a tensor of this type may be stored for a weight: a float, or an integer for a table of them."""
    is_table = leaf.dtype is not None and np.dtype(leaf.dtype).kind == "i"
    return dtype.kind == "i" if is_table else dtype in FLOATS


def read_params(
    source: TensorSource,
    cfg: ModelConfig,
    dtype: Any,
    where: str,
    placement: Placement | None = None,
    progress: Progress | None = None,
    mtp: bool = False,
    formats: Formats = (),
) -> Params:
    """Read a checkpoint's weights as (sharded) device arrays, holding at most one weight on the host at a time.

    Args:
        source: The checkpoint.
        cfg: The model.
        dtype: The type of the arrays.
        where: The checkpoint's name, for errors.
        placement: The mesh and its rules; None for one device.
        progress: Called with a name, the bytes done and all bytes.
        mtp: Also read the weights of multi-token prediction, under `mtp` (see `has_mtp`).
        formats: The formats of quantised weights. A weight that is stored in another one is unpacked and rounded.
    """
    names = match_names(source, cfg, where, mtp)
    return read_specs(source, with_formats(_specs(cfg, mtp), formats), names, dtype, placement, progress)


def stored_formats(source: TensorSource, cfg: ModelConfig, where: str) -> Formats:
    """Return the formats of the weights that can be kept as they are stored.

    The others (a vision tower's, those of a family that reorders inputs) are unpacked when they are read.
    """
    if not isinstance(source, QuantizedSource) or not source.formats():
        return ()
    names, known, found = match_names(source, cfg, where), source.formats(), []
    for path, leaf in leaves(spec(cfg)):
        kinds = {known.get(names[name]) for name in leaf.stored.names}
        form = kinds.pop() if len(kinds) == 1 else None
        if form is not None and may_quantize(path, leaf):
            found.append((path, form))
    return tuple(found)


def read_specs(
    source: TensorSource,
    specs: Any,
    names: dict[str, str],
    dtype: Any,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> Params:
    """Read the weights of a tree of specs, whose names in the checkpoint are `names`, as `read_params` does."""
    treedef = jax.tree.structure(specs, is_leaf=is_spec)
    total, done, arrays = num_bytes(specs, dtype), 0, []
    for _, leaf in leaves(specs):
        array = _read_weight(source, leaf, names, leaf_dtype(leaf, dtype), placement)
        done += array.nbytes
        arrays.append(array)
        if progress:
            progress(leaf.stored.names[0], done, total)
    return jax.tree.unflatten(treedef, arrays)


def _read_weight(source: TensorSource, leaf: ParamSpec, names: dict[str, str], dtype: np.dtype, placement) -> Any:
    """Return a weight in the format of its spec: as it is stored, or rounded."""
    if leaf.format is None:
        return _read_leaf(source, leaf, names, dtype, placement)
    stored = [names[name] for name in leaf.stored.names]
    known = source.formats() if isinstance(source, QuantizedSource) else {}
    kinds = {known.get(name) for name in stored}
    if any(kind is None or kind.stored != leaf.format.stored for kind in kinds):
        plain = _read_leaf(source, leaf, names, dtype, placement)
        return rounded(leaf, plain, placement)
    parts = [source.packed(name) for name in stored]  # type: ignore[attr-defined]
    arrays = {}
    for key, (shape, kind) in leaf.arrays(dtype).items():
        made = np.empty(shape, kind)
        for i, part in enumerate(parts):
            hole = made if len(stored) == 1 else made[i]
            hole[...] = leaf.stored.cut_rows(part[key]).reshape(hole.shape)
        arrays[key] = made
    places = array_shardings(placement, leaf, dtype) if placement else {key: None for key in arrays}
    return quantized(leaf, {key: jax.device_put(x, places[key]) for key, x in arrays.items()}, dtype, placement)


def _read_leaf(source: TensorSource, leaf: ParamSpec, names: dict[str, str], dtype: np.dtype, placement) -> jax.Array:
    stored = [names[n] for n in leaf.stored.names]
    fetched: dict[str, np.ndarray] = {}

    def cut(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return leaf.stored.cut(source.read(name)).reshape(shape)

    def fetch(index: Any) -> np.ndarray:
        """Return a part of the weight, shared by the devices that hold the same part.

        It is copied once: jax would alias the mapped file, which another process may still write.
        """
        if (key := str(index)) not in fetched:
            part = np.empty([len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True)], dtype)
            if len(stored) == 1:
                part[...] = cut(stored[0], leaf.shape)[index]
            else:
                for i, name in enumerate(stored[index[0]]):
                    part[i] = cut(name, leaf.shape[1:])[index[1:]]
            fetched[key] = part
        return fetched[key]

    sharding = param_sharding(placement, leaf)
    if sharding is None:
        return jax.device_put(fetch((slice(None),) * len(leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, sharding, fetch)


def write_tensors(cfg: ModelConfig, params: Params) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield (name, bytes, array) for every tensor of a checkpoint with these weights."""
    mtp = "mtp" in params
    specs = _specs(cfg, mtp)
    named = _stored_names(cfg, specs)
    for name, size, array in write_specs(specs, params, _copies(cfg, mtp)):
        yield named(name), size, array


def _stored_names(cfg: ModelConfig, specs: Any) -> Callable[[str], str]:
    """Return the function from a name of the specs to the name in a checkpoint: a model of images has a prefix."""
    vision, tower = vision_family_of(cfg), _parts(specs.get(VISION, {}))

    def named(name: str) -> str:
        return re.sub(r"^model\.", vision.text_prefix, name) if vision and name not in tower else name

    return named


def written_config(cfg: ModelConfig, params: Params) -> dict[str, Any] | None:
    """Return the `quantization_config` of a folder that `write_tensors` fills; None for plain weights."""
    specs = _specs(cfg, "mtp" in params)
    weights, named = _by_path(specs, params), _stored_names(cfg, specs)
    formats, plain = {}, ["lm_head"]
    for name, parts in _parts(specs).items():
        module, weight = named(name).removesuffix(".weight"), weights[parts[0].path]
        if is_quantized(weight):
            check_writable(name, weight.format, parts[0].spec.stored.shape)
            formats[module] = weight.format
        elif len(parts[0].spec.stored.shape) == 2 and name.endswith(".weight"):  # a table may be listed too
            plain.append(module)
    return quantization_config(formats, [each for each in plain if each not in formats]) if formats else None


def write_specs(specs: Any, params: Params, copies: Mapping[str, str]) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield (name, bytes, array) for every tensor of a tree of specs, and for copies of some under other names.

    Quantised weights are written as compressed-tensors.
    """
    flat, table = _by_path(specs, params), _parts(specs)
    host: dict[str, np.ndarray] = {}
    for name, parts in [*table.items(), *((copy, table[name]) for copy, name in copies.items())]:
        stored = parts[0].spec.stored
        if is_quantized(flat[parts[0].path]):
            yield from ((each, x.nbytes, x) for each, x in _packed(name, parts, flat))
            continue
        # experts' tensors come weight after weight: keep the few weights that the current names share
        host = {p.path: host[p.path] if p.path in host else np.asarray(flat[p.path]) for p in parts}
        tensor = np.empty(stored.shape, host[parts[0].path].dtype)
        for part in parts:
            value = host[part.path] if part.index is None else host[part.path][part.index]
            hole = part.spec.stored.cut(tensor)
            hole[...] = value.reshape(hole.shape)
        yield name, tensor.nbytes, tensor


def _by_path(specs: Any, params: Params) -> dict[str, Any]:
    found = jax.tree.leaves(params, is_leaf=is_quantized)
    return {path: weight for (path, _), weight in zip(leaves(specs), found, strict=True)}


def _packed(name: str, parts: list[StoredPart], weights: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the stored tensors of a quantised tensor, whose rows are the rows of our weights."""
    form, shape = weights[parts[0].path].format, parts[0].spec.stored.shape
    check_writable(name, form, shape)
    assert all(weights[part.path].format == form for part in parts), name
    arrays = {}
    for key, (length, dtype) in form.lengths(shape[-1]).items():
        arrays[key] = np.empty((*shape[:-1], length), dtype)
        for part in parts:
            own = np.asarray(weights[part.path].arrays[key])
            hole = part.spec.stored.cut_rows(arrays[key])
            hole[...] = (own if part.index is None else own[part.index]).reshape(hole.shape)
    yield from encode(name, form, arrays)


def weights_dtype(params: Params) -> np.dtype:
    """Return the dtype of the weights: that of the embedding, or of a model of images' tower."""
    return (params["embed"] if "embed" in params else params["vision"]["patch"]).dtype


def has_mtp(source: TensorSource) -> bool:
    """Return whether the checkpoint has weights of multi-token prediction."""
    return any(MTP.fullmatch(text_name(name)) for name in source.tensors())


def _specs(cfg: ModelConfig, mtp: bool) -> dict[str, Any]:
    return with_mtp(spec(cfg), cfg) if mtp else spec(cfg)


def _copies(cfg: ModelConfig, mtp: bool) -> dict[str, str]:
    return mtp_copies(cfg) if mtp else {}


def plain_name(name: str, vision: VisionFamily | None) -> str:
    """Return the name that specs have for a checkpoint's tensor."""
    for pattern, replacement in vision.aliases if vision else ():
        name = re.sub(pattern, replacement, name)
    return text_name(name)


def text_name(name: str) -> str:
    """Return a tensor's name without the prefix of the text model in models of text and images."""
    name = re.sub(r"^language_model\.model\.|^model\.(language|text)_model\.(model\.)?", "model.", name)
    return re.sub(r"^language_model\.lm_head\.", "lm_head.", name)


def _mtp_layers(found: Iterable[str], cfg: ModelConfig) -> set[int]:
    """Return the numbers of the layers that predict later tokens.

    They are stored after the last layer: as many as the config says, and any that has such a layer's projection.
    """
    last, count = len(cfg.layers), cfg.text_hf().get("num_nextn_predict_layers") or 0
    marked = {int(match[1]) for name in found if (match := MTP.fullmatch(text_name(name)))}
    return {*range(last, last + count), *(i for i in marked if i >= last)}
