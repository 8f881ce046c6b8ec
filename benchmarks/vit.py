"""Compare the training of a ViT with PyTorch: images per second, and the loss from the same weights.

    python benchmarks/vit.py --models vit-s16,vit-b16 --batch 1024          # on a GPU: random images on the device
    python benchmarks/vit.py --models tiny-vit --curve 200 --no-speed       # on a CPU: digits, in f32

Both sides have the same architecture, AdamW (decay of matrices only), clipping and schedule; f32 weights, computed in
bf16 on a GPU. PyTorch's is a plain model under torch.compile and autocast, with fused AdamW and flash attention. Each
side runs in its own process, one after the other, because both would reserve the GPU's memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LR, WARMUP, DECAY = 1e-3, 20, 0.1
WARM = 30  # steps before the measurement: on an H200 the first 20 or so are slower on both sides


def digits(size: int, batch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return batch number `step` of scikit-learn's digits, enlarged to `size` pixels."""
    from dovetail.core.recipe import SHIPPED

    with np.load(SHIPPED / "samples" / "digits.npz") as held:
        images, labels = held["image"], held["label"]
    chosen = np.random.default_rng(step).integers(0, len(images), batch)
    large = images[chosen].repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    return np.repeat(large[..., None], 3, axis=-1), labels[chosen].astype(np.int32)


