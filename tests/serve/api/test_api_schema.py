"""Random requests from the server's own OpenAPI schema, valid and invalid, never give a 5xx."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from later import later
from serve.servers import Script, running

from dovetail.serve.config import ServerLimits

schemathesis = later("schemathesis")

pytestmark = pytest.mark.slow

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/score", "/tokenize", "/detokenize", "/sleep", "/update_weights",
)  # fmt: skip
BOUNDED = settings(
    max_examples=3, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tokenizer):
    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer, admin_key="boss", limits=ServerLimits(request_timeout=20)) as found:
        yield found


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json", timeout=60).json())


@pytest.mark.parametrize("mode", ["fits", "breaks"])
@pytest.mark.parametrize("path", PATHS)
def test_no_request_is_a_server_error(server, document, path, mode):
    operation = document[path]["POST"]
    modes = schemathesis.GenerationMode
    mode = {"fits": modes.POSITIVE, "breaks": modes.NEGATIVE}[mode]

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        headers = {"authorization": "Bearer boss"}
        answer = case.call(base_url=server.url, headers=headers, timeout=20)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert "error" in answer.json()

    ask()
