"""Loading: bad input gives one sentence and leaves nothing behind; unusual valid checkpoints load."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_models import reference
from refusals import refuses
from safetensors.numpy import load_file, save_file

from dovetail.cli.main import main
from dovetail.core.errors import CheckpointError, UserError
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.io import hf
from dovetail.io.load import convert, load, save, served_blocks
from dovetail.io.safetensor_folder import INDEX, SafetensorFolder
from dovetail.models.registry import parse_config

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
TOKENS = list(range(3, 16))


def copy_of(name: str, folder: Path) -> Path:
    shutil.copytree(reference(name)[1], folder)
    return folder


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(change(dict(tensors)), folder / WEIGHTS, metadata={"format": "pt"})


def in_shards(folder: Path) -> list[Path]:
    """Rewrite the folder's weights as several files with an index."""
    model = load(folder)
    shutil.rmtree(folder)
    save(folder, model.config, model.params, None, max_shard_bytes=100_000)
    return sorted(folder.glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------------ bad input


def truncated(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def missing_shard(folder):
    in_shards(folder)[1].unlink()


def broken_index(content):
    def change(folder):
        in_shards(folder)
        (folder / INDEX).write_text(content)

    return change


def duplicate(folder):
    twice = {"model.norm.weight": np.ones(48, np.float32)}
    save_file(twice, folder / "more.safetensors")


def two_names_of_one(folder):
    edit_tensors(folder, lambda t: t | {"language_model.model.norm.weight": t["model.norm.weight"]})


def integers(folder):
    edit_tensors(folder, lambda t: t | {"lm_head.weight": t["lm_head.weight"].astype(np.int8)})


def config(**changes):
    return lambda folder: edit_config(folder, **changes)


BAD = {
    "truncated": (truncated, r"model\.safetensors is not a whole safetensors file"),
    "empty file": (write(WEIGHTS, b""), r"model\.safetensors is not a whole safetensors file \(0 bytes"),
    "garbage": (write(WEIGHTS, b"\xff" * 200), r"model\.safetensors is not a whole safetensors file"),
    "garbage header": (write(WEIGHTS, b"\x10" + b"\0" * 7 + b"{not json at all"), r"model\.safetensors is not a whole"),
    "missing shard": (missing_shard, r"names files that are not there: model-00002-of-"),
    "index of no kind": (broken_index("[]"), r"index\.json is not a safetensors index"),
    "index without a map": (broken_index("{}"), r"index\.json is not a safetensors index.*weight_map"),
    "index cut short": (broken_index("{"), r"index\.json is not a safetensors index"),
    "index of numbers": (broken_index('{"weight_map": {"a": 5}}'), r"files that are not there: 5"),
    "index of a file above": (broken_index('{"weight_map": {"a": "../x"}}'), r"files of its own folder.*got '\.\./x'"),
    "index of another file": (broken_index('{"weight_map": {"a": "/x/y"}}'), r"files of its own folder.*got '/x/y'"),
    "duplicate": (duplicate, r"stored twice: model\.norm\.weight \(in model\.safetensors and more\.safetensors\)"),
    "two names of one": (two_names_of_one, r"stored twice: language_model\.model\.norm\.weight and model\.norm\.w"),
    "integers": (integers, r"not plain floats: lm_head\.weight int8"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"holds no \*\.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json does not exist"),
    "config cut short": (write("config.json", b'{"model_type": "llama",'), r"config\.json is not valid JSON"),
    "config not text": (write("config.json", b"\xff\xfe\x00"), r"config\.json is not valid JSON"),
    "config a list": (write("config.json", b"[1]"), r"config\.json: a config is a JSON object"),
    "architecture": (config(model_type="mamba9"), r"config\.json: the architecture 'mamba9' is not supported.*llama"),
    "rope type": (config(rope_parameters={"rope_type": "spiral"}), r"rope type 'spiral' is not supported"),
    "rope of no kind": (config(rope_parameters="llama3"), r"rope_parameters='llama3'"),
    "unknown field": (config(logit_twist=0.5), r"not supported: logit_twist=0\.5"),
    "missing field": (config(hidden_size=None), r"'hidden_size' is missing"),
    "a word for a number": (config(num_attention_heads="four"), r"num_attention_heads='four'"),
    "quantised": (config(quantization_config={"quant_method": "hqq"}), r"quantization_config: .*hqq"),
    "quantised somehow": (config(quantization_config="4bit"), r"quantization_config"),
    "tokenizer": (write("tokenizer.json", b"{"), r"tokenizer\.json"),
}  # fmt: skip


@pytest.fixture
def cli(monkeypatch, capsys):
    """Return a function that runs the command line in this process and returns its exit code and stderr."""

    def run(*args) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dovetail", *map(str, args)])
        monkeypatch.delenv("DOVETAIL_TRACEBACK", raising=False)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return int(code), capsys.readouterr().err

    return run


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(kind, tmp_path, cli):
    spoil, says = BAD[kind]
    source = copy_of("llama2", tmp_path / "source")
    spoil(source)
    with pytest.raises(UserError, match=says) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    before = sorted(tmp_path.iterdir())
    code, said = cli("convert", source, tmp_path / "out")
    assert code == 2 and "error:" in said and "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before, "something was left beside the destination"


def test_every_wrong_tensor_is_in_one_error(tmp_path):
    def change(t):
        del t["model.norm.weight"], t["model.layers.0.mlp.up_proj.weight"]
        t["model.layers.1.self_attn.q_proj.weight"] = np.zeros((48, 47), np.float32)
        return t | {"lm_head.weight": np.zeros((161, 48), np.float32), "model.layers.9.extra": np.zeros(3, np.float32)}

    source = copy_of("llama2", tmp_path / "source")
    edit_tensors(source, change)
    with pytest.raises(ValueError) as caught:
        load(source)
    report = str(caught.value)
    assert "missing: model.norm.weight" in report.replace("model.layers.0.mlp.up_proj.weight, ", "")
    assert "model.layers.0.mlp.up_proj.weight" in report
    assert "not of this model: model.layers.9.extra" in report
    assert "model.layers.1.self_attn.q_proj.weight [48, 47], expected [48, 48]" in report
    assert "lm_head.weight [161, 48], expected [160, 48]" in report


def test_a_gguf_with_a_wrong_magic(tmp_path, cli):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with refuses(None, CheckpointError, naming="model.gguf"):
        load(path)
    code, said = cli("convert", path, tmp_path / "out")
    assert code == 2 and "model.gguf" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == [path]


def test_a_destination_that_is_not_empty_is_left_alone(tmp_path, cli):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("data")
    code, said = cli("convert", reference("llama2")[1], out)
    assert code == 2 and "not an empty folder" in said
    assert [f.name for f in out.iterdir()] == ["precious"]
    code, said = cli("convert", reference("llama2")[1], out / "precious")
    assert code == 2 and "not an empty folder" in said


def test_an_empty_destination_is_used(tmp_path, cli):
    (tmp_path / "out").mkdir()
    code, said = cli("convert", reference("llama2")[1], tmp_path / "out")
    assert code == 0, said
    assert load(tmp_path / "out").config.vocab == 160
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("shard", [60_000, 2**30], ids=["shards", "one"])
def test_written_files_follow_the_umask(tmp_path, shard):
    before = os.umask(0o027)
    try:
        out = convert(reference("llama2")[1], tmp_path / "out", max_shard_bytes=shard)
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o640}


def test_tf32_is_no_way_to_store(tmp_path, cli):
    assert load(reference("llama2")[1], dtype="tf32").dtype == jnp.float32
    code, said = cli("convert", reference("llama2")[1], tmp_path / "out", "--dtype", "tf32")
    assert code == 2 and "use f32" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["int8", "fp12", "float64"])
