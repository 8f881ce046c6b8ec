"""Compile an engine's steps for an H200 on a machine without a GPU: CPU seconds, kernels and memory.

    pip install --no-deps --target CUDA jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    PYTHONPATH=CUDA python benchmarks/compile_for_hopper.py qwen3-30b-a3b --steps 8x8 512x512 256x8

The plugin must have the version of jax. A step is TOKENSxROWS: as many tokens as rows is a step of decode. ptxas
assembles every kernel, so that this also shows what lowering does not. XLA times no variants, for which it needs a GPU,
and calls of cuDNN are left out. `--dump FOLDER` writes each step's optimised HLO.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

# What XLA asks of a device, as an H200 answers
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  threads_per_core_limit: 2048 threads_per_block_limit: 1024
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}
"""


def hopper() -> Any:
    """Return a device that can only be compiled for."""
    import nvidia.cuda_nvcc  # type: ignore[import-not-found]  # of --target CUDA

    toolkit = next(iter(nvidia.cuda_nvcc.__path__))
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={toolkit}"
    from jax.experimental import topologies

    from dovetail.ops import capabilities

    capabilities.is_hopper = capabilities.has_fp8 = lambda: True  # which ask the devices of this machine
    given = dict(topology="1x1x1", target_config=TARGET)
    return topologies.get_topology_desc(platform="cuda", topology_name="h200", **given).devices[0]


def compile_step(made: Any, tokens: int, rows: int) -> tuple[list[float], Any]:
    """Return the CPU seconds to trace, to lower and to compile a step, and the step."""
    from dovetail.engine.device.batch import Shape

    shape = Shape(tokens, rows, made.programs.buckets.max_pages, 1)
    program = made.programs.of(shape, made.params, made.programs.pages(made.pages))
    with made.programs.device_kind():
        times = [time.process_time()]
        traced = program.function.trace(*program.abstract, **program.static)
        times.append(time.process_time())
        lowered = traced.lower()
        times.append(time.process_time())
        step = lowered.compile(compiler_options=program.options or None)
        times.append(time.process_time())
    return [b - a for a, b in itertools.pairwise(times)], step


def main() -> None:
    """Compile the steps of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json, hub id or shipped architecture")
    parser.add_argument("--steps", nargs="+", default=["1x1", "8x8", "64x64", "512x512", "256x8"])
    parser.add_argument("--quantization", help="how weights are rounded, such as fp8")
    parser.add_argument("--dump", type=Path, help="folder for the optimised HLO")
    args = parser.parse_args()
    device = hopper()
    from dovetail.engine.build import abstract_engine
    from dovetail.engine.options import EngineOptions
    from dovetail.io.load import outline

    options = EngineOptions(
        max_model_len=8192, max_num_seqs=512, kv_cache_memory_bytes=40 << 30, quantization=args.quantization
    )
    made = abstract_engine(outline(args.model)[0], options, [device])
    print("step         trace  lower  compile   all  (CPU s)   temporary  kernels and calls")
    for step in args.steps:
        seconds, compiled = compile_step(made, *map(int, step.split("x")))
        text = compiled.as_text()
        if args.dump:
            args.dump.mkdir(parents=True, exist_ok=True)
            (args.dump / f"{step}.txt").write_text(text)
        kinds = Counter(re.findall(r" = \S+ (fusion|custom-call|sort|copy)\(", text))
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
        print(
            f"{step:<12} {seconds[0]:5.1f}  {seconds[1]:5.1f}  {seconds[2]:7.1f} {sum(seconds):5.1f} "
            f"{memory:15,.0f} MiB  {counts}",
            flush=True,
        )


if __name__ == "__main__":
    main()
