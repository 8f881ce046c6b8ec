"""What becomes of each command and snippet of the documentation: run at a small size, or listed with the reason why
not. One that is in neither table fails tests/docs/test_docs_read.py."""

from __future__ import annotations

import re

from docs.blocks import Block, Command

# How a command begins -> why tests/docs/test_docs_run.py does not run it. The longest that fits counts.
ELSEWHERE = {
    "pip install": "the environment of the tests has it",
    "make ": "it runs these tests",
    "mkdir ": "a shared folder of a cluster",
    "chgrp ": "a shared folder of a cluster",
    "chmod ": "a shared folder of a cluster",
    "export ": "a path or a server of the reader's: the tests set their own",
    "python -m pytest": "tests of this suite",
    "python examples/": "minutes: tests/test_examples.py",
    "python benchmarks/": "for a GPU",
    "dovetail tour": "tests/cli/test_cli.py",
    "dovetail chat": "asks at a terminal: tests/cli/test_chat.py",
    "dovetail plan": "tests/docs/test_docs_output.py compares what it prints",
    "dovetail plan --calibrate": "it depends on the machine: tests/cli/test_plan.py",
    "dovetail compile": "minutes of libtpu: tests/cli/test_compile.py, tests/tpu",
    "dovetail convert ibm-granite/": "fetches 5 GB from the hub",
    "dovetail data show colours.jsonl": "pictures of the reader's: tests/tune/test_images.py",
    "dovetail sft --model tiny-smolvlm": "pictures of the reader's: tests/tune/test_images.py",
    "dovetail pretrain tiny model.torch=": "a module of the reader's: tests/interop/torch/test_recipes.py",
    "dovetail sft model.torch=": "a module of the reader's: tests/interop/torch/test_recipes.py",
    "dovetail distill model=student teacher.torch=": "a module of the reader's: tests/interop/torch/test_roles.py",
    "dovetail dpo model=student reference.model.torch=": "a module of the reader's: tests/interop/torch/test_roles.py",
    "dovetail info my-gpt2": "a folder of the reader's: tests/interop/torch",
    "dovetail eval my-gpt2": "a folder of the reader's: tests/interop/torch",
    "dovetail serve my-gpt2": "a folder of the reader's: tests/interop/torch",
    "dovetail draft": "minutes: tests/tune/test_draft.py",
    "dovetail quantize": "minutes: tests/tune/test_quantize.py",
    'dovetail serve smollm2-135m --speculative-config {"model": "drafter"}': "the drafter of the command before it",
    "dovetail serve MODEL --speculative-config": "weights of the reader's: tests/engine/test_draft_models.py",
    "dovetail bench serve --concurrency 4 --random-mm": "a server that sees images: tests/cli/test_bench_serve.py",
    "dovetail serve runs/NAME/export/": "the export of a run with a drafter: tests/tune/test_draft.py",
    "dovetail pretrain llama3-1b": "for TPUs: its recipe is read, laid out and lowered in tests/train",
    "dovetail pretrain llama3-8b": "for TPUs: its recipe is read, laid out and lowered in tests/train",
    "dovetail pretrain smollm2-135m": "for TPUs: its recipe is read, laid out and lowered in tests/train",
    "dovetail serve runs/smollm2/": "the export of a run on TPUs",
    "dovetail serve runs/llama3-1b/": "the export of a run on TPUs",
    "dovetail serve /shared/runs/8b/": "the export of a run on TPUs",
    "dovetail job create name=try command=true backend=gcp-tpu": "Google Cloud: tests/jobs",
    "dovetail job create spot.yaml": "Google Cloud: tests/jobs; its spec is read",
    "dovetail job create name=tiny recipe=tiny backend=slurm": "Slurm: tests/jobs",
    "dovetail job logs tiny": "the job of the line above it, on Slurm",
    "dovetail job cancel": "a job that runs: tests/jobs",
    "dovetail job clean": "jobs of a month: tests/jobs",
    "dovetail job web": "runs until it is stopped: tests/jobs",
}
RUN = (
    "dovetail data ", "dovetail sft ", "dovetail dpo ", "dovetail reward ", "dovetail distill ", "dovetail rl ",
    "dovetail pretrain ", "dovetail merge ", "dovetail eval ", "dovetail recipes", "dovetail serve", "dovetail info",
    "dovetail bench serve", "dovetail convert smollm2-135m", "dovetail job create name=hello",
    "dovetail job create name=try recipe=tiny", "dovetail job list", "dovetail job queue ", "curl ",
)  # fmt: skip

# Of a page's snippets: names that they take for granted. `imports` is read by the cheap checks too, `before` makes
# objects and runs before them, `skip` says why they do not run.
PREAMBLES = {
    "docs/engine.md": {
        "imports": "from dovetail.engine.loop import EngineLoop\n"
        "from dovetail.engine.request.params import SamplingParams\n",
        "before": "from types import SimpleNamespace\nimport jax, jax.numpy as jnp\n"
        "from dovetail.core.spec import init\nfrom dovetail.models.registry import read_model\n"
        "from dovetail.models.spec import spec\ncfg = read_model(MODEL)\n"
        "state = SimpleNamespace(params=init(spec(cfg), jax.random.key(0), jnp.float32))\n"
        "import dovetail as dt\nllm, on_deltas = dt.LLM(MODEL, max_num_seqs=4), print\n",
    },
    "docs/finetuning.md": {
        "imports": "import dovetail as dt\n",
        "before": "said = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello!'}]\n"
        "conversation = another = said\n",
    },
    "docs/jobs.md": {"skip": "Slurm: tests/jobs/test_remote.py"},
    "docs/new-family.md": {"imports": "from dovetail.models.glm import *\nfrom dovetail.models.granite import *\n"},
    "docs/images.md": {"skip": "an OpenAI client: tests/serve/api/test_api_vision.py"},
    "docs/torch.md": {"skip": "torch modules: tests/interop/torch"},
    "docs/serving.md": {"skip": "an OpenAI client: tests/serve/test_api_clients.py"},
}


def category(command: Command) -> str:
    """Return "" for a command that is run, else the reason why it is not; AssertionError for one in neither table."""
    text = " ".join(command.words)
    found = max((begin for begin in ELSEWHERE if text.startswith(begin.strip())), key=len, default=None)
    if found:
        return ELSEWHERE[found]
    if not text.startswith(RUN):
        raise AssertionError(f"{command.where}: `{text}` is new: add it to RUN or ELSEWHERE in tests/docs/runs.py")
    return ""


def as_module(block: Block) -> str:
    """Return a snippet as a module's source; entries of a dict become a dict."""
    return "{\n" + block.text + "}" if re.match(r'\s*"\w+": ', block.text) else block.text
