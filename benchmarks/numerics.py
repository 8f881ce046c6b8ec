"""How far our log-probabilities are from the truth, and how far those of transformers are, on the same GPU.

Every family as a small random model: packed (what training and scoring run) and through the engine (prompts, then
decode steps). The truth is transformers on the CPU with every number an f64. The peer is transformers on the GPU in the
same type as ours, TF32 off. Exit code 1 where ours is the farther one. `tf32` is shown beside transformers' f32 and is
not judged.

python benchmarks/numerics.py [--dtypes f32 bf16 tf32] [--families llama-64 mixtral ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import torch
import transformers

import dovetail as dt
from dovetail.core.types import Packed
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import MAX_LOGPROBS, SamplingParams
from dovetail.models.decoder import forward, unembed

BASE = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
WINDOW = dict(head_dim=64, sliding_window=48)
# name -> (transformers' config class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-64": ("LlamaConfig", dict(head_dim=64)),
    "llama-128": ("LlamaConfig", dict(head_dim=128)),
    "mistral": ("MistralConfig", WINDOW),
    "qwen3": ("Qwen3Config", dict(head_dim=64)),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(head_dim=64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True),
    ),
    "mixtral": ("MixtralConfig", dict(head_dim=64, num_local_experts=8, num_experts_per_tok=2)),
    "gemma2": ("Gemma2Config", WINDOW | dict(query_pre_attn_scalar=64)),
    "gemma3": ("Gemma3TextConfig", WINDOW | dict(query_pre_attn_scalar=64)),
    "deepseek-v3": (
        "DeepseekV3Config",
        dict(
            num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
            v_head_dim=64, moe_intermediate_size=128, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1,
            first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True,
        ),
    ),
    "olmo2": ("Olmo2Config", {}),
    "phi4-mini": (  # every document is longer than 16, and so of the long factors
        "Phi3Config",
        dict(
            rope_parameters=dict(
                rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                short_factor=[1.0] * 24, long_factor=[1 + i / 4 for i in range(24)],
            ),
            original_max_position_embeddings=16,
        ),
    ),
    "granite3": (
        "GraniteConfig",
        dict(embedding_multiplier=12.0, attention_multiplier=1 / 64, residual_multiplier=0.22, logits_scaling=1.5),
    ),
    "glm4": ("Glm4Config", dict(head_dim=64)),
    "gpt-oss": ("GptOssConfig", WINDOW | dict(num_local_experts=8, num_experts_per_tok=2)),
}  # fmt: skip
TORCH = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
ROWS = ((230, 26), (64, 150, 42), (17, 239))  # lengths of the documents that share a row of 256
NEW = 24  # tokens per answer
LINE = "{:12} {:7} {:6} {:18} {:18} {:>7}"
# Two ways to add up the same numbers differ by chance: by a quarter of the distance on average, or by the last bits of
# a log-probability. At the one worst of them by more, and of bf16, which swaps experts that score alike, by anything.
MARGIN, WORST, LAST_BITS = 1.25, 2.0, 2e-6


def main() -> None:
    parser = argparse.ArgumentParser(description="Our log-probabilities and transformers' against f64's.")
    parser.add_argument("--dtypes", nargs="+", choices=TORCH, default=["f32", "bf16", "tf32"])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"distance of log-probabilities from f64's, mean and worst; {jax.devices()[0].device_kind}")
    print(LINE.format("family", "path", "dtype", "ours", "transformers'", "seconds"), flush=True)
    farther = []
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            make_model(family, Path(folder))
            truth = Peer(folder, "f64")
            for dtype in args.dtypes:
                peer = Peer(folder, dtype)
                for path, compare in (("packed", packed), ("engine", engine)):
                    start = time.perf_counter()
                    ours, theirs = compare(folder, dtype, truth, peer)
                    seconds = f"{time.perf_counter() - start:.0f}"
                    print(LINE.format(family, path, dtype, _figures(ours), _figures(theirs), seconds), flush=True)
                    if dtype != "tf32" and is_farther(ours, theirs, dtype):
                        farther.append(f"{family} {path} {dtype}")
    print(f"farther from the truth than transformers: {', '.join(farther) or 'none'}")
    sys.exit(1 if farther else 0)


def is_farther(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> bool:
    if ours.mean() > MARGIN * theirs.mean() + LAST_BITS:
        return True
    return dtype == "f32" and bool(ours.max() > WORST * theirs.max() + 10 * LAST_BITS)


def _figures(distance: np.ndarray) -> str:
    """Mean and worst."""
    return f"{distance.mean():.1e}, {distance.max():.1e}"


# --- models and the truth ---------------------------------------------------------------------------------------------


def make_model(family: str, folder: Path) -> None:
    """A checkpoint of random weights, each of which bf16 can hold: all types then start from the same numbers."""
    kind, options = FAMILIES[family]
    config = getattr(transformers, kind)(**(BASE | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name:
                continue
            # a product keeps its input's size, logits spread by 2, norms lie about 1
            spread = 0.1 if tensor.ndim == 1 else (2.0 if tensor.shape[0] == 2048 else 1.0) * config.hidden_size**-0.5
            middle = 1.0 if "norm" in name and config.model_type not in ("gemma2", "gemma3_text") else 0.0
            tensor.copy_((torch.randn_like(tensor) * spread + middle).bfloat16())
    model.save_pretrained(folder)


@contextmanager
def f64_throughout(wanted: bool) -> Iterator[None]:
    """transformers goes by way of f32 in norms, rotations, softmaxes and routers, whatever the model's type: in here
    f32 is another name of f64."""
    if not wanted:
        yield
        return
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


class Peer:
    """transformers' model, in f64 on the CPU or in another type where torch has a GPU."""

    def __init__(self, folder: str, dtype: str):
        self.exact = dtype == "f64"
        self.device = "cuda" if torch.cuda.is_available() and not self.exact else "cpu"
        kind = torch.float64 if self.exact else TORCH[dtype]
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, attn_implementation="eager", experts_implementation="eager"
        )
        self.model.to(self.device).eval()
        with f64_throughout(self.exact):
            for module in self.model.modules() if self.exact else ():
                if "RotaryEmbedding" in type(module).__name__:
                    module.__init__(module.config)  # its frequencies anew

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """[length, vocabulary], in f32 at the least."""
        with torch.no_grad(), f64_throughout(self.exact):
            logits = self.model(torch.tensor([tokens], device=self.device), use_cache=False).logits[0]
            return torch.log_softmax(logits.float(), -1).cpu().numpy()


