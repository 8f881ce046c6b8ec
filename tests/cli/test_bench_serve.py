"""`dovetail bench serve` against a server with known delays."""

import asyncio
import itertools
import json
import math
import time
from xml.etree import ElementTree

import pytest
from fake_openai import Reply, says, serving
from refusals import refuses

from dovetail.cli.bench_images import RandomImages
from dovetail.cli.bench_load import Load, RequestRecord
from dovetail.cli.bench_serve import percentile, rates, run, summary
from dovetail.io.images.decode import as_image

pytestmark = pytest.mark.slow


def bench(fake, load, tmp_path, *, warm_up=0, vocab=0, model="", key="", timeout=30.0):
    """Run the bench and return the figures of --json."""
    file = tmp_path / "figures.json"
    run(fake.url, key, model, load, vocab, warm_up, timeout, str(tmp_path / "plot.svg"), str(file))
    return json.loads(file.read_text())


def timed(first, gap, count):
    return Reply([(first, "t"), *[(gap, "t")] * (count - 1)])


def test_the_requests_that_bench_sends(tmp_path):
    with serving(lambda i: says(*"abcd")) as fake:
        load = Load(requests=3, concurrency=1, input=7, output=4, seed=5)
        figures = bench(fake, load, tmp_path, warm_up=2, key="k3y")
        bench(fake, load, tmp_path, vocab=50)
    assert len(fake.bodies) == 2 + 3 + 3 and fake.headers[0]["authorization"] == "Bearer k3y"
    prompts = [body.pop("prompt") for body in fake.bodies]
    for body in fake.bodies:
        assert body == {
            "model": "fake", "max_tokens": 4, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
    assert all(len(prompt) == 7 and all(100 <= id < 300 for id in prompt) for prompt in prompts[:5])
    assert all(25 <= id < 50 for prompt in prompts[5:] for id in prompt)
    assert len({tuple(prompt) for prompt in prompts[:5]}) == 5  # none finds another's prefix
    assert (figures["sent"], figures["answered"], figures["output_tokens"], figures["errors"]) == (3, 3, 12, {})
    assert figures["load"] == {"requests": 3, "concurrency": 1, "input": 7, "output": 4, "seed": 5}


def test_random_images_are_sent_to_the_chat_route(tmp_path, capsys):
    load = Load(
        requests=4, concurrency=1, input=6, output=2, images=RandomImages.parse(2, "{(40, 60, 1): 1, (9, 9, 8): 0}")
    )
    chat = Reply([(0.0, {"role": "assistant", "content": ""}), (0.05, "a"), (0.0, "b")], usage=2)
    with serving(lambda i: chat) as fake:
        figures = bench(fake, load, tmp_path)
    urls = []
    for body in fake.bodies:
        *images, text = body["messages"][0]["content"]
        urls += [image["image_url"]["url"] for image in images]
        assert body["max_tokens"] == 2 and len(text["text"].split()) == 6 and "prompt" not in body
    assert {as_image(url).shape for url in urls} == {(40, 60, 3)} and len(set(urls)) == 8
    assert figures["load"]["images"] == {"count": 2, "buckets": {"40x60": 1.0}}
    assert figures["tokens_per_event"] == 1 and figures["ttft_ms"]["p50"] >= 50, "the role is not a token"
    assert "2 images and 6 + 2 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["{}", "256", "{(256, 256): 1}", "{(8, 8, 4): 1}", "{(0, 8, 1): 1}", "__import__('os')"]
)
def test_a_bucket_config_of_another_form_is_refused(text):
    with refuses("--random-mm-bucket-config"):
        RandomImages.parse(1, text)


def test_the_same_seed_is_the_same_load():
    one, same, other = (Load(requests=20, rate=5.0, seed=seed) for seed in (1, 1, 2))
    assert one.moments() == same.moments() != other.moments()
    assert one.bodies("m", 999, 3) == same.bodies("m", 999, 3) != other.bodies("m", 999, 3)
    assert one.bodies("m", 999, 3) != one.bodies("m", 999, 3, "warm-up")


def test_arrivals_are_poisson():
    """The mean gap is 1/rate, and so is its deviation."""
    moments = Load(requests=20_000, rate=4.0).moments()
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    assert moments[0] == 0 and mean == pytest.approx(0.25, rel=0.03)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.25, rel=0.05)
    assert Load(requests=3, rate=math.inf).moments() == [0, 0, 0]


