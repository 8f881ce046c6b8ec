"""What the metrics of a run are called in its report, and one sentence about each."""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    title: str
    about: str = ""


_NAMES = {
    "loss": Name("loss", "What training minimises. Each step is on other data, so single steps vary."),
    "lr": Name("learning rate", "The optimizer's step size, as the schedule has it for each step."),
    "grad_norm": Name("gradient norm", "Length of the gradient before clipping. Spikes often precede a bad loss."),
    "tokens_per_second": Name("tokens per second", "Tokens trained per second of wall time."),
    "mfu": Name(
        "model FLOPs utilisation",
        "Share of the chips' peak that the model's arithmetic used; causal counts only the attention that is visible.",
    ),
    "seconds": Name(
        "step time, seconds",
        "Wall time of a step. The band, if any, is the planner's prediction from the chip's peaks.",
    ),
    "parts": Name("step time, seconds", "Wall time of a step by what it was spent on; train is the rest."),
    "token_accuracy": Name("token accuracy", "Share of the trained tokens that the model found likeliest."),
    "chosen_reward": Name("reward of chosen", "How much likelier the chosen answers became, in units of 1 / beta."),
    "rejected_reward": Name("reward of rejected", "The same for the rejected answers."),
    "reward_margin": Name("reward margin", "Reward of the chosen answer minus that of the rejected one."),
    "reward_accuracy": Name("reward accuracy", "Share of the pairs in which the chosen answer has the higher reward."),
    "chosen_logp": Name("log-probability of chosen", "Of a whole answer, summed over its tokens."),
    "rejected_logp": Name("log-probability of rejected", "Of a whole answer, summed over its tokens."),
    "logp": Name("log-probability", "Of a whole answer, summed over its tokens."),
    "divergence": Name("divergence from the teacher", "Per trained token, in nats. 0: student and teacher agree."),
    "nll": Name("cross entropy", "Of the trained tokens themselves, in nats per token."),
    "kl": Name("KL divergence", "How far the model is from its reference, in nats."),
    "reward": Name("reward", "Mean over the step's answers."),
    "entropy": Name("entropy", "Of the next token, in nats. Near 0 the answers to a prompt are all alike."),
    "answer_tokens": Name("tokens per answer", "Mean over the step's answers."),
    "answers": Name("share of the answers", "Cut off: they reached max_tokens. Without a reward: every reward failed."),
    "clip_fraction": Name("share of the tokens clipped", "Tokens whose ratio left the clipping range: no gradient."),
    "gap": Name(
        "|log-probability of trainer - of sampler|",
        "Of the sampled tokens. It should stay small: the trainer learns from what the sampler wrote.",
    ),
    "ratio": Name("trainer's / sampler's probability", "Share of the sampled tokens by this ratio; 1 is on-policy."),
    "exam": Name("held-out prompts answered right", "pass@k: one of k answers is right; maj@k: the commonest is."),
    "filled": Name("filled rows", "Share of the training rows' places that hold tokens; the rest is padding."),
    "draws": Name("draws per step", "Rollouts until enough groups had rewards that differ (loss.dynamic)."),
    "goodput": Name("goodput", "Share of the wall time in steps that count. The rest is listed below."),
}


def name_of(metric: str) -> Name:
    """Return its title and explanation; for a metric that is not listed, its own name."""
    return _NAMES.get(metric, Name(metric.replace("_", " ")))
