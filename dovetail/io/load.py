"""Load models (`dt.load`) from a folder, a hub id, a .gguf file or a catalogue name, and convert them to HF folders.

`outline` and `config_of` find a model's architecture without reading its weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dovetail.core.choice import did_you_mean
from dovetail.core.compute import Compute, compute_of
from dovetail.core.errors import FileError, UnsupportedError, UserError
from dovetail.core.files import umask
from dovetail.core.formats import KEPT, ROUNDED
from dovetail.core.mesh import Placement
from dovetail.core.reporter import Progress
from dovetail.core.spec import num_bytes, num_params
from dovetail.core.types import Packed, Params
from dovetail.core.units import format_bytes, format_count
from dovetail.io.hf import (
    TensorSource,
    match_names,
    read_params,
    stored_formats,
    weights_dtype,
    write_tensors,
    written_config,
)
from dovetail.io.hub import CATALOGUE, HUB_ID, PUBLISHED, UNPUBLISHED, fetch_config, local, resolve
from dovetail.io.images.processor import ImageProcessor, copy_processor, has_processor, read_processor
from dovetail.io.quantized_folder import QuantizedFolder, check_config
from dovetail.io.safetensor_folder import SafetensorFolder, write_shards
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import forward, greedy, unembed
from dovetail.models.formats import Formats, formats_of, rounded_formats, with_formats
from dovetail.models.registry import parse_config, read_config, read_json, read_model, shipped_models, shipped_shapes
from dovetail.models.spec import VISION, flops_per_token, kv_bytes_per_token, spec
from dovetail.ops.dispatch_products import reads_blocks

if TYPE_CHECKING:
    from dovetail.interop.torch.language_model import TorchLanguageModel


@dataclass
class Model:
    """Hold a loaded model: its config, weights, tokenizer and compute type."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    source: str
    compute: Compute

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the weights."""
        return weights_dtype(self.params)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits [T, vocab] f32 of one sequence, for inspection rather than speed."""
        count = len(token_ids)
        size = max(16, 1 << (count - 1).bit_length())  # few compiled shapes
        tokens = jnp.zeros((1, size), jnp.int32).at[0, :count].set(jnp.asarray(token_ids, jnp.int32))
        cfg = self.config.within(count)
        return np.asarray(_logits(self.params, cfg, tokens, jnp.int32(count), self.compute)[0, :count])

    def generate(self, token_ids: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        """Yield greedily chosen tokens."""
        return greedy(self.params, self.config, token_ids, max_new_tokens, self.compute)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) for every tensor of a Hugging Face checkpoint with these weights."""
        return ((name, array) for name, _, array in write_tensors(self.config, self.params))

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder."""
        save(Path(folder), self.config, self.params, self.tokenizer)

    def summary(self) -> list[tuple[str, str]]:
        """Return rows that describe the loaded model, for a table."""
        return [*summary(self.config, self.dtype, self.compute, formats_of(self.params)), ("from", self.source)]


def summary(cfg: ModelConfig, dtype: np.dtype, compute: Compute, formats: Formats = ()) -> list[tuple[str, str]]:
    """Return rows that describe a model with weights of `dtype`, some of them in `formats`, for a table."""
    held, kinds = num_bytes(with_formats(spec(cfg), formats), dtype), {form.describe() for _, form in formats}
    return [
        ("family", cfg.family),
        ("layers", f"{len(cfg.layers)} of width {cfg.dim:,}"),
        ("attention heads", _heads(cfg)),
        ("parameters", format_count(num_params(spec(cfg)))),
        ("weights", f"{format_bytes(held)} in {' and '.join([*sorted(kinds), dtype.name])}"),
        ("dtype here", f"{compute.name}: {compute.describe()}"),
        ("KV cache", f"{format_bytes(kv_bytes_per_token(cfg, dtype.itemsize))} per token"),
        ("compute", f"{flops_per_token(cfg) / 1e6:,.0f} MFLOP per token"),
        *_vision(cfg),
        ("context", f"{cfg.max_len:,} tokens"),
        ("vocabulary", f"{cfg.vocab:,} tokens"),
    ]


