"""`dovetail compile serve MODEL`: the corners of an engine's steps compiled for a topology."""

from typing import Any

from dovetail.cli.compile_table import Report, compiled, gib, show


def compile_serve(model: str, topology, options: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console

    from dovetail.engine.ahead import ahead
    from dovetail.engine.options import EngineOptions
    from dovetail.io.outline import outline
    from dovetail.plan.topology import tpu_devices

    (cfg, dtype), devices = outline(model), tpu_devices(topology)
    chosen = dict(dtype=options["dtype"] or dtype, tensor_parallel=options["tensor_parallel"] or len(devices))
    given = EngineOptions.of({**options, **chosen})
    console, reports = Console(highlight=False, stderr=as_json), []
    with console.status(f"compiling {model}'s largest step for {topology}") as status:
        made, *_ = compiled(lambda _: ahead(cfg, given, devices))
        for shape in made.corners():
            status.update(f"compiling a step of {shape.tokens} tokens in {shape.rows} rows")
            found = compiled(lambda told, shape=shape: made.compile(shape, told))
            reports.append(report(model, made, shape, *found))
    tokens = made.pages * made.programs.page_size
    console.print(
        f"{model} on {given.tensor_parallel} of {topology}: {gib(made.weight_bytes)} of weights and "
        f"{gib(made.pool_bytes)} of KV pages on each, for {tokens:,} tokens in pages of {made.programs.page_size}"
    )
    head = dict(
        model=model, topology=str(topology), tensor_parallel=given.tensor_parallel, weight_bytes=made.weight_bytes,
        pool_bytes=made.pool_bytes, pages=made.pages, page_size=made.programs.page_size,
    )  # fmt: skip
    show(head, reports, as_json)


def report(model: str, made, shape, program, assigned: int | None, seconds: float) -> Report:
    from dovetail.core.chips import chip_of
    from dovetail.plan.counted import count
    from dovetail.plan.roofline import predict

    devices = made.programs.devices
    chip = chip_of(devices[0])
    counted = count(program, {"tensor": len(devices)}, devices, made.layer_shapes, assigned)
    flops = made.flops(shape)
    predicted = predict(chip, flops, made.moved(shape), counted.traffic, devices) if chip else None
    estimated = {"weights": made.weight_bytes, "KV pages": made.pool_bytes}
    estimated |= {"arguments": made.argument_bytes(shape), "FLOPs": flops}
    copies = counted.pool_copies
    notes = {
        "pool copied": f"{len(copies)} x: {copies[0]}" if copies else "no",
        "paged attention": "; ".join(made.kernels(shape)),
    }
    kind = "decode" if shape.is_decode else "prompts"
    title = f"{model}, {kind}: {shape.tokens} tokens in {shape.rows} rows"
    return Report(title, counted, predicted, estimated, chip.device_hbm if chip else None, seconds, notes)