def test_an_unknown_dtype_is_refused(dtype, tmp_path, cli):
    with refuses("dtype", naming="bf16, f32, tf32, f16"):
        load(reference("llama2")[1], dtype=dtype)
    code, said = cli("convert", reference("llama2")[1], tmp_path / "out", "--dtype", dtype)
    assert code == 2 and dtype in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "code"), [(OSError(errno.ENOSPC, "disk full"), 2), (KeyboardInterrupt(), 130)])
def test_a_save_that_is_stopped_half_way_leaves_nothing(error, code, tmp_path, cli, monkeypatch):
    written = []

    def stop_at_the_third(tensors, path, metadata):
        if len(written) == 2:
            raise error
        written.append(path)
        return save_file(tensors, path, metadata)

    monkeypatch.setattr("safetensors.numpy.save_file", stop_at_the_third)
    found, said = cli("convert", reference("llama2")[1], tmp_path / "out", "--max-shard-size", "60KB")
    assert (found, len(written)) == (code, 2) and "Traceback" not in said
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- odd, but right


def as_tower(folder: Path, model_type: str, rename, beside: list[str]) -> None:
    """Turn a text model's folder into that of one with images: names, other towers, a config around the config."""
    towers = {f"{name}.weight": np.ones((3, 3), np.float32) for name in beside}
    edit_tensors(folder, lambda t: {rename(k): v for k, v in t.items()} | towers)
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 3}, "image_token_id": 5}
    (folder / "config.json").write_text(json.dumps(outer))


def published(name: str) -> str:  # Gemma 3 on the hub
    return "language_model." + name


