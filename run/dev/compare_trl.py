"""Check TRL's formulas against the numbers in our tests: run/dev/compare_trl.py --trl_python PYTHON

TRL computes losses and advantages for made-up log-probabilities. They must equal those in
tests/helpers/trl_losses.json, used by make test to check our losses; --write updates the file. TRL runs in its own
environment with the interpreter PYTHON: make compare-trl creates it.
"""

import sys

from llava_ds.runtime.command import Parser, begin, exit_with, new_folder

if __name__ == "__main__":
    begin("run/dev/compare_trl.py")


import argparse
import json
import os
import subprocess
from functools import partial
from pathlib import Path

import numpy as np

from llava_ds.constants import ConfigError
from llava_ds.tiny import LLAMA_PATH

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "helpers" / "trl_losses.json"
LIMIT = 1e-5  # largest difference of a loss or an advantage
PAIRS, PROMPTS, GENERATIONS, LONGEST, END = 3, 3, 4, 5, 2
SMOOTHED = {"loss_types": ["aot"], "label_smoothing": 0.2}  # for a single pair, equal to the smoothed sigmoid
PAIR_CASES = [
    {"loss_types": ["sigmoid"]}, {"loss_types": ["hinge"]}, {"loss_types": ["ipo"]}, {**SMOOTHED, "alone": True},
    {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "alone": True},
    {"trainer": "cpo", "beta": 2.0, "simpo_gamma": 0.7}, {"trainer": "cpo", "simpo_gamma": 0.3, "label_smoothing": 0.1},
]  # fmt: skip
# Generated last, so that the cases above keep their numbers.
WITHOUT_REFERENCE_CASES = [
    {"trainer": "cpo", "loss_types": ["sigmoid"], "label_smoothing": 0.1},
    {"trainer": "cpo", "loss_types": ["sigmoid"], "cpo_alpha": 0.5, "alone": True},
    {"trainer": "cpo", "loss_types": ["sigmoid"], "cpo_alpha": 1.0, "alone": True},
    {"trainer": "orpo", "beta": 0.1, "alone": True}, {"trainer": "orpo", "beta": 0.5, "alone": True},
]  # fmt: skip
ANSWER_CASES = [{"beta": 0.1}, {"beta": 0.5, "weights": [1.3, 0.6]}, {"beta": 0.3, "far": True}]
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


def main(argv: list[str]) -> None:
    """Compare, or write the file."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl_python", required=True, help="interpreter of TRL's environment")
    parser.add_argument("--output_dir", type=new_folder, default="output/compare-trl", help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="update the tests' file")
    own = parser.parse_args(argv)
    folder = Path(own.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = by_trl(own.trl_python, folder)
    print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    if own.write:
        FIXTURE.write_text(as_text(found), encoding="utf-8")
        return
    known = json.loads(FIXTURE.read_text(encoding="utf-8"))
    differences = [
        (difference(one, other), name)
        for name, ours, theirs in (
            ("pairs", known["pairs"], found["pairs"]),
            ("answers", known["answers"], found["answers"]),
            ("policy", known["policy"]["results"], found["policy"]["results"]),
        )
        for one, other in zip(ours, theirs, strict=True)
    ]
    largest, name = max(differences)
    print(f"{len(differences)} cases differ by at most {largest:.1e} from {FIXTURE.relative_to(ROOT)}")
    if not largest < LIMIT:
        raise ConfigError(f"the numbers of {name} differ by {LIMIT:g} or more: check TRL's changes, then use --write")


def difference(known: dict, found: dict) -> float:
    """Return the largest difference between two results' losses and advantages."""
    numbers = ([each["loss"], *each.get("advantages", [])] for each in (known, found))
    return float(np.abs(np.subtract(*numbers)).max())