# --- the two paths ----------------------------------------------------------------------------------------------------


def documents(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, BASE["vocab_size"], n).tolist() for n in lengths]


def packed(folder: str, dtype: str, truth: Peer, peer: Peer) -> tuple[np.ndarray, np.ndarray]:
    """Every position of documents that share rows; the peer is given each alone."""
    model = dt.load(folder, dtype=dtype)
    rows = [documents(lengths, seed) for seed, lengths in enumerate(ROWS)]
    tokens = np.asarray([np.concatenate(row) for row in rows], np.int32)
    segments = np.asarray([np.repeat(np.arange(len(n)) + 1, n) for n in ROWS], np.int32)
    positions = np.asarray([np.concatenate([np.arange(n) for n in lengths]) for lengths in ROWS], np.int32)

    @jax.jit
    def logprobs(params, tokens, positions, segments):
        with model.compute.products():
            hidden, _ = forward(params, model.config, tokens, positions, Packed(segments))
            return jax.nn.log_softmax(unembed(params, model.config, hidden))

    given = model.params, tokens, positions, segments
    options: Any = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None  # as a train step
    ours = np.asarray(logprobs.lower(*given).compile(compiler_options=options)(*given))
    exact, theirs = (np.asarray([np.concatenate([p.logprobs(d) for d in row]) for row in rows]) for p in (truth, peer))
    return np.abs(ours - exact).ravel(), np.abs(theirs - exact).ravel()


def engine(folder: str, dtype: str, truth: Peer, peer: Peer) -> tuple[np.ndarray, np.ndarray]:
    """What the engine says of its prompts' tokens, of those it samples, and of the most probable beside each. The peer
    is held to what it finds most probable itself: where a model errs, the top of its list errs most."""
    llm = LLM(
        folder, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=1024, kv_cache_memory_bytes=2**26, warm_up=False
    )
    params = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    distances: tuple[list, list] = ([], [])
    for output in llm.generate(documents((200, 77, 130, 31, 180, 101, 149, 60), 9), params, progress=False):
        (answer,) = output.outputs
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        exact, theirs = truth.logprobs(tokens), peer.logprobs(tokens)
        entries = [*(output.prompt_logprobs or ()), *(answer.logprobs or ())]
        assert len(entries) == len(tokens)
        for true, other, entry in zip(exact, theirs, entries[1:], strict=False):  # the first token follows nothing
            top = [entry.token, *np.argsort(-other)[:MAX_LOGPROBS]]
            distances[0].extend(abs(p - true[token]) for token, p in ((entry.token, entry.logprob), *entry.top))
            distances[1].extend(abs(other[token] - true[token]) for token in top)
    return np.asarray(distances[0]), np.asarray(distances[1])


if __name__ == "__main__":
    main()