def test_latencies_of_scripted_delays(tmp_path):
    """A busy machine makes latencies longer, never shorter."""
    with serving(lambda i: timed(0.1, 0.05, 4)) as fake:
        figures = bench(fake, Load(requests=4, concurrency=2, output=4), tmp_path)
    assert 100 <= figures["ttft_ms"]["p50"] < 250
    assert 45 <= figures["itl_ms"]["p50"] < 95
    assert 45 <= figures["tpot_ms"]["p50"] < 95
    assert 250 <= figures["e2e_ms"]["p50"] < 800
    assert 0.5 <= figures["seconds"] < 2.0
    assert figures["output_tokens_per_second"] == pytest.approx(16 / figures["seconds"])
    assert figures["requests_per_second"] == pytest.approx(4 / figures["seconds"])


def test_open_loop_a_late_server_does_not_slow_the_arrivals(tmp_path):
    """Each answer takes longer than all the arrivals together."""
    load = Load(requests=12, rate=40.0, output=1)
    planned = load.moments()
    assert planned[-1] < 0.8
    with serving(lambda i: timed(1.0, 0, 1)) as fake:
        figures = bench(fake, load, tmp_path)
    came = [at - fake.times[0] for at in fake.times]
    assert max(abs(a - b) for a, b in zip(came, planned, strict=True)) < 0.5  # one after the other: a second apart
    assert figures["late_ms"]["p50"] < 300 and figures["seconds"] < planned[-1] + 2.5


def test_concurrency_is_kept(tmp_path):
    with serving(lambda i: timed(0.1, 0, 1)) as fake:
        figures = bench(fake, Load(requests=6, concurrency=2, output=1), tmp_path)
    starts = sorted(fake.times)
    assert all(later - earlier >= 0.09 for earlier, later in zip(starts, starts[2:], strict=False))
    assert figures["seconds"] >= 0.3


def test_errors_are_counted_by_kind(tmp_path, capsys):
    replies = [
        says("a", "b"), Reply(status=429, message="the queue is full"), Reply(status=429, message="again"),
        says("a", ends=False), Reply([(0, b'data: {"error": {"message": "died"}}\n\n')]), says(),
        Reply([(3.0, "late")]), says("a", "b"),
    ]  # fmt: skip
    replies[5].finish_reason, replies[5].pieces = "", [(0, b"data: [DONE]\n\n")]
    with serving(lambda i: replies[i]) as fake:
        figures = bench(fake, Load(requests=8, concurrency=1, output=2), tmp_path, timeout=1.0)
    assert figures["errors"] == {"429": 2, "cut off": 1, "error event": 1, "no tokens": 1, "timeout": 1}
    assert (figures["sent"], figures["answered"], figures["output_tokens"]) == (8, 2, 4)
    out = capsys.readouterr().out
    assert "2 of 8 answered" in out and "2 failed, 429: the server refused (429): the queue is full" in out
    assert len(figures["each"]) == 8 and figures["each"][1]["error"] == "429"


def test_it_warms_up_at_the_loads_concurrency_until_nothing_is_compiled(tmp_path, capsys):
    """The server compiles at its requests 1, 2 and 8; then, at request 21, amid the measurement."""
    with serving(lambda i: says("a")) as fake:
        moments = [1, 2, 8, 21]
        fake.metrics = lambda: "".join(
            f'dovetail:{name}_total{{engine="0"}} {sum(len(fake.bodies) >= at for at in moments) * each}\n'
            for name, each in (("compiled_steps", 1), ("compile_seconds", 2.5))
        )
        figures = bench(fake, Load(requests=6, concurrency=3, output=1), tmp_path, warm_up=None)
        assert len(fake.bodies) == 1 + 3 * 6 + 6, "one, two rounds that compile, one that does not, the load"
        assert figures["compiled"] == {"steps": 1, "seconds": 2.5} and figures["answered"] == 6
        assert "compiled 1 steps during the measurement (2.5 s)" in " ".join(capsys.readouterr().out.split())
        prompts = [tuple(body["prompt"]) for body in fake.bodies]
        assert len(set(prompts)) == len(prompts), "none finds another's prefix"
        moments.clear()
        assert bench(fake, Load(requests=2, concurrency=2, output=1), tmp_path, warm_up=None)["compiled"]["steps"] == 0
        assert "during the measurement" not in capsys.readouterr().out


def test_all_fail_and_there_is_still_a_table(tmp_path, capsys):
    with serving(lambda i: Reply(status=500, message="no")) as fake:
        figures = bench(fake, Load(requests=2, rate=100.0), tmp_path)
    assert figures["ttft_ms"] == {} and figures["errors"] == {"500": 2}
    assert "–" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "plot.svg")


