"""README.md and docs/*.md as a reader follows them: a page's commands in order, in one folder, by the real `dovetail`
command, each shrunk to a model of a few thousand weights and one step; its YAML blocks; its Python snippets."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from docs.blocks import PAGES, Command, blocks, commands
from docs.runs import PREAMBLES, as_module, category
from docs.typed import PLACEHOLDERS, TRAININGS, kind_of, name_files, write_recipe
from tune.small_models import chats, model_folder, pairs

pytestmark = pytest.mark.thorough
MODEL, PUBLISHED = "model", "smollm2-135m"  # the small one stands for the one that the pages name
KEY = "a-key-of-the-readers"
STEP = ["steps=1", "precision.compute=f32", "schedule.warmup=0"]
ROWS = ["batch=8", "length=64"]
SMALL = {
    "pretrain": [*STEP, *ROWS],
    "rl": [*STEP, "prompts=2", "num_generations=4", "max_prompt_length=64", "max_completion_length=8"],
    "serve": ["--max-model-len", "128", "--max-num-seqs", "4", "--dtype", "f32"],
    "bench": ["--requests", "4", "--rate", "20", "--input", "8", "--output", "4", "--api-key", KEY],
} | {kind: [*STEP, *ROWS] for kind in ("sft", "dpo", "reward", "distill")}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    """What the pages take for granted: the reader's data, models and earlier runs."""
    shutil.move(model_folder(tmp_path), tmp_path / MODEL)
    for name in ("student", "teacher", "DIR", "data/tokenizer", "runs/form/export/step_1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / MODEL)
    texts = [{"text": "Once upon a time there was a fox. " * 9, "content": "def f(): return 1\n" * 9}] * 40
    prompts = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(24)]
    dialogues = [{"dialogue": chat["messages"]} for chat in chats()]
    for name, records in {
        "chats.jsonl": chats(), "pairs.jsonl": pairs(), "prompts.jsonl": prompts, "sums.jsonl": prompts,
        "texts.jsonl": texts, "more/one.jsonl": texts, "my-dataset/one.jsonl": dialogues, "data/code.jsonl": texts,
        "web/one.jsonl": texts, "data/web/one.jsonl": texts,
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    (tmp_path / "keys.txt").write_text(f"{KEY}\n")
    (tmp_path / "keys.txt").chmod(0o600)
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts" / "one.txt").write_text("A fox went out. " * 20)
    (tmp_path / "code").mkdir()
    _write_parquet(tmp_path / "code" / "one.parquet", texts)
    return tmp_path


def _write_parquet(path: Path, records: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


@pytest.fixture
def env(folder) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "DOVETAIL_JOBS": str(folder / "jobs"), "DOVETAIL_ADMIN_KEY": "boss"}


def shrunk(words: list[str], port: int) -> list[str]:
    """Return the command with the small model, a step, and a port that is free."""
    if words[1] == "recipes":
        return words
    words = [re.sub(r"step_\d+", "step_1", re.sub(rf"{PUBLISHED}(?!-)", MODEL, word)) for word in words]
    words = [re.sub(r"^epochs=.*", "steps=1", PLACEHOLDERS.get(word, word)) for word in words]
    words = [re.sub(r"(?:localhost|127\.0\.0\.1):8000", f"127.0.0.1:{port}", word) for word in words]
    words = [word.replace("=DIR", "=adapter").replace('"DIR"', '"adapter"') for word in words]
    kind, rest = words[1], words[2:]
    if kind in TRAININGS:
        small = SMALL[kind] if rest[0] == "tiny" else [*SMALL[kind], f"model={MODEL}"]
        rest = [re.sub(r"^\d+$", "1", word) if rest[i - 1] == "--export-hf" else word for i, word in enumerate(rest)]
        return [*words[:2], *rest, *small]
    if kind == "serve":
        rest = rest if rest and not rest[0].startswith("-") else [MODEL, *rest]
        return ["dovetail", "serve", *rest, *SMALL["serve"], "--host", "127.0.0.1", "--port", str(port)]
    return [*words, *SMALL.get(kind, [])]


def run(words: list[str], folder: Path, env: dict[str, str], fails: bool = False) -> str:
    done = subprocess.run(
        words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900
    )
    assert bool(done.returncode) == fails, f"{' '.join(words)}\n{done.stdout[-3000:]}"
    return done.stdout


class Server:
    """The last that a page has started; `curl` asks it."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self._folder, self._env, self._process = folder, env, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self, words: list[str]) -> None:
        self.stop()
        log = (self._folder / "serve.log").open("w")
        self._process = subprocess.Popen(words, cwd=self._folder, env=self._env, stdout=log, stderr=log)
        log.close()
        until = time.monotonic() + 600
        while not self._is_ready():
            said = (self._folder / "serve.log").read_text()
            assert self._process.poll() is None and time.monotonic() < until, f"{' '.join(words)}\n{said[-3000:]}"
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(timeout=120)


@pytest.fixture
def server(folder, env):
    found = Server(folder, env)
    yield found
    found.stop()


def is_run(command: Command) -> bool:
    try:
        return not category(command)
    except AssertionError:  # test_docs_read fails by it
        return False


RUNNABLE = {page: [command for command in commands(page) if is_run(command)] for page in PAGES}


@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE[page] and page != "docs/jobs.md"])
def test_a_pages_commands_run(page, folder, env, server):
    name_files(page, folder)
    if any("=DIR" in word for command in RUNNABLE[page] for word in command.words):
        adapter = ["model=model", "data.path=chats.jsonl", "lora.r=4", *SMALL["sft"], "--run-dir", "runs/adapter"]
        run(["dovetail", "sft", *adapter], folder, env)
        (folder / "adapter").symlink_to(folder / "runs/adapter/export/step_1")
    for command in RUNNABLE[page]:
        words = shrunk(list(command.words), server.port)
        if words[1] == "serve":
            server.start(words)
        elif words[0] == "curl":
            said = run([*words, "--silent", "--show-error", "--fail-with-body"], folder, env)
            assert json.loads(said), command.where
        else:
            run(words, folder, env)


def test_the_commands_of_jobs_run(folder, env):
    """On this machine; the queue's lines as a shell runs them."""
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "choose.py").write_text("print('lr 3e-3 is best')\n")
    for command in RUNNABLE["docs/jobs.md"]:
        if "queue" not in command.words:
            said = run(list(command.words), folder, env, fails=bool(command.output))
            assert all(line in said for line in command.output if line), said
    queue = next(block for block in blocks("docs/jobs.md", "console") if "job queue add" in block.text)
    lines = [line for line in queue.text.splitlines() if not line.startswith("$ export")]
    script = "".join(f"{line[2:]}\n" for line in lines if line.startswith("$ "))
    said = run(["bash", "-e", "-c", script], folder, env)
    assert all(line in said for line in lines if line and not line.startswith("$ ")), said