def by_trl(python: str, folder: Path) -> dict[str, object]:
    """Return inputs and TRL's results: versions, pairs, answers and policy, in the form of the tests' file."""
    rng = np.random.default_rng(7)
    pairs, policy = pair_cases(rng, PAIR_CASES), policy_inputs(rng)
    pairs += pair_cases(rng, WITHOUT_REFERENCE_CASES)
    answers = answer_cases(rng)
    given, results, log = (folder / name for name in ("given.json", "results.json", "log.txt"))
    given.write_text(json.dumps({"model": str(LLAMA_PATH), "pairs": pairs, "answers": answers, "policy": policy}))
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_DATASETS_CACHE": str(folder / "trl")}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [python, str(Path(__file__).with_name("benchmark") / "trl_side.py"), str(given), str(results)]
    environ = {**kept, "OMP_NUM_THREADS": "1", **quiet}
    with log.open("w") as file:
        done = subprocess.run(command, env=environ, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ConfigError(f"{command[1]} failed, see its log {log}:\n{log.read_text()[-3000:]}")
    found = json.loads(results.read_text())
    for case, loss in zip([*pairs, *answers], [*found["pairs"], *found["answers"]], strict=True):
        case["loss"] = loss
    settings = policy.pop("settings")
    policy["results"] = [{"settings": one, **each} for one, each in zip(settings, found["policy"], strict=True)]
    return {"versions": found["versions"], "pairs": pairs, "answers": answers, "policy": policy}


def as_text(found: dict[str, object]) -> str:
    """Format as JSON with a line per case."""

    def in_lines(values: list) -> str:
        return "[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]"

    policy = "".join(f'  "{name}": {in_lines(values)},\n' for name, values in found["policy"].items())
    parts = [f'"versions": {json.dumps(found["versions"])}']
    parts += [f'"{name}": {in_lines(found[name])}' for name in ("pairs", "answers")]
    return "{\n" + ",\n".join([*parts, f'"policy": {{\n{policy[:-2]}\n}}']) + "\n}\n"


def pair_cases(rng: np.random.Generator, given: list[dict]) -> list[dict]:
    """Complete cases: lengths (B, 2), rows of log-probabilities with chosen answers first, and reference (B, 2)."""
    cases = []
    for case in given:
        number = 1 if case.get("alone") else PAIRS
        lengths = rng.integers(1, LONGEST + 1, (number, 2))
        rows = [logs(rng, size) for size in lengths.T.flatten()]
        sums = np.array([sum(row) for row in rows]).reshape(2, number).T
        reference = np.round(sums + rng.normal(0, 2, sums.shape), 4)
        defaults = {"trainer": "dpo", "beta": 0.3, "label_smoothing": 0.0, "simpo_gamma": 0.0, "loss_weights": None}
        values = {"lengths": lengths.tolist(), "rows": rows, "reference": reference.tolist()}
        cases.append({**defaults, **case, **values})
    return cases


def answer_cases(rng: np.random.Generator) -> list[dict]:
    """Generate labelled answers: log-probabilities of each and of a mismatched one, and both under the reference."""
    cases = []
    for case in ANSWER_CASES:
        rows, other = ([logs(rng, int(rng.integers(1, LONGEST + 1))) for _ in range(2 * PAIRS)] for _ in range(2))
        near, far = (np.round([sum(row) + rng.normal(0, 2) for row in each], 4) for each in (rows, other))
        far += 5 if case.get("far") else -1  # makes the KL estimate negative, or positive
        values = {"rows": rows, "mismatched": other, "reference": near.tolist(), "mismatched_reference": far.tolist()}
        cases.append({"weights": [1.0, 1.0], **case, "labels": [bool(i % 3) for i in range(2 * PAIRS)], **values})
    return cases


def policy_inputs(rng: np.random.Generator) -> dict[str, list]:
    """Generate groups of answers, two equal and some cut off, with log-probabilities under three models."""
    groups, rows = [], []
    for i in range(PROMPTS):
        answers, rewards = [], []
        for j in range(GENERATIONS):
            size, ended = int(rng.integers(1, LONGEST + 1)), bool(rng.random() < 0.6)
            ids = [*rng.integers(10, 300, size - 1).tolist(), END if ended else 300]
            triple = [logs(rng, size)]
            triple += [[round(value + rng.normal(0, 0.3), 4) for value in triple[0]] for _ in range(2)]
            reward = float(rng.integers(0, 4)) if i else 1.5  # equal rewards in the first group
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
    """Generate log-probabilities."""
    return np.round(-rng.exponential(1.5, number), 4).tolist()


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/dev/compare_trl.py")
