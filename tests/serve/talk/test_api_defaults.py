"""A model's generation_config.json gives the defaults of requests."""

from __future__ import annotations

import json

import httpx
import pytest
from refusals import refuses
from serve.servers import Script, running
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.core.errors import CheckpointError
from dovetail.serve.http.start import read_defaults

pytestmark = pytest.mark.slow

FILE = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 40,
    "do_sample": True, "eos_token_id": [2, 3], "transformers_version": "5.0",
}  # fmt: skip
SAID = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 40
}  # fmt: skip
TALK = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def server(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_text(json.dumps(FILE))
    found = read_defaults(folder)
    assert found == SAID

    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer, defaults=found) as server:
        yield server


def asked(server, path: str, **more) -> dict:
    answer = httpx.post(server.url + path, json=ROUTES[path] | more)
    assert answer.status_code == 200, answer.text
    params = server.engine.asked[-1][1]
    return {name: getattr(params, name) for name in SAID}


@pytest.mark.parametrize("path", ROUTES)
def test_defaults_apply_where_a_request_sets_nothing(server, path):
    most = {"/v1/completions": 16, "/v1/messages": 9}.get(path, 40)  # OpenAI's default; required there
    assert asked(server, path) == SAID | {"max_tokens": most}


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_overrides_the_defaults(server, path):
    own = {"temperature": 0.0, "top_p": 1.0}
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert asked(server, path, **own, **{most: 50}) == SAID | own | {"max_tokens": 50}


def test_parameters_absent_from_the_file_keep_the_requests_values(server):
    own = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert asked(server, "/v1/chat/completions", **own) == SAID | own


def test_a_missing_or_wrong_generation_config(tmp_path):
    assert read_defaults(tmp_path) == read_defaults(tmp_path / "model.gguf") == {}
    for wrong in ({"temperature": "hot"}, {"top_p": 7}, [1], {"top_k": -3}):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with refuses("generation_config", CheckpointError, naming="--generation-config none"):
            read_defaults(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None}))
    assert read_defaults(tmp_path) == {}


@pytest.mark.parametrize(("choice", "expected"), [("auto", {"temperature": 0.6}), ("none", {})])
def test_the_flag(monkeypatch, tmp_path, choice, expected):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    seen = {}

    async def serve(path, options, config, sock, on_ready, progress):
        seen.update(defaults=dict(config.defaults), step=config.limits.step_timeout)

    monkeypatch.setattr("dovetail.serve.http.server.serve", serve)
    flags = ["serve", str(tmp_path), "--port", "0", "--generation-config", choice, "--step-timeout", "7"]
    result = CliRunner().invoke(app, flags, env={"DOVETAIL_API_KEY": "", "DOVETAIL_ADMIN_KEY": ""})
    assert result.exit_code == 0 and seen == {"defaults": expected, "step": 7.0}, result.output
    refused = CliRunner().invoke(app, ["serve", str(tmp_path), "--generation-config", "vllm"])
    assert "auto or none" in str(refused.exception)
