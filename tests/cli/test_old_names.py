"""An old or foreign name of an option, flag, recipe key or method is refused, and the error names the present one.

To cover a renamed name, add a line to the table it belongs to.
"""

import pytest
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.cli.options import RENAMED_FLAGS
from dovetail.cli.train import settings_class
from dovetail.core import recipe
from dovetail.core.errors import UserError
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.outputs import RequestOutput
from dovetail.engine.request.params import SamplingParams

# (training, key that was renamed, its present name)
RECIPE_KEYS = [
    ("sft", "lora.rank", "lora.r"),
    ("sft", "lora.alpha", "lora.lora_alpha"),
    ("sft", "lora.targets", "lora.target_modules"),
    ("sft", "lora.rslora", "lora.use_rslora"),
    ("sft", "lora.dora", "lora.use_dora"),
    ("sft", "optimizer.clip", "optimizer.max_grad_norm"),
    ("sft", "learning_rate", "optimizer.lr"),
    ("dpo", "preference.loss", "preference.loss_type"),
    ("rl", "group_size", "num_generations"),
    ("rl", "max_prompt", "max_prompt_length"),
    ("rl", "max_tokens", "max_completion_length"),
    ("rl", "truncated", "mask_truncated_completions"),
    ("rl", "reward_seconds", "reward_timeout"),
    ("rl", "exam", "eval"),
    ("rl", "eval.samples", "eval.num_generations"),
    ("rl", "eval.right", "eval.success_threshold"),
    ("rl", "epsilon", "loss.epsilon"),
    ("rl", "beta", "loss.beta"),
    ("rl", "loss.policy", "loss.policy_loss"),
    ("rl", "loss.aggregation", "loss.loss_type"),
    ("rl", "loss.eps_low", "loss.epsilon"),
    ("rl", "loss.eps_high", "loss.epsilon_high"),
    ("rl", "loss.kl", "loss.kl_estimator"),
    ("rl", "loss.entropy", "loss.entropy_coef"),
    ("rl", "loss.correction", "loss.importance_sampling_mode"),
    ("rl", "loss.cap", "loss.importance_sampling_cap"),
    ("rl", "loss.dynamic", "loss.dynamic_sampling"),
    ("rl", "loss.overlong", "loss.soft_punish_cache"),
    ("rl", "critic.weight", "critic.vf_coef"),
    ("rl", "critic.clip", "critic.cliprange_value"),
    ("rl", "critic.beta", "critic.kl_coef"),
    ("rl", "engine.kv_gib", "engine.kv_cache_memory_bytes"),
    ("rl", "engine.sleep", "engine.enable_sleep_mode"),
    ("rl", "engine.offload", "engine.offload_optimizer"),
    ("rl", "engine.stale", "engine.max_staleness"),
]
# (command, its arguments with an old flag, the present flag)
FLAGS = [
    ("serve", "--tool-format hermes", "--tool-call-parser"),
    ("serve", "--reasoning-format qwen3", "--reasoning-parser"),
    ("serve", "--allow-origin *", "--allowed-origins"),
    ("serve", "--allow-request-template", "--trust-request-chat-template"),
    ("serve", "--adapter a=DIR", "--lora-modules"),
    ("serve", "--no-prefix-caching", "--no-enable-prefix-caching"),
    ("bench throughput", "--no-multi-step", "--max-decode-steps 1"),
    ("compile serve", "tiny --topology v5e:2x2 --max-adapters 2", "--max-loras"),
    ("eval", "tiny --tasks loss --tensor-parallel=2", "--tensor-parallel-size"),
    ("chat", "--memory-fraction 0.5", "--gpu-memory-utilization"),
    ("plan serve", "tiny --on h200x1 --tensor-parallel 2", "--tensor-parallel-size"),
]
# (an object, the old name of its attribute or method, the present name)
ATTRIBUTES: list[tuple[object, str, str]] = [
    (RequestOutput("a", (1,), ()), "id", "request_id"),
    (RequestOutput("a", (1,), ()), "completions", "outputs"),
    (RequestOutput("a", (1,), ()), "cached_tokens", "num_cached_tokens"),
    (LLM.__new__(LLM), "wake", "wake_up"),
    (SamplingParams(), "structured", "structured_outputs"),
]


@pytest.mark.parametrize("old, new", EngineOptions.RENAMED.items())
def test_an_engine_option_in_python(old, new):
    with pytest.raises(UserError, match=f"no option {old!r}: it is called {new!r}") as caught:
        EngineOptions.of({old: 1})
    assert caught.value.param == old


@pytest.mark.parametrize("old, new", RENAMED_FLAGS.items())
def test_a_flag_of_serve(old, new):
    """Every flag of the table, on the command that has all the options."""
    result = CliRunner().invoke(app, ["serve", old, "1"])
    assert isinstance(result.exception, UserError) and str(result.exception).endswith(f"it is called {new}")


@pytest.mark.parametrize("command, arguments, new", FLAGS)
def test_a_flag(command, arguments, new):
    result = CliRunner().invoke(app, [*command.split(), *arguments.split()])
    assert isinstance(result.exception, UserError), result.output
    assert str(result.exception).endswith(f"it is called {new}")


@pytest.mark.parametrize("training, old, new", RECIPE_KEYS)
def test_a_recipe_key(training, old, new):
    with pytest.raises(UserError, match=rf"{old} is not a key\. Did you mean {new}\?"):
        recipe.create(settings_class(training), ["model=tiny", f"{old}=1"])


@pytest.mark.parametrize("owner, old, new", ATTRIBUTES, ids=[f"{type(o).__name__}.{old}" for o, old, _ in ATTRIBUTES])
def test_an_attribute(owner, old, new):
    with pytest.raises(AttributeError, match=rf"{old}.*{new}"):
        getattr(owner, old)