def test_several_tokens_per_event(tmp_path, capsys):
    with serving(lambda i: Reply([(0.0, "t"), (0.08, "t")], usage=9)) as fake:
        figures = bench(fake, Load(requests=1, concurrency=1, output=16), tmp_path)
    assert figures["output_tokens"] == 9 and figures["tokens_per_event"] == 4.5
    gap = figures["itl_ms"]["p50"]  # a busy machine may read the first event late
    assert 40 <= gap < 320 and figures["tpot_ms"]["p50"] == pytest.approx(gap / 8, rel=0.05)
    out = capsys.readouterr().out
    assert "compare TPOT, not ITL" in out and "1 completions were shorter" in out


REFUSED = {
    "a key": ({"models": Reply(status=401, message="a key is needed")}, {}, None, "--api-key"),
    "another model": ({}, {"model": "other"}, "--model", "choose one of fake"),
    "too long": ({}, {"load": Load(requests=1, concurrency=1, input=500, output=64)}, "--input", "512 tokens"),
    "a bad first": (
        {"reply": Reply(status=400, message="ignore_eos: unknown")},
        {"warm_up": 1},
        None,
        "ignore_eos",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_failure_of_every_request_is_reported_once(case, tmp_path):
    server, given, param, naming = REFUSED[case]
    options = {"load": Load(requests=1, concurrency=1), **given}
    started = serving(lambda i: server.get("reply", says("a")), server.get("models"))
    with started as fake, refuses(param, naming=naming):
        bench(fake, options.pop("load"), tmp_path, **options)
    assert len(fake.bodies) == options.get("warm_up", 0)


def test_a_server_that_is_not_there(tmp_path):
    with serving(lambda i: says("a")) as fake:
        pass
    with refuses(naming="dovetail serve"):
        bench(fake, Load(requests=1, concurrency=1), tmp_path)


def test_misuse_is_refused_before_the_load(tmp_path):
    for options in ({}, {"rate": 1.0, "concurrency": 1}):
        with refuses("--rate", naming="--concurrency"):
            Load(requests=1, **options)
    with refuses("--plot", naming="a.svg"):
        run("http://x", "", "", Load(requests=1, rate=1.0), 0, 0, 1.0, "a.png", "")


def test_an_interrupted_bench_reports_what_it_measured(tmp_path, monkeypatch, capsys):
    real = asyncio.run

    def interrupted(main):
        real(main)
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    with serving(lambda i: says("a")) as fake, pytest.raises(KeyboardInterrupt):
        bench(fake, Load(requests=1, concurrency=1, output=1), tmp_path)
    assert "1 of 1 answered" in capsys.readouterr().out and (tmp_path / "figures.json").exists()


def test_percentiles():
    import numpy as np

    values = [5.0, 1.0, 4.0, 2.0, 10.0]
    for q in (0, 50, 90, 99, 100):
        assert percentile(values, q) == pytest.approx(np.percentile(values, q))
    assert summary([]) == {} and summary([0.25]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 250.0)


def test_tokens_over_time():
    records = [RequestRecord(0, 0, [0.1, 0.9, 3.9], end=4.0, tokens=6), RequestRecord(0, 0)]
    assert rates(records, 4.0, bins=4) == [4.0, 0.0, 0.0, 2.0]


def test_the_plot_shows_latency_histograms(tmp_path):
    with serving(lambda i: timed(0.02 * i, 0.01, 3)) as fake:
        bench(fake, Load(requests=5, concurrency=1, output=3), tmp_path, model="fake")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "fake: 5 requests, 1 at a time, 128 + 3 tokens, seed 0"
    assert any(t.startswith("TTFT") and "p99" in t for t in texts) and any(t.startswith("E2E") for t in texts)
    bars = [float(e.get("height", 0)) for e in root.iter() if e.get("class") == "bar"]
    assert len(bars) == 40 + 40 + 60 and max(bars) > 200 and min(bars) >= 0


def test_many_at_once_are_all_counted(tmp_path):
    start = time.perf_counter()
    with serving(lambda i: timed(0.2, 0.01, 3)) as fake:
        figures = bench(fake, Load(requests=60, rate=math.inf, output=3), tmp_path)
    assert figures["answered"] == 60 and figures["output_tokens"] == 180 and figures["load"]["rate"] == "inf"
    assert time.perf_counter() - start < 10  # one after the other they would take 13 s
