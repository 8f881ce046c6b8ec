"""Test `dovetail quantize`: GPTQ and AWQ against rounding to nearest, on weights alone and on a tiny model."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses
from tune.small_models import model_folder

from dovetail.core.errors import FileError, RecipeError, UserError
from dovetail.core.formats import Format
from dovetail.io.load import load
from dovetail.models.formats import formats_of
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.unpack import unpack
from dovetail.tune.quantize.quantize import quantize
from dovetail.tune.quantize.rounding import WeightInputs, gptq, nearest

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)


@pytest.mark.parametrize("form", [Format("int4", 32, "float16"), Format("uint4", 32, "float16")])
def test_errors_of_products(form):
    """With correlated inputs, fitted scales lose less than plain rounding, and GPTQ less than these."""
    w = jnp.asarray(rng.normal(size=(48, 96)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(512, 24)) @ rng.normal(size=(24, 96)) + 0.1 * rng.normal(size=(512, 96)))
    inputs = WeightInputs(x.T @ x)

    def error(arrays: dict) -> float:
        return float(jnp.linalg.norm(x @ (unpack(form, arrays) - w).T))

    plain, fitted = error(pack(form, w)), error(nearest(form, w, inputs))
    compensated = error(gptq(form, w, inputs))
    assert fitted <= plain and compensated < 0.6 * fitted


def test_the_factor_is_that_of_the_inverse():
    x = rng.normal(size=(64, 12))
    inputs = WeightInputs(jnp.asarray(x.T @ x, jnp.float32))
    gram = np.asarray(inputs.gram)[np.ix_(inputs.order, inputs.order)]
    damped = gram + 0.01 * np.diag(gram).mean() * np.eye(12)
    np.testing.assert_allclose(inputs.factor.T @ inputs.factor, np.linalg.inv(damped), rtol=1e-3, atol=1e-6)
    assert not np.tril(inputs.factor, -1).any()


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_a_tiny_model(method, tmp_path):
    folder = model_folder(tmp_path)
    done = quantize(folder, tmp_path / "out", "int4", "fables:40", method, samples=16, length=32)
    assert done.before and done.after and abs(done.after / done.before - 1) < 0.02 and done.tokens == 2 * 31
    model, plain = load(tmp_path / "out", dtype="f32"), load(folder, dtype="f32")
    assert {form.name for _, form in formats_of(model.params)} == {"int4"}
    assert np.abs(model.logits([3, 4, 5]) - plain.logits([3, 4, 5])).mean() < 0.25
    assert "quantization_config" in json.loads((tmp_path / "out/config.json").read_text())


def test_errors_that_teach(tmp_path):
    folder = model_folder(tmp_path)
    with refuses("scheme", RecipeError, naming="int4"):
        quantize(folder, tmp_path / "out", "int5")
    with refuses("data", UserError, naming="--method rtn"):
        quantize(folder, tmp_path / "out", "int4")
    with refuses("data", UserError, naming="8 rows of 256"):
        quantize(folder, tmp_path / "out", "int4", "fables:1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with refuses("out", FileError):
        quantize(folder, tmp_path / "full", "int4", method="rtn")
