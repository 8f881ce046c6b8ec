"""Print the held-out loss of a model under each storage scheme, as a table.

    python benchmarks/quantized_loss.py smollm2-135m --rows 128

The text is Python's own documentation (pydoc_data.topics): one row of 512 tokens in eight is held out, and the first of
the others calibrate GPTQ and AWQ. Layers' projections are rounded; embeddings and norms are not. Blocks of GGUF files
are made by the `gguf` package; K types, which it cannot write, are rounded here to the same values, with the range of
each sub-block (llama.cpp searches for better ones). Where 256 does not divide a row, another type is used, as in
llama.cpp. With llama-cpp-python, `--files Q4_K_M` also measures whole files that llama.cpp makes of the model's .gguf
file (embeddings rounded as well).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np

from dovetail.core.spec import leaves, tree_map
from dovetail.io.hub import resolve
from dovetail.io.load import Model, load
from dovetail.models.formats import rounded_formats, with_formats
from dovetail.models.frozen import dense
from dovetail.models.spec import spec
from dovetail.ops.quant.weight import rounded
from dovetail.tune.quantize.quantize import _loss, _quantized
from dovetail.tune.quantize.texts import rows_of

ROUNDED = ("int8", "fp8", "fp8_block", "int4", "int4_asym", "nf4", "mxfp4")
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
CALIBRATED = (("fp8", "gptq"), ("int4", "gptq"), ("int4", "awq"), ("int4_asym", "gptq"), ("int4_asym", "awq"))


def texts(folder: str) -> str:
    """Write Python's documentation as records, and return the file."""
    from pydoc_data.topics import topics

    path = Path(folder) / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics.values()))
    return str(path)


def in_blocks(kind: str, rows: np.ndarray) -> np.ndarray:
    """Return rows [O, I] rounded to blocks of a GGUF type."""
    kind = INSTEAD.get(kind, kind) if rows.shape[1] % 256 else kind
    if kind == "Q6_K":
        return _q6_k(rows)
    if kind.endswith("_K"):
        return _q4_or_q5_k(rows, 15 if kind == "Q4_K" else 31)
    found = getattr(gguf.GGMLQuantizationType, kind)
    return gguf.quants.dequantize(gguf.quants.quantize(rows, found), found)


def _q4_or_q5_k(rows: np.ndarray, most: int) -> np.ndarray:
    """Return d scale q - dmin min, scale and min of 6 bits for each 32 values, d and dmin for each 256."""
    x = rows.reshape(-1, 8, 32)
    least = np.maximum(-x.min(-1), 0)
    scale = (x.max(-1) + least) / most
    d, dmin = (np.float16(each.max(-1, keepdims=True) / 63).astype(np.float32) for each in (scale, least))
    scale, least = d * np.round(_ratio(scale, d)), dmin * np.round(_ratio(least, dmin))
    codes = np.clip(np.round(_ratio(x + least[..., None], scale[..., None])), 0, most)
    return (codes * scale[..., None] - least[..., None]).reshape(rows.shape)


def _q6_k(rows: np.ndarray) -> np.ndarray:
    """Return d scale q, scale of 8 bits for each 16 values, d for each 256."""
    x = rows.reshape(-1, 16, 16)
    scale = np.abs(x).max(-1) / 31
    d = np.float16(scale.max(-1, keepdims=True) / 127).astype(np.float32)
    scale = (d * np.round(_ratio(scale, d)))[..., None]
    return (np.clip(np.round(_ratio(x, scale)), -32, 31) * scale).reshape(rows.shape)


def _ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x / np.where(y == 0, 1, y)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--calibrate", type=int, default=28, help="rows for GPTQ and AWQ, at most")
    parser.add_argument("--only", nargs="*", default=[], help="schemes of the table; default: all")
    parser.add_argument("--files", nargs="*", default=[], help="types of llama.cpp, such as Q4_K_M")
    asked = parser.parse_args()
    model = load(asked.model, quantization="none")
    assert model.tokenizer is not None
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(texts(folder), model.tokenizer, 512, asked.rows)
    held_out, used = rows[::8], np.delete(rows, np.s_[::8], axis=0)[: asked.calibrate]
    base = _loss(model, model.params, held_out)
    assert base is not None
    print(
        f"{held_out[:, 1:].size:,} held-out tokens; calibrated on {used.size:,}\n\n"
        "| scheme | loss | change |\n|---|---|---|"
    )
    print(f"| as loaded | {base:.4f} | |", flush=True)

    def show(name: str, params) -> None:
        loss = _loss(model, params, held_out)
        assert loss is not None
        print(f"| {name} | {loss:.4f} | {loss / base - 1:+.2%} |", flush=True)

    def wanted(name: str) -> bool:
        return not asked.only or name in asked.only

    for scheme in filter(wanted, ROUNDED):
        show(scheme, dense(tree_map(rounded, with_formats(spec(model.config), _forms(model, scheme)), model.params)))
    if wanted("w8a8"):  # activations are rounded in the product
        specs = with_formats(spec(model.config), _forms(model, "w8a8"))
        show("w8a8", tree_map(rounded, specs, model.params))
    for kind in filter(wanted, BLOCKS):
        show(kind, _as_blocks(model, kind))
    for scheme, method in CALIBRATED:
        if wanted(f"{scheme}:{method}"):
            params = _quantized(model, dict(_forms(model, scheme)), method, used, None)
            show(f"{scheme}, {method}", dense(params))
    with tempfile.TemporaryDirectory() as folder:
        for kind in asked.files:
            show(f"{kind}, llama.cpp", load(_file_of(kind, asked.model, folder), quantization="none").params)


def _file_of(kind: str, model: str, folder: str) -> Path:
    """Return the .gguf file that llama.cpp makes of a model's .gguf file."""
    import llama_cpp

    path = Path(folder) / f"{kind}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    assert llama_cpp.llama_model_quantize(str(resolve(model)).encode(), str(path).encode(), params) == 0
    return path


def _forms(model: Model, scheme: str):
    return rounded_formats(spec(model.config), scheme)


def _as_blocks(model: Model, kind: str):
    chosen = dict(_forms(model, "int8"))

    def one(leaf, weight):
        size = leaf.rows[1]
        path = paths[id(leaf)]
        if path not in chosen:
            return weight
        return jnp.asarray(in_blocks(kind, np.asarray(weight).reshape(-1, size))).reshape(weight.shape)

    paths = {id(leaf): path for path, leaf in leaves(spec(model.config))}
    return tree_map(one, spec(model.config), model.params)


if __name__ == "__main__":
    main()
