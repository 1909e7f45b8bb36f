"""The numbers that an objective logs beside the loss: in the bar and the trackers' curves.

A new metric of an objective is logged and tracked by itself; a line in BAR gives it a place behind the bar, and one in
TITLES of curves.py a chart in the report.
"""

from llava_ds.tracking.series import is_number

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


def objective_numbers(row: dict) -> dict[str, float]:
    """What a row of metrics.jsonl has from its objective."""
    return {name: value for name, value in row.items() if name not in COLUMNS and is_number(value)}


def bar_parts(row: dict) -> list[str]:
    """Words for the bar."""
    numbers = objective_numbers(row)
    return [shown.format(numbers[name]) for name, shown in BAR.items() if name in numbers]