def _vision(cfg: ModelConfig) -> list[tuple[str, str]]:
    if cfg.vision is None:
        return []
    tower, weights = cfg.vision.tower, format_count(num_params(spec(cfg)[VISION]))
    tokens = tower.max_patches // tower.patches_per_feature
    cost = f"{tower.flops(tower.max_patches) / 1e12:,.2f} TFLOP"
    return [("vision tower", f"{weights} parameters; at most {tokens} tokens and {cost} for an image or a tile of one")]


@functools.partial(jax.jit, static_argnames=("cfg", "compute"))
def _logits(params: Params, cfg: ModelConfig, tokens: jax.Array, count: jax.Array, compute: Compute) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ctx = Packed((positions < count).astype(jnp.int32))
    with compute.products():
        hidden, _ = forward(params, cfg, tokens, positions, ctx)
        return unembed(params, cfg, hidden)


@overload
def load(
    x: str | Path,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
    check: Callable[[ModelConfig], None] | None = None,
    quantization: str | None = None,
    backend: Literal["jax"] = "jax",
) -> Model: ...
@overload
def load(
    x: str | Path,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
    check: Callable[[ModelConfig], None] | None = None,
    quantization: str | None = None,
    *,
    backend: Literal["torch"],
) -> TorchLanguageModel: ...
def load(
    x: str | Path,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
    check: Callable[[ModelConfig], None] | None = None,
    quantization: str | None = None,
    backend: Literal["jax", "torch"] = "jax",
) -> Model | TorchLanguageModel:
    """Load a model from a Hugging Face folder, a hub id, a .gguf file or a catalogue name such as smollm2-135m.

    Args:
        x: The model.
        dtype: bf16, f32, tf32 (f32 with an NVIDIA GPU's TF32 products) or f16, or the same as a jax dtype. None for the
            checkpoint's own, except on a CPU, where bf16 is slow or emulated: there f32.
        placement: The mesh and its rules; None for one device.
        progress: Called with a name, the bytes done and all bytes.
        check: Called with the model's config before a weight is read.
        quantization: How weights are held: a name of core.formats.ROUNDED rounds the projections of layers, "gguf"
            keeps the blocks of a .gguf file ("gguf_int8": and a CPU's products round activations to int8), "none"
            unpacks everything. None keeps the weights of a quantised folder as they are, and unpacks a .gguf
            file.
        backend: "torch" runs the model as transformers defines it, on jax devices by torchax: for an architecture that
            Dovetail does not implement (docs/torch.md).

    Returns:
        The model; with `backend="torch"` a TorchLanguageModel.

    Raises:
        CheckpointError: The weights do not match the config.
        UserError: There is no such model, or its architecture is not supported.
    """
    path = resolve(x, progress)
    if backend == "torch":
        if quantization is not None:
            raise UnsupportedError('`backend="torch"` cannot quantise: leave `quantization` out', param="quantization")
        return _load_torch(path, dtype, placement, str(x))
    checkpoint, cfg, tokenizer = open_checkpoint(path)
    if check is not None:
        check(cfg)
    compute = compute_of(_own_dtype(checkpoint, cfg, str(path)) if dtype is None else dtype)
    formats = chosen_formats(checkpoint, cfg, str(path), quantization)
    params = read_params(checkpoint, cfg, compute.dtype, str(path), placement, progress, formats=formats)
    return Model(cfg, params, tokenizer, str(x), compute)


