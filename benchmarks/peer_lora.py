"""LoRA fine-tuning of a shape by PyTorch and PEFT: tokens per second, beside `dovetail bench train lora.r=16`.

    python benchmarks/peer_lora.py DIR [--batch 8] [--length 4096] [--micro 1 2] [--rank 16] [--nf4]

DIR has a config.json. Random weights in bf16, all projections adapted, adapters in f32, AdamW, transformers' own model
with SDPA; with and without gradient checkpointing, for each number of rows at a time. `--nf4` holds the layers' weights
as bitsandbytes does for QLoRA, with nested scales, beside `dovetail bench train lora.r=16 quantization=nf4`.
"""

from __future__ import annotations

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", nargs="+", default=["off", "on"])
    parser.add_argument("--nf4", action="store_true")
    args = parser.parse_args()
    import peft
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(args.config)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if args.nf4:
        _round(torch, model)
    wanted = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = peft.get_peft_model(model, wanted)
    model.config.use_cache = False
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for checkpointing in args.checkpointing:
        if checkpointing == "on":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        for micro in args.micro:
            try:
                _measure(torch, model, optimizer, config, args, micro, checkpointing)
            except torch.cuda.OutOfMemoryError:
                print(f"checkpointing {checkpointing}, {micro} rows at a time: out of memory", flush=True)
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()


def _round(torch, model) -> None:
    """Replace the linear layers, without the head, by bitsandbytes' in nf4; they are rounded where they lie."""
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        new = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            torch.bfloat16,
            quant_type="nf4",
            device="meta",
        )
        weight, device = layer.weight.data, layer.weight.device
        new.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4").to(device)
        new.bias = layer.bias
        model.set_submodule(name, new)


def _measure(torch, model, optimizer, config, args, micro: int, checkpointing: str) -> None:
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, config.vocab_size, (args.batch, args.length), device="cuda")

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        for at in range(0, args.batch, micro):
            part = ids[at : at + micro]
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=part, labels=part).loss * micro / args.batch
            loss.backward()
        optimizer.step()
        return loss.item()

    step()
    start, steps = time.perf_counter(), 3
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    rate, memory = args.batch * args.length / seconds, torch.cuda.max_memory_allocated() / 2**30
    how = f"PyTorch {torch.__version__} + PEFT, checkpointing {checkpointing}, {micro} rows at a time"
    print(f"{how}: {rate:,.0f} tok/s, {seconds:.2f} s per step, {memory:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
