"""Speculative decoding over HTTP: the same answers as without it, and its counts in each answer."""

from __future__ import annotations

import sys

import httpx
import jax
import jax.numpy as jnp
import msgspec
import pytest
from data.conftest import CHATML, small_tokenizer
from few_programs import APPLY
from later import later
from serve.servers import MODEL, running
from tune.small_models import CONFIG

from dovetail.core.spec import init
from dovetail.engine.interface import SpecDecodeMetrics
from dovetail.engine.options import EngineOptions
from dovetail.io.load import save
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.serve.config import ServerConfig
from dovetail.serve.remote import child
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.remote.wire import Delta, DeltaTimes

anthropic = later("anthropic")
openai = later("openai")
pytestmark = pytest.mark.slow

TOOLS_AND_CHATML = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
HI = [{"role": "user", "content": "the one and the other and the one and the other"}]
ASK = dict(model=MODEL, messages=HI, temperature=0, max_tokens=48)

# The engine's process, which speculates at every step and waits for the compiler, however fast the machine is.
_ALWAYS = f"""
import sys
from dovetail.engine.device.runner import Runner
from dovetail.engine.spec.draft_length import DraftLength
from dovetail.serve.remote import process

def ready(self, rows, drafts):
    self.steps.all([self.buckets.verify(rows, drafts)])
    return True

Runner.drafts_ready = ready
DraftLength.choose = lambda self, rows: self.choices[-1]
{APPLY}
process.main(int(sys.argv[1]))
"""


@pytest.fixture(scope="module", params=[pytest.param("ngram", marks=pytest.mark.thorough), "suffix"])
def server(request, tmp_path_factory):
    tokenizer = small_tokenizer(TOOLS_AND_CHATML)
    folder = tmp_path_factory.mktemp("speculation") / "model"
    cfg = parse_config(CONFIG | {"max_position_embeddings": 512}, "here")
    save(folder, cfg, init(spec(cfg), jax.random.key(0), jnp.float32, 0.1), tokenizer)

    async def engine():
        config = {"method": request.param, "num_speculative_tokens": 3}
        sizes = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, max_decode_steps=1)
        options = EngineOptions(**sizes, speculative_config=config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child, "COMMAND", (sys.executable, "-c", _ALWAYS))
            return await EngineClient.start(folder, options)

    shown = dict(per_request_spec_decode_metrics="summary", tool_call_parser="hermes")
    with running(engine, tokenizer, **shown) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def counts(answer) -> dict:
    found = answer.metrics["speculative_decoding"]
    names = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
    steps, drafts, kept = (found[name] for name in names)
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == steps and sum(j * count for j, count in enumerate(histogram)) == kept
    assert 0 <= kept <= drafts <= 3 * steps and steps > 0
    assert found["mean_acceptance_length"] == pytest.approx(1 + kept / steps)
    assert found["draft_acceptance_rate"] == pytest.approx(kept / drafts)
    return found


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"], "additionalProperties": False,
}}}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
          "required": ["name", "ok"], "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="text"),
        pytest.param({"temperature": 0.8, "seed": 3, "n": 3}, id="sampled, n=3"),
        pytest.param({"tools": [TOOL], "tool_choice": "required"}, id="tools"),
        pytest.param({"response_format": FORMAT}, id="json_schema"),
        pytest.param({"stop": ["th", "e"]}, id="stop strings"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, id="logprobs"),
    ],
)
def test_the_answer_is_the_one_without_speculation(client, more):
    asked = ASK | more
    plain = client.chat.completions.create(**asked, extra_body={"speculation": False})
    for _ in range(2):  # the second prompt is in the prefix cache
        drafted = client.chat.completions.create(**asked)
        assert [_shown(each) for each in drafted.choices] == [_shown(each) for each in plain.choices]
        assert drafted.usage.completion_tokens == plain.usage.completion_tokens
    assert "metrics" not in plain.to_dict() and counts(drafted)


def _shown(choice) -> tuple:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    tokens = [each.token for each in choice.logprobs.content] if choice.logprobs else None
    return choice.message.content, calls, choice.finish_reason, tokens


def test_draft_tokens_are_accepted_and_counted_for_each_answer(client):
    found = counts(client.chat.completions.create(**ASK, logprobs=True))
    assert found["num_accepted_draft_tokens"] > 0 and found["num_spec_steps"] < 48
    several = client.chat.completions.create(**ASK | {"n": 2, "temperature": 0.5, "seed": 1})
    assert counts(several)["num_spec_steps"] > 0
    text = client.completions.create(model=MODEL, prompt="the one and the one and the", temperature=0, max_tokens=32)
    assert counts(text)["num_accepted_draft_tokens"] > 0


def test_metrics_have_vllms_counters(server, client):
    def counters() -> dict[str, float]:
        return _sums(httpx.get(f"{server.url}/metrics").text.splitlines())

    before, found = counters(), counts(client.chat.completions.create(**ASK))
    gained = {name: value - before[name] for name, value in counters().items()}
    assert gained.keys() == {f"vllm:spec_decode_num_{name}_total" for name in COUNTERS}
    drafts, tokens, accepted, by_position = (gained[f"vllm:spec_decode_num_{name}_total"] for name in COUNTERS)
    assert (drafts, tokens) == (found["num_spec_steps"], found["num_draft_tokens"])
    assert 0 < accepted == by_position <= found["num_accepted_draft_tokens"]


COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")


def _sums(lines: list[str]) -> dict[str, float]:
    """Return each counter's sum over its labels."""
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("vllm:spec_decode"):
            name, value = line.split("{")[0], float(line.split()[-1])
            found[name] = found.get(name, 0.0) + value
    return found


def test_a_stream_has_the_counts_beside_its_usage(client):
    whole = client.chat.completions.create(**ASK)
    *chunks, last = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    assert last.usage == whole.usage and counts(last) and not last.choices
    assert not any("metrics" in chunk.to_dict() for chunk in chunks)
    asked = dict(model=MODEL, prompt="the one and the one", temperature=0, max_tokens=32, stream=True)
    *_, last = client.completions.create(**asked, stream_options={"include_usage": True})
    assert counts(last)


def test_responses_and_messages_have_the_counts_too(server, client):
    asked = dict(model=MODEL, input=HI[0]["content"], temperature=0, max_output_tokens=48)
    assert counts(client.responses.create(**asked))
    *_, last = client.responses.create(**asked, stream=True)
    assert counts(last.response)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        said = dict(model=MODEL, messages=HI, extra_body={"temperature": 0}, max_tokens=48)
        assert counts(claude.messages.create(**said))
        events = list(claude.messages.create(**said, stream=True))
    assert counts(next(each for each in events if each.type == "message_delta"))


def test_counts_travel_between_processes():
    sent = Delta("a", 0, [1, 2, 3], DeltaTimes(0.0), spec_decode_metrics=SpecDecodeMetrics((1, 1, 2), 12))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Delta)
    assert found.spec_decode_metrics == SpecDecodeMetrics((1, 1, 2), 12)
    assert found.spec_decode_metrics.num_accepted_draft_tokens == 5
    assert found.cut(1).spec_decode_metrics == found.spec_decode_metrics


def test_counts_are_off_by_default():
    assert ServerConfig(names=("m",)).per_request_spec_decode_metrics == "none"