def current(name: str) -> str:  # what transformers writes now
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.mark.parametrize(
    ("name", "rename", "beside"),
    [
        ("gemma3", published, ["vision_tower.layers.0", "multi_modal_projector.mm"]),
        ("gemma3", current, ["model.vision_tower.layers.0", "model.multi_modal_projector.mm"]),
        ("gemma4-per-layer", current, ["model.vision_tower.layers.0", "model.embed_vision.p", "model.audio_tower.x"]),
    ],
)
def test_the_text_tower_of_a_model_of_text_and_images(name, rename, beside, tmp_path):
    source = copy_of(name, tmp_path / "source")
    as_tower(source, "of_a_kind_without_a_tower_here", rename, beside)
    model = load(source)
    np.testing.assert_array_equal(model.logits(TOKENS), load(reference(name)[1]).logits(TOKENS))
    convert(source, tmp_path / "out")  # and it is written as the text model that it is
    assert set(SafetensorFolder(tmp_path / "out").tensors()) == set(SafetensorFolder(reference(name)[1]).tensors())


def test_layers_that_predict_later_tokens_are_left_out(tmp_path):
    """Published DeepSeek-V3 weights go on after the last layer."""
    source = copy_of("deepseek-v3", tmp_path / "source")
    extra = ["enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.head", "self_attn.o_proj", "mlp.gate"]
    edit_tensors(source, lambda t: t | {f"model.layers.4.{x}.weight": np.ones((3, 3), np.float32) for x in extra})
    edit_config(source, num_nextn_predict_layers=1)
    np.testing.assert_array_equal(load(source).logits(TOKENS), load(reference("deepseek-v3")[1]).logits(TOKENS))


def test_shards_without_an_index(tmp_path):
    source = copy_of("llama2", tmp_path / "source")
    in_shards(source)
    (source / INDEX).unlink()
    np.testing.assert_array_equal(load(source).logits(TOKENS), load(reference("llama2")[1]).logits(TOKENS))


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")])
def test_dtype_on_load(dtype, name):
    _, folder = reference("deepseek-v3")
    exact = load(folder)
    assert exact.dtype == jnp.float32
    for asked in (dtype, name, jnp.dtype(name)):
        model = load(folder, dtype=asked)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), model.params, exact.params)
        assert model.dtype == jnp.dtype(name)
    # the bias on the choice of experts is kept whole: it moves by steps bf16 does not have
    assert model.params["layers"][1]["moe"]["choice_bias"].dtype == jnp.float32


@pytest.mark.parametrize("axes", [None, {"tensor": 8}], ids=["whole", "sharded"])
def test_loaded_weights_do_not_change_with_the_file(axes, tmp_path):
    source = copy_of("llama2", tmp_path / "source")
    model = load(source, placement=Placement(make_mesh(axes), SERVE) if axes else None)
    before = jax.tree.map(np.array, model.params)
    size = (source / WEIGHTS).stat().st_size
    with open(source / WEIGHTS, "r+b") as file:
        file.seek(size // 4)
        file.write(bytes(size - size // 4))
    jax.tree.map(np.testing.assert_array_equal, model.params, before)


# ------------------------------------------------------------------------------------------------------- memory

BIG = dict(
    model_type="llama", vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """96 MB in ten files, the largest tensors of 4 MB each."""
    folder = tmp_path_factory.mktemp("big")
    (folder / "config.json").write_text(json.dumps(BIG))
    table = hf.name_table(parse_config(BIG))
    shapes = {name: parts[0].spec.stored.shape for name, parts in table.items()}
    for i in range(10):
        part = {name: np.ones(shape, np.float32) for name, shape in list(shapes.items())[i::10]}
        save_file(part, folder / f"part-{i}.safetensors")
    return folder


def on_a_device_elsewhere(monkeypatch) -> None:
    """Devices whose arrays are outside this process's memory, as those of accelerators."""

    def nothing(array) -> np.ndarray:
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)

    def from_callback(shape, sharding, fetch):
        parts = [fetch(index) for index in sharding.addressable_devices_indices_map(shape).values()]
        return np.broadcast_to(np.zeros((), parts[0].dtype), shape)

    monkeypatch.setattr(jax, "device_put", nothing)
    monkeypatch.setattr(jax, "make_array_from_callback", from_callback)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("axes", [None, {"tensor": 8}, {"tensor": 2, "data": 4}], ids=["whole", "split", "repeated"])
def test_loading_holds_one_tensor_at_a_time(big, axes, dtype, monkeypatch):
    placement = Placement(make_mesh(axes), SERVE) if axes else None
    cfg, source = parse_config(BIG), SafetensorFolder(big)
    on_a_device_elsewhere(monkeypatch)
    tracemalloc.start()
    try:
        hf.read_params(source, cfg, jnp.dtype({"f32": "float32", "bf16": "bfloat16"}[dtype]), "big", placement)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    tensor = 512 * 2048 * (4 if dtype == "f32" else 2)
    assert tensor < peak < 1.25 * tensor, f"{peak / 2**20:.1f} MiB"


def test_blocks_are_served_where_products_read_them(monkeypatch):
    file = Path("model.gguf")
    monkeypatch.setattr("dovetail.io.load.reads_blocks", lambda dtype, placement: dtype == "float32")
    assert served_blocks(file) == served_blocks(file, "f32") == "gguf_int8"
    assert served_blocks(file, "bf16") is None
    assert served_blocks(Path("folder")) is None
