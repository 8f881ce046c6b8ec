"""The config of every kind of model name, read without weights."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from reference_models import reference
from refusals import refuses

from dovetail.io import hub, load
from dovetail.io.load import outline
from dovetail.models.registry import read_config, read_model

pytestmark = pytest.mark.slow


def test_a_folder_has_its_weights_type_and_a_config_the_one_it_names(tmp_path):
    folder = reference("llama3.1")[1]
    assert outline(str(folder)) == (read_config(folder), jnp.float32)
    hf = json.loads((folder / "config.json").read_text()) | dict(dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    cfg, dtype = outline(str(tmp_path))
    assert (cfg.layers, dtype) == (read_config(folder).layers, "bfloat16")


def test_a_gguf_file(smollm2_gguf):
    cfg, dtype = outline(str(smollm2_gguf))
    assert cfg.layers == read_model("smollm2-135m").layers and dtype == jnp.float32, "dequantised, as it is served"


def test_of_a_hub_id_the_config_is_fetched(monkeypatch):
    folder = reference("llama3.1")[1]
    monkeypatch.setattr(load, "fetch_config", lambda name: folder / "config.json" if name == "org/tiny" else None)
    assert outline("org/tiny")[0] == read_config(folder)


@pytest.mark.parametrize(
    ("name", "naming"),
    [("tinny", "Did you mean 'tiny'"), ("absent.gguf", "absent.gguf")],
)
def test_an_unknown_model_is_refused(name, naming):
    with refuses("model", naming=naming):
        outline(name)


def test_the_name_of_a_shipped_architecture_means_its_published_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "_from_hub", lambda hub_id: tmp_path / hub_id)
    assert hub.resolve("qwen3-8b") == tmp_path / "Qwen/Qwen3-8B"
    with refuses("model", naming="'tiny'"):
        hub.resolve("tiny")
