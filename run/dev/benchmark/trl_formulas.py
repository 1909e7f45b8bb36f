"""Numbers that TRL's formulas give of made-up log-probabilities, for a test of ours that needs no TRL."""

import json
from pathlib import Path

import numpy as np
from benchmark.trl_runs import Sides

PAIRS, PROMPTS, GENERATIONS, LONGEST, END = 3, 3, 4, 5, 2
SMOOTHED = {"loss_types": ["aot"], "label_smoothing": 0.2}  # of one pair, it is the smoothed sigmoid
PAIR_CASES = [
    {"loss_types": ["sigmoid"]}, {"loss_types": ["hinge"]}, {"loss_types": ["ipo"]}, {**SMOOTHED, "alone": True},
    {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "alone": True},
    {"trainer": "cpo", "beta": 2.0, "simpo_gamma": 0.7}, {"trainer": "cpo", "simpo_gamma": 0.3, "label_smoothing": 0.1},
]  # fmt: skip
POLICY_SETTINGS = [
    {"loss_type": kind, "importance_sampling_level": level, "scale_rewards": scale, **more}
    for kind in ("dapo", "grpo", "dr_grpo")
    for level, scale, more in (
        ("token", "group", {}),
        ("token", "batch", {"beta": 0.2, "epsilon_high": 0.28, "use_bias_correction_kl": False}),
        ("sequence", "none", {"beta": 0.1, "use_bias_correction_kl": True}),
        ("token", "group", {"mask_truncated_completions": True, "epsilon": 0.1}),
        ("token", "group", {"mask_truncated_completions": True, "beta": 0.1, "use_bias_correction_kl": True}),
    )
]


def write_fixture(sides: Sides, path: Path) -> None:
    """Write inputs and TRL's results."""
    rng = np.random.default_rng(7)
    pairs, given = pair_cases(rng), policy_inputs(rng)
    files = {"pair_formulas": pairs, "policy_formulas": given}
    for kind, content in files.items():
        (sides.folder / f"{kind}.json").write_text(json.dumps(content))
    found = sides.trl({kind: {"kind": kind, "data": sides.folder / f"{kind}.json"} for kind in files})
    for case, loss in zip(pairs, found["pair_formulas"], strict=True):
        case["loss"] = loss
    results = [
        {"settings": settings, **result}
        for settings, result in zip(given.pop("settings"), found["policy_formulas"], strict=True)
    ]
    policy = "".join(f'  "{name}": {in_lines(values)},\n' for name, values in {**given, "results": results}.items())
    text = f'"versions": {json.dumps(sides.versions)},\n"pairs": {in_lines(pairs)},\n"policy": {{\n{policy[:-2]}\n}}'
    path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def in_lines(values: list) -> str:
    """A JSON list with a line for each value."""
    return "[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]"


def pair_cases(rng: np.random.Generator) -> list[dict]:
    """Cases with lengths (B, 2), rows of log-probabilities, chosen answers first, and reference (B, 2)."""
    cases = []
    for case in PAIR_CASES:
        number = 1 if case.get("alone") else PAIRS
        lengths = rng.integers(1, LONGEST + 1, (number, 2))
        rows = [logs(rng, size) for size in lengths.T.flatten()]
        sums = np.array([sum(row) for row in rows]).reshape(2, number).T
        reference = np.round(sums + rng.normal(0, 2, sums.shape), 4)
        defaults = {"trainer": "dpo", "beta": 0.3, "label_smoothing": 0.0, "simpo_gamma": 0.0, "loss_weights": None}
        values = {"lengths": lengths.tolist(), "rows": rows, "reference": reference.tolist()}
        cases.append({**defaults, **case, **values})
    return cases


def policy_inputs(rng: np.random.Generator) -> dict[str, list]:
    """Groups of answers, two of which are equal and some cut off, with log-probabilities under three models."""
    groups, rows = [], []
    for i in range(PROMPTS):
        answers, rewards = [], []
        for j in range(GENERATIONS):
            size, ended = int(rng.integers(1, LONGEST + 1)), bool(rng.random() < 0.6)
            ids = [*rng.integers(10, 300, size - 1).tolist(), END if ended else 300]
            triple = [logs(rng, size)]
            triple += [[round(value + rng.normal(0, 0.3), 4) for value in triple[0]] for _ in range(2)]
            reward = float(rng.integers(0, 4)) if i else 1.5  # all of the first group have one reward
            if j == 1:
                ids, ended, triple, reward = answers[0]["ids"], answers[0]["ended"], rows[-1], rewards[0]
            answers.append({"ids": ids, "ended": ended, "log_probs": triple[0]})
            rewards.append(reward)
            rows.append(triple)
        question = f"Is there a red circle, number {i}?"
        ids = rng.integers(10, 300, 6).tolist()
        groups.append({"question": question, "image": None, "prompt_ids": ids, "answers": answers, "rewards": rewards})
    named = {name: [triple[k] for triple in rows] for k, name in enumerate(("old", "rows", "frozen"))}
    return {"groups": groups, **named, "settings": POLICY_SETTINGS}


def logs(rng: np.random.Generator, number: int) -> list[float]:
    """Log-probabilities."""
    return np.round(-rng.exponential(1.5, number), 4).tolist()
