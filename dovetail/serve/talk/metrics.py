"""Metrics for Prometheus, under vLLM's names, so that its dashboards work.

Three kinds of numbers and their text format are less code than a dependency on prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from dovetail.engine.interface import EngineStats
from dovetail.engine.spec.counts import SpeculationCounts

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_WHOLE = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of observed values by bucket."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]):
        self.name, self.help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, labels: str) -> Iterator[str]:
        """Return the histogram in Prometheus' text format."""
        yield from _head(self.name, self.help, "histogram")
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{self.name}_sum{{{labels}}} {self._sum}"
        yield f"{self.name}_count{{{labels}}} {total}"


class ServerMetrics:
    """Metrics that the HTTP process counts; those of the engine come from its EngineStats."""

    def __init__(self, model: str):
        name = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'engine="0",model_name="{name}"'
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN)
        self.between = Histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", _BETWEEN)
        self.whole = Histogram("vllm:e2e_request_latency_seconds", "Time of a whole request.", _WHOLE)
        self.prompt_tokens = self.generated_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(_REASONS, 0)

    def text(self, stats: EngineStats | None) -> str:
        """Return all metrics in Prometheus' text format; without the engine's if `stats` is None."""
        lines = [line for each in self._counters(stats) for line in self._number(*each)]
        if stats and stats.speculation:
            lines += self._speculation(stats.speculation)
        lines += _head("vllm:request_success_total", "Finished sequences.", "counter")
        for reason, count in self.finished.items():
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {count}')
        for histogram in (self.first_token, self.between, self.whole):
            lines += histogram.lines(self._labels)
        return "\n".join(lines) + "\n"

    def _counters(self, stats: EngineStats | None) -> Iterator[tuple[str, str, str, float]]:
        yield "vllm:prompt_tokens_total", "counter", "Prompt tokens.", self.prompt_tokens
        yield "vllm:generation_tokens_total", "counter", "Generated tokens.", self.generated_tokens
        if stats is None:
            return
        yield "vllm:num_requests_running", "gauge", "Sequences in the batch.", stats.running
        yield "vllm:num_requests_waiting", "gauge", "Waiting sequences.", stats.waiting
        yield "vllm:kv_cache_usage_perc", "gauge", "Used share of the KV cache, 0 to 1.", stats.pages_share
        yield "vllm:num_preemptions_total", "counter", "Preempted sequences.", stats.preemptions
        yield "vllm:prefix_cache_queries_total", "counter", "Prefix cache lookups, tokens.", stats.prefix_query_tokens
        yield "vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, tokens.", stats.prefix_hit_tokens
        yield "dovetail:compiled_steps_total", "counter", "Started compilations of steps.", stats.compiled
        yield "dovetail:compile_seconds_total", "counter", "Seconds of finished compilations.", stats.compile_seconds
        yield "dovetail:decode_step_seconds", "gauge", "Recent time of a decode step.", stats.decode_seconds
        if stats.predicted_most:
            predicted = "Predicted time of a decode step,"
            yield "dovetail:predicted_decode_step_seconds_least", "gauge", f"{predicted} best.", stats.predicted_least
            yield "dovetail:predicted_decode_step_seconds_most", "gauge", f"{predicted} worst.", stats.predicted_most

    def _speculation(self, counts: SpeculationCounts) -> Iterator[str]:
        yield from self._number("vllm:spec_decode_num_drafts_total", "counter", "Proposed drafts.", counts.drafts)
        proposed, kept = counts.draft_tokens, counts.accepted_tokens
        yield from self._number("vllm:spec_decode_num_draft_tokens_total", "counter", "Draft tokens.", proposed)
        yield from self._number("vllm:spec_decode_num_accepted_tokens_total", "counter", "Accepted tokens.", kept)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        yield from _head(name, "Accepted tokens by their position in the draft.", "counter")
        for position, count in enumerate(counts.accepted_per_pos):
            yield f'{name}{{{self._labels},position="{position}"}} {count}'

    def _number(self, name: str, kind: str, help: str, value: float) -> Iterator[str]:
        yield from _head(name, help, kind)
        yield f"{name}{{{self._labels}}} {value}"


def _head(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"
