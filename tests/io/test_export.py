"""Load, save, and load with transformers: bitwise equal tensors."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from reference_models import FAMILIES, reference

from dovetail.io.load import convert, load, save
from dovetail.io.safetensor_folder import INDEX, SafetensorFolder
from dovetail.models.registry import parse_config, read_config

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def read_back(folder) -> transformers.PreTrainedModel:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


def assert_same_tensors(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    differing = [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]
    assert not differing


def weights(folder) -> dict[str, np.ndarray]:
    source = SafetensorFolder(folder)
    return {name: source.read(name) for name in source.tensors()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_several_shards(name, tmp_path):
    theirs, folder = reference(name)
    model = load(folder)
    save(tmp_path / "out", model.config, model.params, None, max_shard_bytes=50_000)

    files = sorted(f.name for f in (tmp_path / "out").iterdir())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = [f for f in files if f.endswith(".safetensors")]
    assert files == sorted(["config.json", INDEX, *shards]) and len(shards) > 2
    assert set(index["weight_map"].values()) == set(shards)
    for shard in shards:
        held = [k for k, v in index["weight_map"].items() if v == shard]
        assert (tmp_path / "out" / shard).stat().st_size < 60_000 or len(held) == 1
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights(tmp_path / "out").values())
    assert parse_config(model.config.to_hf()) == model.config
    assert read_config(tmp_path / "out").layers == model.config.layers
    assert_same_tensors(read_back(tmp_path / "out"), theirs)
    # and in the file itself, what transformers had put in its own
    original, ours = weights(folder), weights(tmp_path / "out")
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in original.items()}
    for key, tensor in original.items():
        np.testing.assert_array_equal(ours[key], tensor, err_msg=key)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama3.2", "bfloat16"), ("llama3.2", "float16"), ("gpt-oss", "bfloat16"), ("deepseek-v3", "bfloat16")],
)
def test_half_precision(name, dtype, tmp_path):
    _, folder = reference(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "out")  # keeps what the source has
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    ours = read_back(tmp_path / "out")
    assert ours.dtype == getattr(torch, dtype)
    assert_same_tensors(ours, theirs)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_a_dtype_may_be_asked_for(dtype, tmp_path):
    theirs, folder = reference("llama3.2")
    wanted = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    convert(folder, tmp_path / "out", dtype=dtype)
    state = theirs.state_dict()
    for key, tensor in read_back(tmp_path / "out").state_dict().items():
        assert tensor.dtype == wanted and torch.equal(tensor, state[key].to(wanted)), key


def test_weights_changed_here_are_what_is_written(tmp_path):
    """The weights are written, not copied from the source: a trained model is saved by the same path."""
    theirs, folder = reference("qwen3-moe")
    model = load(folder)
    doubled = jax.tree.map(lambda x: x * 2, model.params)
    save(tmp_path / "out", model.config, doubled, None)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    state = theirs.state_dict()
    for key, tensor in read_back(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, state[key] * 2), key


def test_tokenizer_and_chat_template_go_along(tmp_path, make_backend):
    _, folder = reference("llama2")
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_backend("byte_level"), bos_token="<|begin|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    made.save_pretrained(source)
    convert(source, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "naïve café?"}]
    for tokenizer in (again, load(tmp_path / "out").tokenizer):
        ids = tokenizer.encode("Hello, naïve world!")
        assert list(ids) == theirs.encode("Hello, naïve world!")
    assert again.eos_token_id == theirs.eos_token_id
    expected = theirs.apply_chat_template(chat, tokenize=False)
    assert again.apply_chat_template(chat, tokenize=False) == expected
    assert load(tmp_path / "out").tokenizer.apply_chat(chat) == expected


def test_an_export_loads_here_with_the_same_logits(tmp_path):
    model = load(reference("deepseek-v2")[1])
    save(tmp_path / "out", model.config, model.params, None)
    tokens = list(range(3, 16))
    np.testing.assert_array_equal(load(tmp_path / "out").logits(tokens), model.logits(tokens))


def test_an_odd_tensor_beside_does_not_set_the_dtype(tmp_path):
    """A table of integers, as old exports and other towers have: the weights stay what they are."""
    from safetensors.numpy import save_file

    _, folder = reference("llama2")
    shutil.copytree(folder, tmp_path / "source")
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.arange(4, dtype=np.int64)}
    save_file(rotary, tmp_path / "source" / "more.safetensors")
    convert(tmp_path / "source", tmp_path / "out")
    assert {w.dtype for w in weights(tmp_path / "out").values()} == {jnp.dtype("float32")}