def random_batch(size: int, batch: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noise with random labels: the loss stays high, and a card at its power limit is faster on zeros."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    return images, rng.integers(0, classes, batch, dtype=np.int32)


# --- dovetail ---------------------------------------------------------------------------------------------------------


def prepared(task: dict[str, Any]) -> Any:
    """Return the prepared training of a task."""
    from dovetail.core.training import Mesh, Optimizer, Precision, Schedule
    from dovetail.data.image_settings import ImageData
    from dovetail.io.load import config_of
    from dovetail.train.image_objective import image_objective
    from dovetail.train.image_settings import ImagePretrain
    from dovetail.train.prepare import prepare

    settings = ImagePretrain(
        objective="classification", model=task["model"], data=ImageData("digits"), batch=task["batch"],
        steps=task["steps"], optimizer=Optimizer(lr=LR, beta2=0.999, weight_decay=DECAY),
        schedule=Schedule("cosine", warmup=WARMUP, final=0.0), precision=Precision(task["compute"]),
        mesh=Mesh(data=1, fsdp=1), remat=task["remat"], per_device=task["batch"],
    )  # fmt: skip
    settings = settings.for_model(config_of(settings.model))
    return prepare(settings, image_objective(settings))


def run_dovetail(task: dict[str, Any]) -> dict[str, Any]:
    """Train with Dovetail; write the first weights for the other side."""
    import jax

    from dovetail.core.chips import chip_of
    from dovetail.core.types import ImageBatch
    from dovetail.train.image_objective import export_images

    ready = prepared(task)
    size, batch, state = ready.cfg.images.tower.image_size, task["batch"], ready.init()
    export_images(Path(task["folder"]) / "weights", ready.cfg, state.params, None, np.float32)
    began = time.monotonic()
    step = ready.compile(1)
    compiled = time.monotonic() - began

    def put(images: np.ndarray, labels: np.ndarray) -> Any:
        return ready.put(ImageBatch(images, labels, np.ones(batch, np.float32)))  # type: ignore[arg-type]

    losses = []
    for i in range(task["curve"]):
        state, metrics = step(state, put(*digits(size, batch, i)))
        losses.append(float(metrics["loss"]))
    chip = chip_of(jax.devices()[0])
    found = {
        "losses": losses, "compile": compiled, "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "flops": 3 * ready.cfg.images.flops(), "peak": chip.device_bf16 if chip else None,
        "rates": [float(ready.rate(i)) for i in range(task["steps"])], "fixed": f"remat {ready.settings.remat}",
        "config": ready.cfg.to_hf(),
    }  # fmt: skip
    if task["speed"]:
        fixed = put(*random_batch(size, batch, found["config"]["num_labels"]))
        for _ in range(WARM):
            state, metrics = step(state, fixed)
        float(metrics["loss"])
        began = time.monotonic()
        for _ in range(task["speed"]):
            state, metrics = step(state, fixed)
        found["loss"] = float(metrics["loss"])
        found["seconds"] = (time.monotonic() - began) / task["speed"]
        found["memory"] = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return found


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def torch_model(config: dict[str, Any]) -> Any:
    """Return the same ViT as a plain module, with the names of the exported weights."""
    import torch
    from torch import nn
    from torch.nn import functional

    vision = config["vision_config"]
    D, F, K, eps = (
        vision[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "layer_norm_eps")
    )
    patch, side = vision["patch_size"], vision["image_size"] // vision["patch_size"]
    has_layer = config["dovetail"].get("pre_logits", False)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_norm1, self.layer_norm2 = nn.LayerNorm(D, eps), nn.LayerNorm(D, eps)
            self.self_attn = nn.ModuleDict({f"{x}_proj": nn.Linear(D, D) for x in ("q", "k", "v", "out")})
            self.mlp = nn.ModuleDict({"fc1": nn.Linear(D, F), "fc2": nn.Linear(F, D)})

        def forward(self, x: Any) -> Any:
            h, own = self.layer_norm1(x), self.self_attn
            q, k, v = (own[f"{n}_proj"](h).unflatten(-1, (K, D // K)).transpose(1, 2) for n in "qkv")
            h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + own["out_proj"](h)
            h = functional.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh")
            return x + self.mlp["fc2"](h)

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            embeddings = nn.Module()
            embeddings.patch_embedding = nn.Conv2d(3, D, patch, patch)
            embeddings.position_embedding = nn.Embedding(side**2, D).requires_grad_(False)
            encoder = nn.Module()
            encoder.layers = nn.ModuleList(Block() for _ in range(vision["num_hidden_layers"]))
            self.vision_model = nn.Module()
            self.vision_model.embeddings, self.vision_model.encoder = embeddings, encoder
            self.vision_model.post_layernorm = nn.LayerNorm(D, eps)
            self.pre_logits = nn.Linear(D, D) if has_layer else None
            self.add_module("logits" if has_layer else "classifier", nn.Linear(D, config["num_labels"]))

        def forward(self, images: Any) -> Any:
            own, B = self.vision_model, len(images)
            conv = own.embeddings.patch_embedding
            pixels = (images.float() / 127.5 - 1).view(B, side, patch, side, patch, 3).permute(0, 1, 3, 5, 2, 4)
            # one product over whole patches: faster than a convolution
            x = functional.linear(pixels.reshape(B, side**2, -1), conv.weight.flatten(1), conv.bias)
            x = x + own.embeddings.position_embedding.weight.to(x.dtype)
            for block in own.encoder.layers:
                x = block(x)
            x = own.post_layernorm(x).mean(dim=1)
            x = torch.tanh(self.pre_logits(x)) if has_layer else x
            return (self.logits if has_layer else self.classifier)(x).float()

    return Vit()


def run_torch(task: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Train with PyTorch from the weights that Dovetail wrote."""
    import torch
    from safetensors.torch import load_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch_model(other["config"]).to(device)
    model.load_state_dict(load_file(str(Path(task["folder"]) / "weights" / "model.safetensors")))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=device == "cuda")
    half = device == "cuda" and task["compute"] == "bf16"

    def measured(images: Any, labels: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            logits = model(images)
        return torch.nn.functional.cross_entropy(logits, labels)

    loss_of = torch.compile(measured, mode=task["mode"]) if task["mode"] != "eager" else measured

    def step(number: int, images: Any, labels: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = other["rates"][min(number, len(other["rates"]) - 1)]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(images, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.detach()

    def put(images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        return torch.from_numpy(images).to(device), torch.from_numpy(labels.astype(np.int64)).to(device)

    size, batch = other["config"]["vision_config"]["image_size"], task["batch"]
    began, losses = time.monotonic(), []
    for i in range(task["curve"]):
        losses.append(float(step(i, *put(*digits(size, batch, i)))))
    found: dict[str, Any] = {"losses": losses, "torch": torch.__version__, "fixed": f"torch.compile {task['mode']}"}
    if task["speed"]:
        fixed = put(*random_batch(size, batch, other["config"]["num_labels"]))
        began = time.monotonic()
        for i in range(WARM):
            loss = step(i, *fixed)
        float(loss)
        found["compile"] = time.monotonic() - began
        began = time.monotonic()
        for i in range(task["speed"]):
            loss = step(WARM + i, *fixed)
        found["loss"] = float(loss)
        found["seconds"] = (time.monotonic() - began) / task["speed"]
        found["memory"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return found


# --- both -------------------------------------------------------------------------------------------------------------


def child(side: str, folder: str) -> None:
    """Run one side of the task in `folder`."""
    at = Path(folder)
    task = json.loads((at / "task.json").read_text())
    if side == "dovetail":
        found = run_dovetail(task)
    else:
        found = run_torch(task, json.loads((at / "dovetail.json").read_text()))
    (at / f"{side}.json").write_text(json.dumps(found))


def compare(task: dict[str, Any]) -> dict[str, Any]:
    """Run both sides of a task, print the comparison and return it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.json").write_text(json.dumps(task | {"folder": folder}))
        sides = {}
        for side in ("dovetail", "torch"):
            subprocess.run([sys.executable, __file__, "--side", side, "--folder", folder], check=True)
            sides[side] = json.loads((Path(folder) / f"{side}.json").read_text())
    ours, theirs = sides["dovetail"], sides["torch"]
    print(f"{task['model']}, batch {task['batch']}, {task['compute']}, {ours['device']}", flush=True)
    for side, found in sides.items():
        if "seconds" in found:
            rate = task["batch"] / found["seconds"]
            share = f", {rate * ours['flops'] / ours['peak']:.1%} of peak" if ours["peak"] else ""
            memory = f", {found['memory'] / 2**30:.1f} GiB" if found.get("memory") else ""
            print(
                f"  {side:<9}{rate:>10,.1f} img/s{share}{memory} ({found['fixed']}), loss {found['loss']:.2f}",
                flush=True,
            )
    if task["curve"]:
        a, b = np.asarray(ours["losses"]), np.asarray(theirs["losses"])
        print(f"  loss of {len(a)} steps from the same weights; largest difference {abs(a - b).max():.2g}, "
              f"mean {abs(a - b).mean():.2g}")  # fmt: skip
        marks = sorted({0, *range(9, len(a), max(1, len(a) // 8)), len(a) - 1})
        for name, line in (("step", [i + 1 for i in marks]), ("dovetail", a[marks]), ("torch", b[marks])):
            print(f"    {name:<9}" + "".join(f"{x:>9.4f}" if name != "step" else f"{x:>9}" for x in line), flush=True)
    return {"task": task, **sides}


def main() -> None:
    """Read the options and compare each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vit-s16,vit-b16")
    parser.add_argument("--batch", type=int, default=0, help="images of a step; default: 1024, or 128 of tiny-vit")
    parser.add_argument("--measured", type=int, default=30, help="steps to time")
    parser.add_argument("--no-speed", action="store_true", help="compare the losses only")
    parser.add_argument("--curve", type=int, default=0, help="steps of the loss curve, on digits")
    parser.add_argument("--compute", default="", help="bf16 or f32; default: bf16, or f32 of tiny-vit")
    parser.add_argument("--remat", default="none", help="of Dovetail: none, dots, attention, full")
    parser.add_argument("--mode", default="default", help="of torch.compile, or eager")
    parser.add_argument("--out", default="", help="write all numbers to this .json file")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        child(args.side, args.folder)
        return
    found = []
    for model in args.models.split(","):
        tiny = model == "tiny-vit"
        task = {
            "model": model, "batch": args.batch or (128 if tiny else 1024),
            "compute": args.compute or ("f32" if tiny else "bf16"), "remat": args.remat, "mode": args.mode,
            "curve": args.curve, "speed": 0 if args.no_speed else args.measured,
            "steps": max(args.curve, WARM + args.measured),
        }  # fmt: skip
        found.append(compare(task))
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
