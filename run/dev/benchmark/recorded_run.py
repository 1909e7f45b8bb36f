"""Runs of run/train.py in one process whose batches and rollouts are noted: recorded_run.py JOBS.json

Started by run/dev/compare_trl.py. JOBS.json is a list of jobs: the flags, and the file that gets the log, the batches
of preference optimisation and the rollouts of GRPO.
"""

import importlib.util
import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from llava_ds.constants import IGNORE_INDEX
from llava_ds.files.jsonl import read_metrics
from llava_ds.train.session import Session

TRAIN = Path(__file__).parents[2] / "train.py"


def batches_of(steps) -> list[list]:
    """(ids, supervised ids) of every sample of every step, chosen answers first; image positions are negative."""
    found = []
    for layout in steps.after(0):
        pairs = [steps.dataset[i] for i in layout.samples]
        samples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        found.append([[s.input_ids.tolist(), s.labels[s.labels != IGNORE_INDEX].tolist()] for s in samples])
    return found


def row_of(group) -> dict[str, object]:
    """A prompt with its answers and rewards."""
    asked = group.prompt
    return {
        "id": asked.id,
        "prompt_ids": asked.sample.input_ids.tolist(),
        "answers": [vars(answer) for answer in group.answers],
        "rewards": group.rewards.tolist(),
    }


def run(train, flags: dict[str, object]) -> dict[str, object]:
    """Run once. train: run/train.py as a module; nothing is exported."""
    batches, rollouts = [], []
    windows = Session.windows

    def noted(session: Session):
        if session.plan.args.training.objective == "dpo":
            batches.extend(batches_of(session.plan.steps))
        for part in session.parts:
            if hasattr(part, "_score"):  # it draws answers
                part._score = partial(scored, part._score)
        return windows(session)

    def scored(score, prompts, answers):
        groups = score(prompts, answers)
        rollouts.append([row_of(group) for group in groups])
        return groups

    with ExitStack() as stack:
        stack.enter_context(patch.object(Session, "windows", noted))
        stack.enter_context(patch.object(train, "finish", lambda session, hooks: session.trackers.close()))
        train.main([token for name, value in flags.items() for token in (f"--{name}", str(value))])
    log = read_metrics(Path(flags["output_dir"]) / "metrics.jsonl")
    return {"log": log, "batches": batches, "rollouts": rollouts}


def main() -> None:
    """Do the jobs, one after the other."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["result"]).write_text(json.dumps(run(train, job["flags"])))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
