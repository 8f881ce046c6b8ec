"""`dovetail serve` as a process: it starts, prints its address, answers, and ends at SIGTERM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from later import later
from safetensors.numpy import save_file
from serve.servers import MODEL, Script, running
from typer.testing import CliRunner
from xla_flags import flags

from dovetail.cli.main import app
from dovetail.cli.serve import _show

openai = later("openai")

pytestmark = pytest.mark.slow


def command(*arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "dovetail", "serve", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env,
    )  # fmt: skip


def test_it_serves_until_sigterm(first_layers):
    size = ("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")
    words = (str(first_layers), "--port", "0", "--served-model-name", "smol", *size)
    process = command(*words, DOVETAIL_API_KEY="key", XLA_FLAGS=flags(1))
    assert process.stdout is not None
    try:
        printed = ""
        while (found := re.search(r"http://127\.0\.0\.1:\d+", printed)) is None:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        url = found[0]
        _wait_for(url)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key")
        hello = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model="smol", messages=hello, max_tokens=4, temperature=0)
        assert answer.choices[0].message.content
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM, "as any program that this signal ends"
        printed += process.stdout.read()
        assert "Traceback" not in printed
        for line in (
            "starting the engine process for", "reading the weights of", r"loaded the weights in \d+\.\d s",
            r"\d+ steps ready after \d+\.\d s", rf"ready at {url} after \d+\.\d s", r"stopped after \d+\.\d s",
        ):  # fmt: skip
            assert re.search(rf"^[-\d]+ [:,\d]+ .*{line}", printed, re.M), line
        compiling, compiled = (re.findall(rf"{word} (a step of .* rows|the sampler.* rows)", printed) for word in (
            "compiling", "compiled"))  # fmt: skip
        assert set(compiled) <= set(compiling)  # none if an earlier start kept them; some may go on when it ends
        assert children and not any(_is_running(int(pid)) for pid in children)  # the engine ended with it
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _wait_for(url: str) -> None:
    for _ in range(200):
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("it printed its address, and does not answer")


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("key", ["", "s3cret"], ids=["open", "with a key"])
def test_the_printed_example_runs(tokenizer, monkeypatch, capsys, key):
    async def engine():
        return Script(tokenizer)

    keys = (key,) if key else ()
    monkeypatch.delenv("DOVETAIL_API_KEY", raising=False)
    with running(engine, tokenizer, api_keys=keys) as server:
        config = replace(server.app.state.service.config, port=int(server.url.rpartition(":")[2]))
        _show(MODEL, config, SimpleNamespace(start_seconds=1.0, description="room", prediction=""))
        printed = capsys.readouterr().out
        assert "s3cret" not in printed and ("Both read the key" in printed) == bool(key)
        if key:
            monkeypatch.setenv("DOVETAIL_API_KEY", key)
        python = re.search(r"^(import os\n)?from openai.*?^client\.chat.*?$", printed, re.M | re.S)
        assert python is not None, printed
        exec(python[0], names := {})
        names["client"].close()
        curl = re.search(r"^curl .*\\\n.*$", printed, re.M)
        assert curl is not None, printed
        if shutil.which("curl"):
            answer = subprocess.run(curl[0], shell=True, capture_output=True, text=True, timeout=30)
            assert '"content":"Fine."' in answer.stdout, answer


def test_a_seed_is_the_engines_only_where_it_was_given(smollm2_gguf, monkeypatch):
    found = []
    monkeypatch.setattr("dovetail.serve.http.server.serve", lambda path, options, *_: found.append(options.seed))
    monkeypatch.setattr("dovetail.serve.http.server.run", lambda _: None)
    for arguments in ([], ["--seed", "5"]):
        result = CliRunner().invoke(app, ["serve", str(smollm2_gguf), "--port", "0", *arguments])
        assert result.exit_code == 0, result.output
    assert found == [None, 5]


def refused(*arguments: str, **env: str) -> str:
    result = CliRunner().invoke(
        app, ["serve", *arguments], env={"DOVETAIL_API_KEY": "", "DOVETAIL_ADMIN_KEY": ""} | env
    )
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


def adapter(folder: Path, **said) -> str:
    """Write PEFT's adapter_config.json beside an empty file of weights, and return the folder."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | said))
    save_file({}, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture
def no_engine(monkeypatch):
    """Fail if an engine's process is started: the options are checked before."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("an engine was started"))


def test_unservable_options_are_refused_before_the_engine_starts(no_engine, smollm2_gguf, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}: another program" in refused(str(smollm2_gguf), "--port", port)
    assert "--admin needs one admin key" in refused("--admin")
    assert "must differ" in refused("--admin", DOVETAIL_API_KEY="a", DOVETAIL_ADMIN_KEY="a")
    empty = tmp_path / "keys"
    empty.write_text("\n")
    assert "has no key" in refused("--api-key-file", str(empty))
    assert "cannot be read (No such file" in refused("--api-key-file", str(tmp_path / "none"))
    assert "printable ASCII" in refused("--api-key", "clé")


@pytest.mark.parametrize("arguments, sentence", [
    ("--tool-call-parser hermez", "--tool-call-parser: the tool call parser must be one of deepseek_v3"),
    ("--reasoning-parser r1", "--reasoning-parser: the reasoning parser must be one of deepseek_r1"),
    ("--max-num-batched-tokens 1 --max-num-seqs 5", "`max_num_batched_tokens` must be at least max_num_seqs"),
    ("--profile-dir {file}/traces --admin", "--profile-dir must be a folder that can be written to, got {file}/traces"),
    ("--profile-dir {tmp}/traces", "--profile-dir requires --admin"),
    ("--host 0.0.0.0", "--host 0.0.0.0 without an API key lets everyone"),
    ("--host ::", "pass --allow-unauthenticated"),
    ("--lora-modules a={tmp}/none", "--lora-modules a: {tmp}/none is not an adapter"),
    ("--lora-modules a={lora} --max-lora-rank 4", "--lora-modules a: {lora}: the adapter's rank is 8"),
    ("--lora-modules a={lora} --max-loras 0", "`max_loras` must be at least the number of lora_modules, got 0"),
    ("--lora-modules a={dora}", "--lora-modules a: {dora} is a DoRA adapter, which is not served"),
    ("--lora-modules a={broken}", "--lora-modules a: {broken}/adapter_config.json is not valid JSON"),
    ("--lora-modules a={cut}", "--lora-modules a: {cut}/adapter_model.safetensors is not a whole safetensors file"),
    ("--dtype float99", "`dtype` must be one of"),
    ("--scheduling-policy lifo", "`scheduling_policy` must be one of"),
    ("--policy priority", "there is no option --policy: it is called --scheduling-policy"),
    ("--allowed-origins example.com", "--allowed-origins must be * or an origin"),
    ("--host no-such-host.invalid --allow-unauthenticated", "cannot listen on no-such-host.invalid:0"),
    ("--request-timeout inf", "`request_timeout` must be a number above 0 and at most 2,592,000, got inf"),
])  # fmt: skip
def test_a_wrong_flag_is_a_sentence_and_starts_no_engine(no_engine, smollm2_gguf, tmp_path, arguments, sentence):
    names = {"tmp": str(tmp_path), "file": str(tmp_path / "file"), "broken": adapter(tmp_path / "broken")}
    names |= {"lora": adapter(tmp_path / "lora"), "dora": adapter(tmp_path / "dora", use_dora=True)}
    names["cut"] = adapter(tmp_path / "cut")
    (tmp_path / "file").touch()
    (tmp_path / "broken/adapter_config.json").write_text("{")
    (tmp_path / "cut/adapter_model.safetensors").write_bytes(b"")
    given = (part.format(**names) for part in arguments.split())
    said = refused(str(smollm2_gguf), "--port", "0", *given, DOVETAIL_ADMIN_KEY="boss")
    assert sentence.format(**names) in said, said
