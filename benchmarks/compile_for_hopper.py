"""Compile steps of an engine, or of training, for an H200 on a machine without a GPU: CPU seconds, kernels and memory.

    pip install --no-deps --target CUDA jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    PYTHONPATH=CUDA python benchmarks/compile_for_hopper.py qwen3-30b-a3b --steps 8x8 512x512 256x8
    PYTHONPATH=CUDA python benchmarks/compile_for_hopper.py qwen3-0.6b --train 16x4096 remat=dots

The plugin must have the version of jax. A step is TOKENSxROWS: as many tokens as rows is a step of decode. ptxas
assembles every kernel, so that this also shows what lowering does not. XLA times no variants, for which it needs a GPU,
and calls of cuDNN are left out. `--dump FOLDER` writes each step's optimised HLO.

`--train ROWSxLENGTH` compiles the step that `dovetail bench train --documents 1` runs, cuDNN's attention included (but
for its workspace), and prints its memory beside the plan's. On an H200 the peak was within 1.2% of what is printed here
in seven of eight runs, and 7% above it with `accumulate=2` (docs/performance.md). `--kernels N` lists the operations
that read and write the most, with their time at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from dovetail.plan.hlo import Instruction, Module, read

os.environ["JAX_PLATFORMS"] = "cpu"

RATE = 4.17e12  # bytes per second of a copy on an H200, measured
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


def compile_training(device: Any, model: str, shape: str, overrides: list[str], dump: Path | None) -> tuple[Any, Any]:
    """Compile the step that `dovetail bench train` runs, with one document in a row; return the recipe and the step."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    from dovetail.cli.bench_train import _training
    from dovetail.ops import dispatch
    from dovetail.train.prepare import compiled, options_of, prepare

    dispatch.has_cudnn = fused.check_cudnn_version = lambda: 91900  # which ask for the library
    fused.check_is_flash_attention = lambda *_, **__: None
    batch, length = map(int, shape.split("x"))
    ready = prepare(*_training(model, batch, length, overrides), [device], "cuda")
    options = options_of(ready.placement, ready.platform, ready.settings.tokens_per_step)
    if dump:
        options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}  # who holds memory at the peak is in there
    return ready, compiled(ready.lower(ready.bucket(1)), options)


SILENT = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota", "while", "conditional", "call")
NAMED = re.compile(r'op_name="([^"]*)"')
TARGET_OF = re.compile(r'custom_call_target="([^"]*)"')


def moved(text: str) -> list[str]:
    """Return a line for each kind of operation: calls, bytes read and written, milliseconds at the copy's bandwidth."""
    module, total = read(text), defaultdict(lambda: [0, 0.0, 0.0])
    bodies = {name for one in itertools.chain(*module.computations.values()) if one.opcode == "while"
              for name in one.called}  # fmt: skip
    for name in (module.entry, *bodies):
        results = {one.name: one for one in module.computations[name]}
        for one in (one for one in results.values() if one.opcode not in SILENT):
            named, target = NAMED.search(one.rest), TARGET_OF.search(one.rest)
            shapes = ", ".join(f"{kind}{list(dims)}" for kind, dims in one.shapes)
            kind = f"{target[1] if target else one.opcode} {shapes} {named[1] if named else ''}"
            counted, times = total[kind], module.times[name]
            counted[0] += times
            counted[1] += times * (sum(results[x].bytes for x in one.operands) + _gathered(module, one))
            counted[2] += times * one.bytes
    ordered = sorted(total.items(), key=lambda one: -sum(one[1][1:]))
    return [f"{calls:4} x  {(read + wrote) / RATE * 1e3:6.2f} ms  {read / calls / 1e6:8,.0f} MB read "
            f"{wrote / calls / 1e6:7,.0f} written  {kind}" for kind, (calls, read, wrote) in ordered]  # fmt: skip


def _gathered(module: Module, one: Instruction) -> float:
    """Return how many bytes more a fusion reads of what it gathers from than that has."""
    if one.opcode != "fusion":
        return 0.0
    body = {inner.name: inner for inner in module.computations[one.called[0]]}
    gathers = [inner for inner in body.values() if inner.opcode == "gather"]
    return sum((inner.bytes - body[inner.operands[0]].bytes) * _inputs(body, inner.operands[0]) for inner in gathers)


def _inputs(body: dict[str, Instruction], name: str) -> int:
    """Return how many of a fusion's inputs have the size of this value and are read to compute it."""
    one = body[name]
    if one.opcode in ("parameter", "constant", "iota"):
        return int(one.opcode == "parameter")
    same = [other for other in one.operands if body[other].bytes >= one.bytes]
    return sum(_inputs(body, other) for other in same)


def print_training(ready: Any, step: Any, kernels: int) -> None:
    """Print the memory of a training step, its kinds of operations, and those that move the most bytes."""
    found, planned = step.memory_analysis(), ready.memory(1).total
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak = held + found.temp_size_in_bytes
    print("\n".join(ready.derived.explain()))
    print(
        f"arguments and outputs {held / 2**30:.2f} GiB + temporary {found.temp_size_in_bytes / 2**30:.2f} = "
        f"{peak / 2**30:.2f} GiB; planned {planned / 2**30:.2f}, {planned / peak - 1:+.1%}"
    )
    text = step.as_text()
    counts = Counter(re.findall(r" = [^=]*? (custom-call|fusion|sort|copy|scatter|while)\(", text))
    print(", ".join(f"{count} x {kind}" for kind, count in counts.most_common()))
    for one in moved(text)[:kernels]:
        print(one)


def main() -> None:
    """Compile the steps of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json, hub id or shipped architecture")
    parser.add_argument("--steps", nargs="+", default=["1x1", "8x8", "64x64", "512x512", "256x8"])
    parser.add_argument("--quantization", help="how weights are rounded, such as fp8")
    parser.add_argument("--dump", type=Path, help="folder for the optimised HLO")
    parser.add_argument("--train", metavar="ROWSxLENGTH", help="compile a step of training instead")
    parser.add_argument("--kernels", type=int, default=0, help="with --train: list so many kinds of operations")
    parser.add_argument("overrides", nargs="*", help="with --train: keys of the recipe, such as remat=dots")
    args = parser.parse_intermixed_args()
    device = hopper()
    if args.train:
        print_training(*compile_training(device, args.model, args.train, args.overrides, args.dump), args.kernels)
        return
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