def chosen_formats(checkpoint: TensorSource, cfg: ModelConfig, where: str, quantization: str | None) -> Formats:
    """Return the formats that the weights of a checkpoint are held in; `quantization`: see `load`."""
    if quantization is not None and quantization not in (*ROUNDED, *KEPT, "none"):
        known = ", ".join((*ROUNDED, *KEPT, "none"))
        raise UserError(f"`quantization` must be one of {known}, got {quantization!r}", param="quantization")
    is_gguf = Path(where).suffix == ".gguf"
    if quantization in KEPT and not is_gguf:
        raise UserError(f"quantization={quantization} requires a .gguf file, got {where}", param="quantization")
    if quantization in ROUNDED:
        return rounded_formats(spec(cfg), str(quantization))
    keeps = quantization in KEPT if is_gguf else quantization is None
    formats = stored_formats(checkpoint, cfg, where) if keeps else ()
    if quantization == "gguf_int8":
        return tuple((path, replace(form, activations="int8")) for path, form in formats)
    return formats


def served_blocks(path: Path, dtype: DTypeLike | None = None, placement: Placement | None = None) -> str | None:
    """Return the `quantization` of a model that is served without one: "gguf_int8", or None for that of `load`.

    A CPU reads the blocks of a .gguf file as they are, and rounds activations to int8 as llama.cpp does.
    """
    if path.suffix != ".gguf":
        return None
    own = "f32" if jax.default_backend() == "cpu" else "bf16"  # the default, see `load`
    return "gguf_int8" if reads_blocks(compute_of(dtype or own).dtype, placement) else None


def _load_torch(path: Path, dtype: DTypeLike | None, placement: Placement | None, source: str) -> TorchLanguageModel:
    from dovetail.interop.torch.language_model import load_torch

    if path.suffix == ".gguf":
        raise UnsupportedError('`backend="torch"` reads Hugging Face folders, got a .gguf file', param="backend")
    if placement is not None:
        raise UnsupportedError('`backend="torch"` uses one device: leave `placement` out', param="placement")
    return load_torch(path, dtype, _tokenizer(path), source)


