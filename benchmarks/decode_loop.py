"""The bare decode loop: what the engine around it can hope for. Dummy weights, 16 steps per dispatch, one table.

python benchmarks/decode_loop.py --config DIR [--batch 1:128 64:128 512:600]
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.core.spec import init, num_bytes
from dovetail.core.types import Paged
from dovetail.models.decoder import forward, init_cache, unembed
from dovetail.models.publish import publish
from dovetail.models.registry import read_config
from dovetail.models.spec import kv_bytes_per_token, spec
from dovetail.ops.sample import argmax

PAGE, STEPS = 16, 16


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="cache")
def decode(params, cfg, tokens, cache, ctx: Paged):
    def body(_, carry):
        tokens, cache, lens = carry
        here = Paged(ctx.block_tables, lens, ctx.cu_q_lens, ctx.num_seqs)
        hidden, cache = forward(params, cfg, tokens, lens - 1, here, cache)
        return argmax(unembed(params, cfg, hidden)), cache, lens + 1

    return jax.lax.fori_loop(0, STEPS, body, (tokens, cache, ctx.kv_lens))


def context(batch: int, length: int) -> tuple[Paged, int]:
    pages_each = -(-(length + STEPS) // PAGE)
    tables = np.random.default_rng(0).permutation(batch * pages_each).reshape(batch, pages_each)
    lens, cu = jnp.full(batch, length, jnp.int32), jnp.arange(batch + 1, dtype=jnp.int32)
    return Paged(jnp.asarray(tables, jnp.int32), lens, cu, jnp.asarray([batch], jnp.int32)), batch * pages_each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="a folder with a config.json")
    parser.add_argument("--batch", nargs="+", default=["1:128", "64:128", "512:600"], help="streams:context")
    parser.add_argument("--bandwidth", type=float, default=4.17, help="of the card, TB/s, measured by a large copy")
    args = parser.parse_args()
    cfg = read_config(args.config)
    params = publish(init(spec(cfg), jax.random.key(0), jnp.bfloat16), cfg, "bfloat16", take=True)
    weights = num_bytes(spec(cfg), jnp.bfloat16) - (0 if cfg.tied else cfg.vocab * cfg.dim * 2)
    table = Table("streams", "context", "tok/s", "ms per step", "share of the floor")
    for pair in args.batch:
        batch, length = map(int, pair.split(":"))
        ctx, pages = context(batch, length)
        cache, tokens, seconds = init_cache(cfg, pages, PAGE, jnp.bfloat16), jnp.ones(batch, jnp.int32), []
        for _ in range(5):
            start = time.perf_counter()
            _, cache, _ = jax.block_until_ready(decode(params, cfg, tokens, cache, ctx))
            seconds.append((time.perf_counter() - start) / STEPS)
        floor = (weights + batch * length * kv_bytes_per_token(cfg)) / (args.bandwidth * 1e12)
        best = min(seconds)
        table.add_row(str(batch), str(length), f"{batch / best:,.0f}", f"{best * 1e3:.3f}", f"{floor / best:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
