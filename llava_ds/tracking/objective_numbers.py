"""The numbers that an objective logs beside the loss: in the bar, the trackers' curves and the report.

A new metric of an objective is logged and tracked by itself; a line in TITLES gives it a chart in the report, and one
in BAR a place behind the bar.
"""

from llava_ds.tracking.blocks import Block, charts
from llava_ds.tracking.curves import smoothed
from llava_ds.tracking.run_files import RunFiles, is_number

# Of every row of metrics.jsonl, whatever the objective.
COLUMNS = frozenset(
    {
        "step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "step_time_s",
        "data_wait_s", "tokens_per_s", "mfu", "peak_memory_bytes", "skipped_steps", "broken_samples",
        "source_losses", "micro_batch_losses",
    }
)  # fmt: skip

BAR = {
    "reward": "reward {:.3f}",
    "rewards/accuracies": "accuracy {:.1%}",
    "frac_reward_zero_std": "no signal {:.0%}",
    "completions/mean_length": "length {:.1f}",
    "entropy": "entropy {:.2g}",
    "kl": "KL {:.2g}",
    "objective/kl": "KL {:.2g}",
    "clip_ratio/region_mean": "clipped {:.1%}",
    "policy/clipfrac_avg": "clipped {:.1%}",
    "experts/max_over_mean": "busiest expert {:.1f}x",
}

TITLES = {
    "reward": "Reward of answers",
    "reward_std": "Spread of rewards among the answers to a prompt",
    "frac_reward_zero_std": "Share of prompts whose answers are all rewarded alike",
    "completions/mean_length": "Length of answers, tokens",
    "completions/clipped_ratio": "Share of answers that came to no end",
    "entropy": "Entropy of answers, per token",
    "kl": "Distance from the reference model (KL), per token",
    "objective/kl": "Distance from the reference model (KL), per answer",
    "clip_ratio/region_mean": "Share of tokens whose ratio is clipped",
    "policy/clipfrac_avg": "Share of tokens whose ratio is clipped",
    "loss/value_avg": "Loss of the critic",
    "val/explained_variance": "Share of the returns' variance that the critic explains",
    "sampling_gap": "Log-probabilities when drawn and when trained: mean difference",
    "rewards/accuracies": "Share of pairs whose chosen answer is ahead",
    "rewards/margins": "How far the chosen answer is ahead",
    "rewards/chosen": "Reward of chosen answers",
    "rewards/rejected": "Reward of rejected answers",
    "logps/chosen": "Log-probability of chosen answers",
    "logps/rejected": "Log-probability of rejected answers",
    "experts/max_over_mean": "Tokens of the busiest expert, by the mean over experts",
    "experts/entropy": "Entropy of the experts' load, 1 is even",
    "experts/aux_loss": "Load-balancing loss of the routers",
}


def objective_numbers(row: dict) -> dict[str, float]:
    """What a row of metrics.jsonl has from its objective."""
    return {name: value for name, value in row.items() if name not in COLUMNS and is_number(value)}


def bar_parts(row: dict) -> list[str]:
    """Words for the bar."""
    numbers = objective_numbers(row)
    return [shown.format(numbers[name]) for name, shown in BAR.items() if name in numbers]


def objective_curves(run: RunFiles) -> list[Block]:
    """A chart of every number that has a title, and of several rewards each; nothing for supervised training."""
    found = dict.fromkeys(name for row in run.metrics for name in objective_numbers(row))
    rewards = [name for name in found if name.startswith("rewards/") and name.endswith("/mean")]
    titles = TITLES | ({name: f"Reward: {name.split('/')[1]}" for name in rewards} if len(rewards) > 1 else {})
    curves = [smoothed(run, title, name, log=False) for name, title in titles.items() if name in found]
    return [charts(curves)] if curves else []