def _tokenizer(path: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None


def open_checkpoint(path: Path) -> tuple[TensorSource, ModelConfig, Tokenizer | None]:
    """Return the weights, the config and the tokenizer of a folder or a .gguf file, without reading a weight."""
    if path.suffix == ".gguf":
        from dovetail.io.gguf import GgufCheckpoint

        gguf = GgufCheckpoint(path)
        return gguf, parse_config(gguf.config, str(path)), gguf.tokenizer()
    cfg = read_config(path)
    return _open_folder(path), cfg, _tokenizer(path)


def _open_folder(path: Path) -> TensorSource:
    hf = read_json(path / "config.json" if path.is_dir() else path)
    inner = hf.get("text_config") or {}
    config = hf.get("quantization_config") or inner.get("quantization_config")
    if not config:
        return SafetensorFolder(path)
    dtypes = (each.get(key) for each in (hf, inner) for key in ("dtype", "torch_dtype"))
    check_config(config, str(path))
    return QuantizedFolder(SafetensorFolder(path), config, next((found for found in dtypes if found), None))


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 4 * 2**30,
    progress: Progress | None = None,
    special_tokens: Sequence[str] = (),
) -> Path:
    """Convert any source that `load` takes to a Hugging Face folder, which appears complete or not at all.

    Args:
        src: The model.
        dst: The folder, which must not exist or be empty.
        dtype: The type of the weights; None for the checkpoint's own.
        max_shard_bytes: The size of the largest safetensors file.
        progress: Called with a name, the bytes done and all bytes.
        special_tokens: Tokens to add to the vocabulary (see `add_special_tokens`).

    Returns:
        The folder.
    """
    dst = Path(dst)
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise FileError(f"{dst} exists and is not an empty folder: choose another folder or remove it", param="dst")
    path = resolve(src, progress)
    checkpoint, cfg, tokenizer = open_checkpoint(path)
    dtype = stored_dtype(checkpoint, cfg, str(path)) if dtype is None else _to_store(dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        params = read_params(checkpoint, cfg, dtype, str(path), progress=progress)
        if special_tokens:
            cfg, params, tokenizer = add_special_tokens(cfg, params, tokenizer, special_tokens)
    save(dst, cfg, params, tokenizer, max_shard_bytes)
    copy_processor(path, dst)
    return dst


def save(
    dst: str | Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, max_shard_bytes: int = 4 * 2**30
) -> None:
    """Write a folder that transformers loads: sharded safetensors, config, tokenizer and chat template.

    Quantised weights are written as compressed-tensors.

    Raises:
        UnsupportedError: The weights are in a format that compressed-tensors does not have.
    """
    with whole_folder(Path(dst)) as folder:
        dtype = weights_dtype(params)
        hf: dict[str, Any] = cfg.to_hf() | {"dtype": dtype.name}
        hf.pop("torch_dtype", None)
        if "mtp" in params:  # tells readers of the folder that layers follow the last
            (hf.get("text_config") or hf if cfg.vision else hf)["num_nextn_predict_layers"] = len(params["mtp"])
        if quantization := written_config(cfg, params):
            hf["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
        for _ in write_shards(folder, write_tensors(cfg, params), max_shard_bytes):
            pass
        if tokenizer:
            tokenizer.save(folder)


@contextlib.contextmanager
def whole_folder(dst: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `dst`, which must not exist or be empty; remove it after an error."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{dst.name}-", dir=dst.parent))
    try:
        yield beside
        beside.chmod(0o777 & ~umask())  # mkdtemp's is 0700
        if dst.exists():
            dst.rmdir()  # only ever an empty folder
        beside.rename(dst)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _own_dtype(checkpoint: TensorSource, cfg: ModelConfig, where: str) -> DTypeLike:
    return own_dtype(stored_dtype(checkpoint, cfg, where))


def own_dtype(stored: DTypeLike) -> DTypeLike:
    """Return the default compute dtype on this machine for weights that are stored in `stored`."""
    return jnp.float32 if jax.default_backend() == "cpu" else stored


def stored_dtype(checkpoint: TensorSource, cfg: ModelConfig, where: str) -> DTypeLike:
    """Return the dtype of a checkpoint's weights."""
    tensors = checkpoint.tensors()  # the model's own alone: not a table of integers or another tower beside them
    kinds = {jnp.dtype(tensors[name][1]) for name in match_names(checkpoint, cfg, where).values()}
    if jnp.dtype(jnp.bfloat16) in kinds:
        return jnp.bfloat16
    return jnp.float16 if kinds == {jnp.dtype(jnp.float16)} else jnp.float32


def _to_store(asked: DTypeLike) -> DTypeLike:
    compute = compute_of(asked)
    if compute.name == "tf32":
        raise UserError("dtype 'tf32' is a precision of products, not a storage type: use f32", param="dtype")
    return compute.dtype


def _heads(cfg: ModelConfig) -> str:
    attn = cfg.layers[0].attn
    kv_heads = getattr(attn, "kv_heads", None)
    return f"{attn.heads} for queries, {kv_heads} for keys and values" if kv_heads else f"{attn.heads} over a latent"


def add_special_tokens(
    cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, tokens: Sequence[str]
) -> tuple[ModelConfig, Params, Tokenizer]:
    """Return the model with new special tokens: in its tokenizer, and as rows of its embeddings and head.

    A new row is the mean of the existing ones, as in transformers' `resize_token_embeddings`: the model knows nothing
    of the token, and expects it as rarely as any other. Unused rows of a padded vocabulary are used first.
    """
    if tokenizer is None:
        raise UserError("the model has no tokenizer to add special tokens to: add a tokenizer.json")
    if "per_layer" in params:
        raise UnsupportedError("special tokens cannot be added to a model with per-layer embeddings")
    before, grown = tokenizer.vocab_size, tokenizer.with_special_tokens(tokens)
    vocab = max(cfg.vocab, grown.vocab_size)
    cfg = parse_config(_resized(cfg, vocab), "the model with more tokens") if vocab > cfg.vocab else cfg
    tables = {name: _with_rows(params[name], before, vocab) for name in ("embed", "head") if name in params}
    return cfg, {**params, **tables}, grown


def _resized(cfg: ModelConfig, vocab: int) -> dict:
    hf = cfg.to_hf()
    if cfg.vision and hf.get("text_config"):
        hf["text_config"]["vocab_size"] = vocab
    if not cfg.vision or "vocab_size" in hf:  # SmolVLM's configs repeat it
        hf["vocab_size"] = vocab
    return hf


def _with_rows(table_VD: jnp.ndarray, known: int, vocab: int) -> jnp.ndarray:
    """Return the table with rows from `known` on replaced by the mean."""
    known = min(known, len(table_VD))
    mean = table_VD[:known].astype(jnp.float32).mean(0).astype(table_VD.dtype)
    return jnp.concatenate([table_VD[:known], jnp.broadcast_to(mean, (vocab - known, len(mean)))])


# --- architecture without weights -------------------------------------------------------------------------------------


def outline(x: str) -> tuple[ModelConfig, Any]:
    """Return the config of a model and the dtype of its weights, without reading a weight.

    The dtype is None if there is only a config, and it names none.

    Args:
        x: The model, as for `config_of`.
    """
    path = local(x)
    if path and (path.suffix == ".gguf" or any(path.glob("*.safetensors"))):
        checkpoint, cfg, _ = open_checkpoint(path)
        return cfg, stored_dtype(checkpoint, cfg, str(path))
    cfg = config_of(x)
    hf = cfg.to_hf()
    return cfg, hf.get("dtype") or hf.get("torch_dtype")


def formats_in(x: str) -> Formats:
    """Return the formats of a local model's weights as they are stored; empty if there is only a config."""
    path = local(x)
    if not path or not (path.suffix == ".gguf" or any(path.glob("*.safetensors"))):
        return ()
    checkpoint, cfg, _ = open_checkpoint(path)
    return stored_formats(checkpoint, cfg, str(path))


def config_of(x: str) -> ModelConfig:
    """Return the config of a model.

    It is that of a local folder, .gguf file or config.json, or of a shipped architecture, a catalogue name or a hub id,
    of which only the config.json is fetched.
    """
    if path := local(x):
        return open_checkpoint(path)[1] if path.suffix == ".gguf" else read_config(path)
    path, known = Path(x).expanduser(), (*shipped_models(), *shipped_shapes())
    if path.is_file() or x in known:
        return read_model(x)
    if x in CATALOGUE:
        return config_of(str(resolve(x)))
    if HUB_ID.fullmatch(x) and path.suffix not in (".gguf", ".json"):
        return read_config(fetch_config(x))
    raise UserError(
        f"{x!r} is not an existing folder, .gguf file or config.json, not a hub id (org/name) and not a shipped "
        f"architecture.{did_you_mean(x, known)} Shipped: {', '.join(known)}",
        param="model",
    )


def find_processor(x: str, tokenizer: Tokenizer) -> ImageProcessor | None:
    """Return the image processor of a model, which `resolve` finds; None if it does not see images, or has none."""
    folder = resolve(x)
    vision = config_of(str(folder)).vision if has_processor(folder) else None
    return read_processor(folder, vision, tokenizer) if vision else None


def servable(x: str) -> tuple[str, str]:
    """Return the name under which `dovetail serve` serves a model of `outline`, or an empty name and why not."""
    path = Path(x).expanduser()
    if path.is_dir() or path.suffix == ".json":
        folder = path if path.is_dir() else path.parent
        has = any(folder.glob("*.safetensors"))
        return (str(folder), "") if has else ("", f"{folder} holds no *.safetensors: add the model's weights")
    if x in UNPUBLISHED:
        return "", UNPUBLISHED[x]
    return PUBLISHED.get(x, x), ""
