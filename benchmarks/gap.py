"""How far the sampler's log-probabilities are from the trainer's, and both from f32's, of what the engine samples.

    python benchmarks/gap.py DIR      (a folder with a config.json: the weights are random)

If the two were off from f32 by chance alone, each by bf16's own error, their distance would be that of two such errors.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import LLM, SamplingParams
from dovetail.core.compute import compute_of
from dovetail.core.spec import init
from dovetail.core.types import Packed
from dovetail.engine.options import EngineOptions
from dovetail.models.decoder import trunk
from dovetail.models.registry import read_config
from dovetail.models.spec import spec
from dovetail.ops.token_loss import token_logprobs

PROMPTS, PROMPT, TOKENS = 64, 32, 224


def main(folder: str) -> None:
    cfg = read_config(folder)
    params = init(spec(cfg), jax.random.key(0), jnp.float32)
    prompts = np.random.default_rng(0).integers(3, 40000, (PROMPTS, PROMPT)).tolist()
    asked = SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, seed=0)
    options = EngineOptions(dtype="bf16", max_model_len=PROMPT + TOKENS + 1, max_num_seqs=PROMPTS, warm_up=False)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)  # all have these weights
    llm = LLM.from_weights(cfg, rounded, options)
    found = llm.generate(prompts, asked, progress=False)
    tokens = np.asarray([list(p) + list(f.outputs[0].token_ids) for p, f in zip(prompts, found, strict=True)])
    sampler = np.stack([f.outputs[0].logprobs.array for f in found])
    llm.sleep(2)
    of = {"sampler, bf16": sampler}
    for name, compute, precision in (("trainer, bf16", "bf16", None), ("trainer, f32", "f32", "highest")):
        of[name] = scored(rounded, cfg, tokens, compute, precision)[:, PROMPT - 1 :]
    _table(of)


def scored(params, cfg, tokens, compute: str, precision: str | None) -> np.ndarray:
    how = compute_of(compute)

    @jax.jit
    def one(params, tokens):
        own = jax.tree.map(lambda x: x.astype(how.dtype), params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        hidden, _ = trunk(own, cfg, inputs, positions, Packed(jnp.ones_like(inputs)))
        head = own["embed"] if cfg.tied else own["head"]
        return token_logprobs(hidden, head, targets, scale=cfg.logit_scale, softcap=cfg.logit_softcap)

    with jax.default_matmul_precision(precision) if precision else how.products(None):
        return np.concatenate([np.asarray(one(params, part)) for part in np.split(tokens, 4)])


def _table(of: dict[str, np.ndarray]) -> None:
    names = list(of)
    print(f"{'log-probabilities of':<36}{'mean |gap|':>12}{'p99':>12}{'max':>12}")
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            gap = np.abs(of[a] - of[b])
            print(f"{a + ' / ' + b:<36}{gap.mean():>12.2e}{np.quantile(gap, 0.99):>12.2e}{gap.max():>12.2e}")
    errors = [of[name] - of["trainer, f32"] for name in names[:2]]
    print(f"correlation of the two errors: {np.corrcoef(errors[0].ravel(), errors[1].ravel())[0, 1]:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
