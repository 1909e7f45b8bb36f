"""Losses of run/train.py and of TRL's trainers on the same model, data and optimizer, compared step by step."""

import json

from benchmark import trl_data
from benchmark.trl_runs import Sides

STEPS, BATCH = 10, 8
OPTIMIZER = {"learning_rate": 1e-4, "max_grad_norm": 1.0}

# Flags of run/train.py, with TRL's trainer and its settings. In batches of one pair, accumulated to a step, TRL's aot
# is the smoothed sigmoid, and its mean over the chosen tokens of a batch is the mean over an answer's.
ALONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
WHOLE = {"per_device_train_batch_size": BATCH}
SIMPO = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1}
PAIRS: dict[str, tuple[dict, str, dict]] = {
    "sigmoid": ({}, "dpo", {"loss_type": ["sigmoid"], **WHOLE}),
    "hinge": ({"loss_type": "hinge"}, "dpo", {"loss_type": ["hinge"], **WHOLE}),
    "ipo": ({"loss_type": "ipo", "beta": 0.5}, "dpo", {"loss_type": ["ipo"], "beta": 0.5, **WHOLE}),
    "label_smoothing": ({"label_smoothing": 0.1}, "dpo", {"loss_type": ["aot"], "label_smoothing": 0.1, **ALONE}),
    "rpo_alpha": ({"rpo_alpha": 1.0}, "dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0], **ALONE}),
    "simpo": (SIMPO, "cpo", {**SIMPO, "cpo_alpha": 0.0, **WHOLE}),
}

# Flags of GRPO, whose names are TRL's own. With two iterations ratios leave 1.
TWICE = {"num_iterations": 2}
POLICIES: dict[str, dict] = {
    "dapo": TWICE,
    "grpo": {"loss_type": "grpo", **TWICE},
    "dr_grpo": {"loss_type": "dr_grpo", **TWICE},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", **TWICE},
    "beta and epsilon_high": {"beta": 0.1, "epsilon_high": 0.28, "use_bias_correction_kl": False, **TWICE},
    "use_bias_correction_kl": {"beta": 0.1, "use_bias_correction_kl": True, **TWICE},
    "batch, one iteration": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none", **TWICE},
    "mask_truncated_completions": {"mask_truncated_completions": True, **TWICE},
}
REWARD = '''
def even(prompts, completions, references, ids):
    """The share of letters in the first half of the alphabet, in eighths, so that answers are more than right or wrong.

    Of other numbers TRL's means in float32 leave advantages to groups whose rewards are all equal.
    """
    letters = [[c for c in text.lower() if c.isalpha()] for text in completions]
    return [round(8 * sum(c < "n" for c in each) / max(1, len(each))) / 8 for each in letters]
'''
PROMPTS, GENERATIONS, MOST_TOKENS, POLICY_STEPS, POLICY_RATE = 8, 8, 8, 4, 5e-4
POLICY_BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": PROMPTS * GENERATIONS // 16}


def equal_pairs(sides: Sides, has_images: bool) -> dict[str, dict[str, float]]:
    """Largest differences of preference optimisation over STEPS steps, by case. Raises AssertionError where the sides
    did not see the same tokens."""
    data = sides.folder / ("pairs-with-images" if has_images else "pairs")
    trl_data.write_pairs(data, STEPS * BATCH, has_images)
    common = {**OPTIMIZER, "max_steps": STEPS, "objective": "dpo", **WHOLE, "train_batch_size": BATCH}
    cases = {name: case for name, case in PAIRS.items() if not has_images or case[1] == "dpo"}
    ours = sides.ours(
        {name: {"flags": {**sides.flags(data, name), **common, **flags}} for name, (flags, _, _) in cases.items()}
    )
    job = {"kind": "preferences", "data": data / "trl.json"}
    settings = {**OPTIMIZER, "max_steps": STEPS, "logging_steps": 1, "max_length": 1024}
    theirs = sides.trl(
        {
            name: {**job, "trainer": trainer, "settings": {**settings, **more}}
            for name, (_, trainer, more) in cases.items()
        }
    )
    found = {}
    for name in cases:
        refuse_other_batches(name, ours[name]["batches"], theirs[name]["batches"], sides.image_id)
        names = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen")
        found[f"{data.name}: {name}"] = differences(ours[name]["log"], theirs[name]["log"], names)
    return found


def refuse_other_batches(name: str, ours: list, theirs: list, image_id: int) -> None:
    """Raise AssertionError where ids or supervised ids of a step differ."""
    ours = [[[[image_id if i < 0 else i for i in ids], targets] for ids, targets in step] for step in ours]
    of_step = len(theirs) // len(ours)
    steps = [theirs[i : i + of_step] for i in range(0, len(theirs), of_step)]
    halves = [[(part[: len(part) // 2], part[len(part) // 2 :]) for part in step] for step in steps]
    theirs = [[row for half in zip(*step) for part in half for row in part] for step in halves]
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        for place, (row, wanted) in enumerate(zip(own, other, strict=True)):
            assert row == wanted, f"{name}, step {step}, row {place}: {row} here, {wanted} in TRL"


def equal_policies(sides: Sides) -> dict[str, dict[str, float]]:
    """Largest differences of GRPO on the answers that run/train.py drew, by case."""
    data, rule = sides.folder / "questions", sides.folder / "reward.py"
    records = trl_data.write_questions(data, PROMPTS * POLICY_STEPS, caption_every=3)
    rule.write_text(REWARD)
    common = {
        **OPTIMIZER, "learning_rate": POLICY_RATE, "max_steps": POLICY_STEPS, "objective": "grpo",
        "reward_funcs": f"{rule}:even", "num_generations": GENERATIONS, "max_completion_length": MOST_TOKENS,
        "train_batch_size": PROMPTS, "per_device_train_batch_size": PROMPTS, "tokens_per_micro_batch": 2048,
    }  # fmt: skip
    ours = sides.ours(
        {name: {"flags": {**sides.flags(data, name), **common, **flags}} for name, flags in POLICIES.items()}
    )
    jobs = {}
    for i, (name, flags) in enumerate(POLICIES.items()):
        rollouts = sides.folder / f"rollouts-{i}.json"
        drawn = trl_data.rollouts_for_trl(ours[name]["rollouts"], records, data, sides.image_id)
        rollouts.write_text(json.dumps(drawn))
        steps = POLICY_STEPS * flags.get("num_iterations", 1)
        settings = {**OPTIMIZER, "learning_rate": POLICY_RATE, "max_steps": steps, "logging_steps": 1, **POLICY_BATCH}
        settings |= {"max_completion_length": MOST_TOKENS, **flags}
        jobs[name] = {"kind": "policy", "data": rollouts, "settings": settings}
    theirs, found = sides.trl(jobs), {}
    for name, flags in POLICIES.items():
        log, times = theirs[name]["log"], flags.get("num_iterations", 1)
        steps = [log[i : i + times] for i in range(0, len(log), times)]
        means = [{"loss": sum(row["loss"] for row in rows) / times} for rows in steps]
        found[f"grpo: {name}"] = differences(ours[name]["log"], means, ("loss",))
    return found


def differences(ours: list[dict], theirs: list[dict], names: tuple[str, ...]) -> dict[str, float]:
    """The largest difference of each number over all steps."""
    return {name: max(abs(own[name] - other[name]) for own, other in zip(ours, theirs, strict=True)) for name in names}
