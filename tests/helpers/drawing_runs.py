"""Runs of GRPO and PPO on toy models, small enough to be started by the dozen."""

import json
from pathlib import Path

from extension_there import if_there
from known_flags import known
from launching import ds_config, toy_run

TIMES = ("step_time_s", "data_wait_s", "tokens_per_s", "mfu", "peak_memory_bytes")
RULES = '''
def even(prompts, completions, references, ids):
    """The share of letters in the first half of the alphabet: a random model samples answers of both kinds."""
    shares = []
    for text in completions:
        letters = [c for c in text.lower() if c.isalpha()]
        shares.append(sum(c < "n" for c in letters) / max(1, len(letters)))
    return shares


def half(**lists):
    return [float(share > 0.75) for share in even(**lists)]
'''
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 16, "lora_dropout": 0.0}
# Flags of runs.
KINDS = {
    "plain": {},
    "held": {
        "beta": 0.1,
        "num_iterations": 2,
        "epsilon_high": 0.28,
        "loss_type": "dr_grpo",
        "importance_sampling_level": "sequence",
        "scale_rewards": "batch",
    },
    "critic": {
        "objective": "ppo",
        "num_iterations": 2,
        "critic_learning_rate": 5e-4,
        "vf_coef": 0.5,
        "max_grad_norm": 1.0,
        **if_there("auto_layers", gradient_checkpointing="auto"),
        **if_there("replicas", check_divergence_steps=1),
    },
    "adapters": {**LORA, "beta": 0.1, "temperature": 0.7, "top_k": 300, "top_p": 0.9},
    "refilled": {"reward_funcs": "rules.py:half", "reward_weights": "1", "dynamic_sample": True},
    "critic-adapters": {**LORA, "objective": "ppo", "temperature": 1.3},
    "rloo": {"loss_type": "rloo", "beta": 0.1, "entropy_coef": 0.01},
}
KINDS = {name: flags for name, flags in KINDS.items() if known(flags)}


def flags_of(folder: Path, given: dict, name: str, stage: int, **more: object) -> dict[str, object]:
    """Flags of a run in folder/name, 4 steps long. The folder has rules.py with RULES; given: base model and data."""
    more = {
        "objective": "grpo",
        "reward_funcs": "rules.py:even,length",
        "reward_weights": "1,0.5",
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_generation_batch_size": 2,
        "tokens_per_micro_batch": 300,
        "max_steps": 4,
        "report_to": "none",
        **more,
    }
    more["reward_funcs"] = more["reward_funcs"].replace("rules.py", str(folder / "rules.py"))
    return toy_run(given, folder / name, ds_config(stage), **more)


def read_rollouts(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]
