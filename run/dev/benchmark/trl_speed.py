"""Seconds of the same optimizer steps by run/train.py and by TRL's trainers, on one core each, in turns."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmark import trl_data
from benchmark.comparison import Spread, turns
from benchmark.trl_equal import REWARD, write_rollouts
from benchmark.trl_runs import Sides

STEPS = 7  # the first of which only warms up
PAIRS, PROMPTS, GENERATIONS = 16, 8, 16  # of a step
OURS, TRL = "llava_ds", "TRL"
OPTIMIZER = {"learning_rate": 1e-4, "max_grad_norm": 1.0}
TOKENS = 4096  # of one of our micro-batches


@dataclass(frozen=True)
class Case:
    """The same steps on both sides. units: prompts of a step; batches: sizes of TRL's micro-batches, of which the
    fastest is taken, in rows that fill a step of so many with num_rows."""

    flags: dict[str, object]
    job: dict[str, object]
    units: int
    num_rows: int
    batches: tuple[int, ...]
    rollouts: Path | None = None

    def trl_job(self, batch: int) -> dict[str, object]:
        """TRL's job with micro-batches of so many rows."""
        layout = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": self.num_rows // batch}
        settings = {**OPTIMIZER, "max_steps": STEPS, "logging_steps": STEPS, **layout, **self.job.get("settings", {})}
        return {"records_batches": False, **self.job, "settings": settings}


def pairs(sides: Sides) -> Case:
    """DPO on questions and descriptions with images."""
    data = sides.folder / "speed-pairs"
    trl_data.write_pairs(data, (STEPS + 1) * PAIRS, has_images=True)
    flags = {"objective": "dpo", "train_batch_size": PAIRS, "per_device_train_batch_size": PAIRS}
    job = {"kind": "preferences", "trainer": "dpo", "data": data / "trl.json", "settings": {"max_length": None}}
    return Case({**sides.flags(data, "dpo"), **flags}, job, PAIRS, PAIRS, (2, 4, 8))


def policies(sides: Sides, name: str, reward: str, most_tokens: int, **kinds: int) -> Case:
    """GRPO on answers that run/train.py has drawn before."""
    data, rollouts, rule = (sides.folder / f"speed-{name}{end}" for end in ("", ".json", ".py"))
    records = trl_data.write_questions(data, (STEPS + 1) * PROMPTS, **kinds)
    rule.write_text(REWARD)
    flags = {
        **sides.flags(data, name), "objective": "grpo", "reward_funcs": reward.format(rule),
        "num_generations": GENERATIONS, "max_completion_length": most_tokens, "train_batch_size": PROMPTS,
        "per_device_train_batch_size": PROMPTS,
    }  # fmt: skip
    drawn = sides.ours({"drawn": {"flags": with_layout(flags)}})["drawn"]["rollouts"]
    write_rollouts(sides, rollouts, drawn, records, data)
    job = {"kind": "policy", "data": rollouts, "settings": {"max_completion_length": most_tokens}}
    return Case(flags, job, PROMPTS, PROMPTS * GENERATIONS, (8, 32, 128), rollouts)


CASES: dict[str, Callable[[Sides], Case]] = {
    "dpo": pairs,
    "grpo-mix": lambda sides: policies(sides, "mix", "exact", 8),
    "grpo-count": lambda sides: policies(sides, "count", "exact", 8, counts_only=True),
    "grpo-captions": lambda sides: policies(sides, "captions", "{}:even", 48, caption_every=1),
}


def with_layout(flags: dict) -> dict[str, object]:
    """Our flags of a timed run, with one step more, for the last one's end is not noted."""
    return {**flags, **OPTIMIZER, "max_steps": STEPS + 1, "tokens_per_micro_batch": TOKENS}


def compare_speed(sides: Sides, name: str, rounds: int) -> dict[str, object]:
    """Time a case. Returns all measurements; prints the medians."""
    case = CASES[name](sides)
    sides.core = max(os.sched_getaffinity(0))
    tried = sides.trl({str(batch): case.trl_job(batch) for batch in case.batches})
    batch = int(min(tried, key=lambda key: counted(tried[key], "cpu_s")))
    runs: dict[str, list[dict]] = {OURS: [], TRL: []}
    for _, side in turns((OURS, TRL), rounds):
        if side == TRL:
            runs[TRL].append(sides.trl({name: case.trl_job(batch)})[name])
            continue
        cache = sides.folder / "speed-cache"  # with a new one the reference is computed again
        shutil.rmtree(cache, ignore_errors=True)
        job = {"flags": {**with_layout(case.flags), "cache_dir": cache}, "rollouts": case.rollouts}
        runs[OURS].append(sides.ours({name: job})[name])
    found = {
        "trl_batch": batch,
        "trl_tried": {key: counted(run, "cpu_s") for key, run in tried.items()},
        "loss": [sum(row["loss"] for row in runs[OURS][0]["log"][:STEPS]) / STEPS, runs[TRL][0]["log"][0]["loss"]],
        "tiles per prompt": tiles(case, runs),
        **{kind: times(runs, kind) for kind in ("cpu_s", "wall_s")},
    }
    show(name, found)
    return found


def counted(run: dict, kind: str) -> float:
    """Seconds of the steps that count."""
    return sum(run[kind][1:STEPS])


def reference(run: dict, kind: str) -> float:
    """Seconds of the pass for the reference, for as many of the data as the steps that count have."""
    return run["reference"][kind] * (STEPS - 1) / (STEPS + 1)


def times(runs: dict[str, list[dict]], kind: str) -> dict[str, object]:
    """Seconds of every round, and the spread of their ratios."""
    ours, trl = ([counted(run, kind) for run in runs[side]] for side in (OURS, TRL))
    whole = [seconds + reference(run, kind) for seconds, run in zip(ours, runs[OURS])]
    ratios = {
        "ratio": Spread.of([b / a for a, b in zip(ours, trl)]),
        "ratio with the reference": Spread.of([b / a for a, b in zip(whole, trl)]),
    }
    return {OURS: ours, TRL: trl, "with reference": whole, **{key: vars(value) for key, value in ratios.items()}}


def tiles(case: Case, runs: dict[str, list[dict]]) -> dict[str, float]:
    """Tiles through the tower for each prompt: of both sides, and for the reference."""
    ours, trl = runs[OURS][0]["tiles"], runs[TRL][0]["tiles"]
    return {
        OURS: ours["steps"] / (case.units * (STEPS + 1)),
        f"{OURS}, reference": ours["reference"] / (case.units * (STEPS + 1)),
        TRL: trl["policy"] / (case.units * STEPS),
        f"{TRL}, reference": trl.get("reference", 0) / (case.units * STEPS),
    }


def show(name: str, found: dict) -> None:
    """Print a case."""
    print(f"{name}: TRL's micro-batches of {found['trl_batch']} rows; mean losses {found['loss']}")
    print(f"  tiles per prompt: {found['tiles per prompt']}")
    for kind in ("cpu_s", "wall_s"):
        row = found[kind]
        for what in ("ratio", "ratio with the reference"):
            value = row[what]
            print(f"  {kind}, {what}: {value['median']:.2f} ({value['least']:.2f} to {value['most']:.2f})")