RECIPES = [block for page in PAGES for block in blocks(page, "yaml") if kind_of(block) != "job"]  # those: Google Cloud


@pytest.mark.parametrize("block", RECIPES, ids=lambda block: block.where)
def test_a_recipe_runs(block, folder, env):
    kind = write_recipe(block, folder / "block.yaml", MODEL)
    run(shrunk(["dovetail", kind, "block.yaml", "--run-dir", "run"], 0), folder, env)
    assert json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


# --- Python -----------------------------------------------------------------------------------------------------------

ROWS_SMALL = "batch=8, length=64, precision={'compute': 'f32'}"
SMALLER = {
    PUBLISHED: MODEL, r"\bsteps=\d+": "steps=1", r"\bepochs=1": "steps=1", r"step_\d+": "step_1",
    r'"warmup": \d+': '"warmup": 0', r"max_model_len=\d+": "max_model_len=128", r"length=1024": "length=64",
    r"dt\.(sft|reward|dpo|distill)\(model": rf"dt.\1({ROWS_SMALL}, model",
    r"dt\.rl\(model": (
        "dt.rl(prompts=2, max_prompt_length=64, max_completion_length=8, precision={'compute': 'f32'}, model"
    ),
    r'dt\.pretrain\("tiny"': 'dt.pretrain("tiny", batch=8, length=64', r"\[\.\.\.\]": "[1.0] * stats.documents",
}  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_a_pages_snippets_run(page, folder, env):
    """In order; each knows what those before it import."""
    preamble = PREAMBLES.get(page, {})
    if "skip" in preamble:
        pytest.skip(preamble["skip"])
    imported = preamble.get("imports", "")
    for block in blocks(page, "python"):
        source = as_module(block)
        if "openai" not in source:  # a client: tests/serve/test_api_clients.py
            for long, short in SMALLER.items():
                source = re.sub(long, short, source)
            script = f"MODEL = {MODEL!r}\n{imported}{preamble.get('before', '')}{source}"
            (folder / "snippet.py").write_text(script)
            run([sys.executable, "snippet.py"], folder, env)
        imports = [node for node in ast.parse(as_module(block)).body if isinstance(node, ast.Import | ast.ImportFrom)]
        imported += "".join(f"{ast.unparse(node)}\n" for node in imports)
